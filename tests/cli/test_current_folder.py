"""No module is imported from the folder that a command is started in, which may be a stranger's."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from headway.cli.main import VERBS
from tests.support.commands import ROOT
from tests.support.scenarios import SMALL
from tests.support.studio import ask

OPTIONAL = ("vllm", "sglang", "triton", "uvloop", "brotli", "zstandard", "orjson", "lz4", "tomli")
OURS = {"headway", "simulator", "calibration", "gpu_backend"}
OTHERS = {*packages_distributions(), *OPTIONAL, "sitecustomize"}
NAMES = {*sys.stdlib_module_names, *OTHERS, *OURS}
TRAP = "open({!r}, 'w').close()\nraise RuntimeError('a file of the current folder was imported')\n"
CASES = Path(ROOT) / "tests" / "conformance"
SWEPT = ("sweep", "small.yaml", "--vary", "seed=1,2,3,4", "--jobs", "2", "--out")


@pytest.fixture
def traps(folder: Path) -> Path:
    """A folder where a module of each name would leave a file in `sprung` if it were imported."""
    (folder / "sprung").mkdir()
    for name in NAMES:
        if re.fullmatch(r"\w+", name):
            (folder / f"{name}.py").write_text(TRAP.format(str(folder / "sprung" / name)))
    return folder


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that start the command as its installed script does."""
    script = tmp_path_factory.mktemp("bin") / "headway"
    script.write_text("from headway.__main__ import *\nif __name__ == '__main__': command()\n")
    return [sys.executable, str(script)]


def run(command: list[str], *words: str, code: int = 0) -> None:
    """Run a command to its end."""
    environment = os.environ | {
        "PYTHONPATH": ROOT,
        "SHELL": "/bin/bash",
        "HOME": os.path.abspath("home"),
    }
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert done.returncode == code, done.stderr


@contextlib.contextmanager
def running(command: list[str], *words: str) -> Iterator[int]:
    """Run a server until Ctrl-C; give its port."""
    environment = os.environ | {"PYTHONPATH": ROOT}
    environment.pop("PYTHONSAFEPATH", None)
    words = (*words, "--port", "0")
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r":(\d+)/", server.stdout.readline())
            assert found
            yield int(found.group(1))
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
            assert server.returncode == 0
        finally:
            server.kill()


