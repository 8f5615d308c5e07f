"""The command line: what it prints, what it writes, what it says of bad input."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from simulator.__main__ import main as door
from simulator.cli.main import main
from simulator.cli.progress import Bar
from simulator.util.version import __version__
from tests.support.scenarios import SMALL

FILES = ["requests.csv", "scenario.yaml", "steps.csv", "summary.json"]
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{k},{10 + k},{5 + k}\n" for k in range(4)
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with the scenario small.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path


def headway(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in a process of its own."""
    code = "import sys; from simulator.cli.main import main; sys.exit(main())"
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": root},
        text=True,
        check=False,
        **({"capture_output": True} | options),
    )


def names(folder: Path) -> list[str]:
    """List a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_run_prints_the_report_and_writes_the_files(folder, capsys):
    """By default into out/NAME; nothing is said on stderr."""
    assert main(["run", "small.yaml"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "Successful requests:                     40" in told.out
    assert told.out.endswith(
        "written to out/small: summary.json, requests.csv, steps.csv, scenario.yaml\n"
    )
    out = folder / "out" / "small"
    assert names(out) == FILES
    assert json.loads((out / "summary.json").read_text())["completed"] == 40


def test_the_written_scenario_gives_the_same_run(folder):
    """Same seed, same bytes; also stepwise, and when the resolved scenario is run."""
    assert main(["run", "small.yaml", "--out", "a", "--quiet"]) == 0
    assert main(["run", "a/scenario.yaml", "--out", "b", "--quiet"]) == 0
    assert main(["run", "small.yaml", "--out", "c", "--quiet", "--stepwise"]) == 0
    for name in FILES:
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    assert (folder / "a" / "requests.csv").read_bytes() == (
        folder / "c" / "requests.csv"
    ).read_bytes()


def test_overrides_and_seed_reach_the_run(folder, capsys):
    """And stand in the resolved scenario; --quiet says nothing."""
    sets = ["--set", "workload.num_prompts=5", "--set", "engine.max_num_seqs=2"]
    assert main(["run", "small.yaml", *sets, "--seed", "3", "--out", "x", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    resolved = yaml.safe_load((folder / "x" / "scenario.yaml").read_text())
    assert resolved["workload"]["num_prompts"] == 5
    assert resolved["engine"]["max_num_seqs"] == 2
    assert resolved["seed"] == 3


def test_compare_writes_a_table_a_plot_and_each_run(folder, capsys):
    """A row for each point, in the order given, with ratios to the first."""
    vary = ["--vary", "engine.scheduling_policy=static,fcfs"]
    assert main(["compare", "small.yaml", *vary]) == 0
    told = capsys.readouterr()
    out = folder / "out" / "small-compare"
    assert names(out) == ["comparison.csv", "comparison.png", "fcfs", "static"]
    assert names(out / "fcfs") == FILES
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["static", "fcfs"]
    assert [row["engine.scheduling_policy"] for row in rows] == ["static", "fcfs"]
    assert [row["completed"] for row in rows] == ["40", "40"]
    summary = json.loads((out / "fcfs" / "summary.json").read_text())
    assert float(rows[1]["mean_ttft_ms"]) == summary["mean_ttft_ms"]
    assert told.out.split()[:2] == ["static", "fcfs"]
    assert "written to out/small-compare: comparison.csv, comparison.png" in told.out


def test_compare_with_many_runs(folder, capsys):
    """A row for each, and another picture."""
    values = ",".join(str(k) for k in range(1, 10))
    assert main(["compare", "small.yaml", "--vary", f"seed={values}", "--out", "o"]) == 0
    told = capsys.readouterr()
    assert not told.err
    assert names(folder / "o") == [*values.split(","), "comparison.csv", "comparison.png"]
    assert [line.split()[0] for line in told.out.splitlines()[3:12]] == values.split(",")


USAGE = [
    (["run"], 'Command "run" parameter SCENARIO requires an argument.'),
    (["run", "small.yaml", "--sed", "1"], "Unknown option: --sed. Did you mean --seed?"),
    (["rnu", "small.yaml"], 'Unknown command "rnu". Did you mean "run"?...'),
    (["run", "small.yaml", "--seed", "x"], 'Invalid value for --seed: unable to convert "x"...'),
    (["run", "small.yaml", "--format", "xml"], 'Invalid value "xml" for --format...'),
    (["run", "small.yaml", "more.yaml"], "unexpected argument: more.yaml"),
    (["compare", "small.yaml"], 'Command "compare" parameter --vary requires an argument.'),
    (["run", "none.yaml"], "none.yaml: no such file"),
    (["run", "small.yaml", "--set", "seed"], "--set seed: must be dotted.key=value"),
    (["run", "small.yaml", "--seed", "-1"], "--seed -1: seed: must be at least 0, not -1"),
    (
        ["run", "small.yaml", "--set", "engine.max_num_seqs=0"],
        "--set engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, not 0",
    ),
    (
        ["compare", "small.yaml", "--vary", "engine.block_size=16,0"],
        "--vary engine.block_size=0: engine.block_size: must be at least 1, not 0",
    ),
    (["compare", "small.yaml", "--vary", "seed=1,"], "--vary seed=1,: must be dotted.key=..."),
    (["run", "small.yaml", "--out", "small.yaml"], "--out small.yaml: small.yaml is not a folder"),
    (["run", "small.yaml", "--out", "small.yaml/x"], "--out small.yaml/x: ..."),
    (["trace", "describe", "none.csv"], "none.csv: no such file"),
    (["trace", "describe", "bad.csv"], "bad.csv:2: num_prefill_tokens: ..."),
    (["trace", "describe", "good.csv", "--format", "azur"], "format: 'azur' is not known; ..."),
    (["trace", "convert", "good.csv", "small.yaml/x"], "small.yaml: cannot write: is not a folder"),
    (
        ["memory", "--model", "llama-3-8b", "--gpu", "H100-80GB", "--block-size", "0"],
        "--block-size 0: engine.block_size: must be at least 1, not 0",
    ),
    (
        ["memory", "--model", "llama-9", "--gpu", "H100-80GB"],
        "--model llama-9: model: no file llama-9 and no shipped model 'llama-9'; ...",
    ),
    (
        ["memory", "--model", "llama-3-70b", "--gpu", "H100-80GB"],
        "--gpu H100-80GB: gpu: llama-3-70b in bfloat16 does not fit the H100-80GB: ...",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, arguments, message):
    """No traceback, nothing on stdout, nothing written."""
    (folder / "good.csv").write_text(TRACE)
    (folder / "bad.csv").write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,x,1\n")
    before = names(folder)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    if message.endswith("..."):
        assert told.err.startswith(f"headway: error: {message[:-3]}")
        assert told.err.count("\n") == 1
    else:
        assert told.err == f"headway: error: {message}\n"
    assert names(folder) == before


def test_several_errors_are_a_line_each(folder, capsys):
    """Of one point or of several; the same one only once."""
    vary = ["--vary", "engine.max_num_seqs=0,4", "--set", "engine.block_size=0"]
    assert main(["compare", "small.yaml", *vary]) == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "headway: error: --set engine.block_size=0: engine.block_size: must be at least 1, not 0",
        "headway: error: --vary engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, "
        "not 0",
    ]


def test_a_malformed_trace_leaves_no_output(folder, capsys):
    """All its bad lines are told before anything is made."""
    (folder / "t.csv").write_text(TRACE + "4,x,1\n5,1,-2\n")
    (folder / "s.yaml").write_text("workload: {trace: {path: t.csv, format: lengths}}\n")
    assert main(["run", "s.yaml"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line[: len("headway: error: t.csv:6")] for line in told] == [
        "headway: error: t.csv:6",
        "headway: error: t.csv:7",
    ]
    assert names(folder) == ["s.yaml", "small.yaml", "t.csv"]


def test_warnings_are_told_once_on_stderr(folder, capsys):
    """Without Python's file and line."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "s.yaml").write_text(
        "workload: {trace: {path: t.csv, max_input_len: 12}}\n"
        "cost: {kind: linear, base: 1e-2, per_token: 1e-5, per_context: 0}\n"
    )
    assert main(["compare", "s.yaml", "--vary", "seed=1,2", "--quiet"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway: warning: ")
    assert "max_input_len" in line


STOPPING = """
class Stop:
    def key(self, request):
        if request.id == 20:
            raise KeyboardInterrupt
        return request.arrival
"""


@pytest.mark.parametrize("command", [["run"], ["compare", "--vary", "seed=0,1"]])
def test_an_interrupt_says_how_far_it_came_and_writes_nothing(folder, capsys, command):
    """Exit code 130, as a shell gives it."""
    (folder / "stopping.py").write_text(STOPPING)
    policy = ["--set", "engine.scheduling_policy=stopping:Stop"]
    assert main([command[0], "small.yaml", *command[1:], *policy]) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(
        r"headway: interrupted at \d\.\d s of simulated time, 1?\d of 40 requests done; "
        r"no file was written\n",
        told.err,
    )
    assert names(folder) == ["small.yaml", "stopping.py"]


def test_an_interrupt_outside_the_loop_is_told_too(folder, capsys, monkeypatch):
    """While files are read or written; what is half-written is taken back."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulator.simulation.write.encode_rows", stop)
    assert main(["run", "small.yaml"]) == 130
    assert capsys.readouterr().err == "headway: interrupted; no file was written\n"
    assert names(folder) == ["small.yaml"]


@pytest.mark.parametrize(
    ("command", "stopped", "told"),
    [
        (["run"], "views.report.run_table", "4 files are written"),
        (["run", "--timeline", "t/t.json"], "views.timeline.write_timeline", "4 files are written"),
        (["compare", "--vary", "seed=0,1"], "figures.compare.plot_compare", "9 files are written"),
        (
            ["compare", "--vary", "seed=0,1"],
            "views.side_by_side.compare_table",
            "10 files are written",
        ),
    ],
)
def test_an_interrupt_says_where_the_files_are(folder, capsys, monkeypatch, command, stopped, told):
    """Those written by then, whatever comes after them: further files, a picture, the report."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    assert main(["run", "small.yaml", "--out", "before"]) == 0  # is no business of the next command
    capsys.readouterr()
    monkeypatch.setattr(f"simulator.{stopped}", stop)
    assert main([command[0], "small.yaml", *command[1:]]) == 130
    out = Path("out/small" if command[0] == "run" else "out/small-compare")
    assert capsys.readouterr().err == f"headway: interrupted; {told}, in {out}\n"
    assert len([path for path in out.rglob("*") if path.is_file()]) == int(told.split()[0])


def test_a_closed_pipe_is_no_error():
    """`headway ... | head` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    done = headway("run", "small.yaml", stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "arguments", [["run", "small.yaml"], ["--help"], ["--version"], ["trace", "describe", "t.csv"]]
)
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_2(folder, arguments):
    """Be it the report, a help page or a line."""
    (folder / "t.csv").write_text(TRACE)
    with Path("/dev/full").open("w") as full:
        done = headway(*arguments, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (
        2,
        "headway: error: standard output: cannot write: No space left on device\n",
    )


def test_without_stdout_nothing_is_printed(folder):
    """`headway ... >&-` runs all the same."""
    done = headway("run", "small.yaml", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(folder / "out" / "small") == FILES


@pytest.mark.parametrize("module", ["simulator.cli.main", "cyclopts", "simulator.cli.interrupts"])
def test_an_interrupt_of_the_imports_is_told_too(monkeypatch, capsys, module):
    """The command's door is open before the command line is there."""

    class Stop:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    monkeypatch.setattr("simulator.cli", sys.modules["simulator.cli"])  # as it was, afterwards
    for name in [name for name in sys.modules if name.startswith(("simulator.cli", "cyclopts"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Stop(), *sys.meta_path])
    assert door() == 130
    assert capsys.readouterr() == ("", "headway: interrupted; no file was written\n")


def test_the_door_passes_on_arguments_and_exit_code():
    """`python -m simulator` is `headway`."""
    root = str(Path(__file__).parents[2])
    for arguments, code in ((["--version"], 0), (["run", "none.yaml"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "simulator", *arguments],
            env=os.environ | {"PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
    assert done.stderr == "headway: error: none.yaml: no such file\n"


def test_help_and_version_need_none_of_the_heavy_packages():
    """They answer at once: numpy, pydantic and simpy stay unloaded."""
    code = (
        "import sys; from simulator.cli.main import main; main(sys.argv[1:]); "
        "print({'numpy', 'pydantic', 'simpy', 'yaml'} & set(sys.modules))"
    )
    root = str(Path(__file__).parents[2])
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | {"PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.endswith("set()\n")


def test_a_run_needs_no_pandas_matplotlib_or_scipy():
    """Each of them costs more than the simulation."""
    code = (
        "import sys; from simulator.cli.main import main; main(['run', 'small.yaml', '--quiet']); "
        "print({'pandas', 'matplotlib', 'scipy', 'rich.progress'} & set(sys.modules))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_help_has_a_line_for_every_command(capsys):
    """And so has the command alone."""
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in ("run", "compare", "memory", "trace"):
        assert re.search(rf"{command} +[A-Z]", told)
    assert main([]) == 0
    assert capsys.readouterr().out == told


def test_version(capsys):
    """The package's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_memory_prints_the_budget(capsys):
    """With the options of the engine that it depends on."""
    model = ["--model", "llama-3-8b", "--gpu", "A100-80GB"]
    assert main(["memory", *model, "--quantization", "fp8", "--kv-cache-dtype", "fp8"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"KV per token \(fp8\) +64.0 KiB", told)
    assert main(["memory", *model, "--max-model-len", "1000"]) == 0
    assert "max_model_len = 1,000" in capsys.readouterr().out


def test_traces_are_described_and_converted(folder, capsys):
    """A trace, or what a scenario generates; what is written reads the same."""
    (folder / "t.csv").write_text(TRACE)
    assert main(["trace", "describe", "t.csv"]) == 0
    assert re.search(r"requests +4\n", capsys.readouterr().out)
    assert main(["trace", "convert", "t.csv", "m.jsonl.gz"]) == 0
    assert capsys.readouterr().out == "written to m.jsonl.gz: 4 requests\n"
    assert main(["trace", "describe", "m.jsonl.gz"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"format +mooncake\n", told)
    assert re.search(r"output tokens +26\n", told)
    assert main(["trace", "convert", "small.yaml", "s.jsonl"]) == 0
    assert capsys.readouterr().out == "written to s.jsonl: 40 requests\n"


def test_convert_writes_neither_over_its_source_nor_into_a_missing_folder(folder, capsys):
    """What is there stays as it is."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "link.csv").symlink_to("t.csv")
    before = names(folder)
    for target, wrong in (
        ("t.csv", "it is the file to read"),
        ("link.csv", "it is the file to read"),
        ("new/t.jsonl", "no folder new"),
    ):
        assert main(["trace", "convert", "t.csv", target]) == 2
        assert capsys.readouterr().err == f"headway: error: {target}: cannot write: {wrong}\n"
    assert (folder / "t.csv").read_text() == TRACE
    assert names(folder) == before


def test_convert_tells_what_prefix_sharing_is_lost(folder, capsys):
    """Ids of 512 tokens cannot tell of a common beginning of 100."""
    (folder / "p.yaml").write_text(
        "workload: {num_prompts: 10, prefix_groups: {num_prefixes: 1, prefix_len: 100}, "
        "input_len: 50, output_len: 2}\n"
    )
    assert main(["trace", "convert", "p.yaml", "p.jsonl"]) == 0
    assert capsys.readouterr().err == (
        "headway: warning: p.jsonl: 0.0% of its input tokens are a prefix of an earlier prompt, "
        "before they were 60.0%: an id stands for 512 tokens, so shorter shared prefixes are lost\n"
    )
    (folder / "p.yaml").write_text(
        "workload: {num_prompts: 10, prefix_groups: {num_prefixes: 1, prefix_len: 1024}, "
        "input_len: 50, output_len: 2}\n"
    )
    assert main(["trace", "convert", "p.yaml", "p.jsonl"]) == 0
    assert capsys.readouterr().err == ""


def test_a_rate_without_limit_and_an_even_one(folder):
    """JSON has no infinity: both are a word in the summary."""
    sets = ["--set", "workload.burstiness=.inf", "--out", "x", "--quiet"]
    for rate, told in ((".inf", "inf"), ("20", 20.0)):
        assert main(["run", "small.yaml", "--set", f"workload.request_rate={rate}", *sets]) == 0
        summary = json.loads((folder / "x" / "summary.json").read_text())
        assert (summary["request_rate"], summary["burstiness"]) == (told, "inf")


def test_a_run_too_long_for_its_files_is_told(folder, capsys):
    """Rather than a traceback of what overflows first."""
    before = names(folder)
    assert main(["run", "small.yaml", "--set", "workload.request_rate=1e-20"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"headway: error: the run lasts \de\+21 s, .* up to 1e\+08 s", line)
    assert names(folder) == before


def test_the_progress_bar_waits_and_then_shows_how_far_the_run_is(monkeypatch, capsys):
    """A short run shows nothing; a long one requests and simulated time, on stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    bar = Bar("demo")
    bar(1.0, 1, 10)
    bar.close()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("simulator.cli.progress.PATIENCE", 0.0)
    bar = Bar("azure-conv-llama3-8b-a100")
    bar(12345.6, 115_938, 116_196)
    bar.close()
    told = capsys.readouterr()
    assert told.out == ""
    assert re.search(r"azure.*115938/116196.*requests, 12,346 s simulated", told.err)