@pytest.mark.slow
def test_no_verb_imports_from_the_current_folder(traps: Path, command: list[str]) -> None:
    pytest.importorskip("torch")
    shutil.copy(CASES / "cases" / "windows.jsonl.gz", "case.jsonl.gz")
    shutil.copy(CASES / "golden" / "windows.jsonl.gz", "golden.jsonl.gz")
    alone = ("--set", "cluster={replicas: 2, router: round_robin}")
    small = ("--set", "workload.num_prompts=4")
    more = ("--set", "workload.num_prompts=80")
    log = ("--from-requests", "o/requests.csv", "--scenario", "small.yaml")
    tiny = ("--set", "model=tiny-test", "--set", "engine.num_gpu_blocks_override=64")
    done = [
        ("init", "new.yaml", "--yes"),
        ("run", "small.yaml", "--no-own-code", "--jobs", "2", *alone, *more, "--out", "o"),
        ("run", "small.yaml", "--no-tables", "--jobs", "2", *alone, "--out", "p"),
        ("compare", "small.yaml", "--vary", "engine.max_num_seqs=2,4", "--out", "c"),
        (*SWEPT, "s"),
        ("plan", "small.yaml", "--slo", "p99_ttft_ms<=900", "--jobs", "2", "--out", "plan"),
        ("rollouts", "small.yaml", "--set", "rollouts={steps: 2}"),
        ("plot", "occupancy", "o", "--out", "overview.png"),
        ("report", "o", "--out", "report.html"),
        ("diagnose", "small.yaml", "--jobs", "2"),
        ("explain", "o", "0"),
        ("trace", "describe", "small.yaml"),
        ("memory", "--model", "tiny-test", "--gpu", "A100-80GB"),
        ("engines",),
        ("schema",),
        ("conform", "case.jsonl.gz", "--golden", "golden.jsonl.gz"),
        ("tokenizer", "tok"),
        ("doctor",),
        ("completion", "bash"),
        ("live", "small.yaml", *small, *tiny, "--out", "live"),
        ("calibrate", *log, "--out", "fitted"),
        ("validate", "live"),
        ("profile", "list"),
    ]
    for words in done:
        run(command, *words)
        assert not os.listdir("sprung"), words
    with running(command, "serve", "small.yaml", "--speed", "20") as port:
        url = f"http://127.0.0.1:{port}"
        sent = ("small.yaml", *small, "--url", url, "--out", "replayed")
        run(command, "replay", *sent)
        watched = (f"{url}/metrics", "--scenario", "small.yaml", "--window", "1", "--duration", "2")
        run(command, "shadow", "--url", *watched, code=2)  # no traffic
    assert not os.listdir("sprung")
    assert {words[0] for words in done} == VERBS.keys() - {"serve", "replay", "shadow", "studio"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_no_worker_of_a_cluster_imports_from_the_current_folder(
    traps: Path, command: list[str], backend: str
) -> None:
    pytest.importorskip({"dask": "distributed"}.get(backend, backend))
    run(command, *SWEPT, "o", "--backend", backend)
    assert not os.listdir("sprung")


@pytest.mark.slow
def test_no_page_of_the_studio_imports_from_the_current_folder(
    traps: Path, command: list[str]
) -> None:
    with running(command, "studio", "small.yaml") as port:
        for path in ("/run", "/page"):
            status, lines = ask(port, {}, path)
            assert status == 200
            assert not any("errors" in line for line in lines), lines
        assert ask(port, {"question": "rate"}, "/plan")[1][-1]["text"]
        assert ask(port, b"arrived_at,num_prefill_tokens\n", "/trace")[0] == 200
    assert not os.listdir("sprung")


@pytest.mark.medium
def test_nor_does_python_m_from_its_first_line_on(traps: Path) -> None:
    """What Python itself imports before, the current folder gives it: SECURITY.md says so."""
    shown = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    (traps / "shown.py").write_text(shown)
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", f"import runpy; runpy.run_path({str(traps / 'shown.py')!r})"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in {*loaded, *OURS, "contextlib", "types", "warnings", "threading"}:
        (traps / f"{name}.py").unlink(missing_ok=True)
    run([sys.executable, "-m", "headway"], *SWEPT, "o")
    assert not os.listdir("sprung")


@pytest.mark.medium
def test_no_picture_depends_on_a_file_of_the_current_folder(
    folder: Path, command: list[str]
) -> None:
    """Matplotlib reads `matplotlibrc` there, which may have it start LaTeX; a pipe has no end."""
    run(command, "run", "small.yaml", "--out", "o")
    run(command, "plot", "occupancy", "o", "--out", "plain.png")
    (folder / "matplotlibrc").write_text("savefig.facecolor: red\nfont.family: monospace\n")
    run(command, "plot", "occupancy", "o", "--out", "styled.png")
    assert (folder / "styled.png").read_bytes() == (folder / "plain.png").read_bytes()
    (folder / "matplotlibrc").unlink()
    os.mkfifo(folder / "matplotlibrc")
    run(command, "report", "o", "--out", "report.html")


@pytest.mark.parametrize(
    "backend", ["loky", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dask", "ray"))]
)
def test_own_code_of_the_current_folder_is_found(
    folder: Path, command: list[str], backend: str
) -> None:
    """Also by workers, and where the scenario lies elsewhere."""
    pytest.importorskip({"dask": "distributed", "loky": "joblib"}.get(backend, backend))
    (folder / "own.py").write_text("class Policy:\n    def key(self, request):\n        return 0\n")
    (folder / "there").mkdir()
    policy = "{name: textbook, scheduling_policy: 'own:Policy', "
    (folder / "there" / "small.yaml").write_text(SMALL.replace("{name: textbook, ", policy))
    words = ("sweep", "there/small.yaml", *SWEPT[2:], "o", "--backend", backend)
    run(command, *words)
    assert "error" not in (folder / "o" / "results.csv").read_text().splitlines()[1]
