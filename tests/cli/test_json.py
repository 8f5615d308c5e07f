"""`--json`: what a verb would print as a table, as one JSON document; and `headway doctor`."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from headway.cli import doctor
from headway.cli.main import main
from simulator.models.load import shipped_models

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "workload.num_prompts=20", "--set", "workload.output_len=5"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    """What a command prints on standard output, read as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_prints_its_summary(tmp_path: Path, capsys) -> None:
    found = printed(capsys, "run", "demo", *SMALL, "--out", str(tmp_path))
    assert found == json.loads((tmp_path / "summary.json").read_text())
    assert found["completed"] == 20


def test_replications_print_their_intervals(tmp_path: Path, capsys) -> None:
    words = ("run", "demo", *SMALL, "--replications", "2", "--out", str(tmp_path))
    assert printed(capsys, *words)["replications"] == 2


def test_replications_that_complete_nothing_have_no_latencies(tmp_path: Path, capsys) -> None:
    """All requests are rejected: the exit code is 1, and no mean TTFT of 0 ms is stated."""
    few = ("--set", "engine.num_gpu_blocks_override=2", "--replications", "2")
    assert main(["run", "demo", *SMALL, *few, "--out", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["completed"]["mean"] == 0
    assert found["failed"]["mean"] == 20
    assert not [key for key in found if "_ms" in key]


def test_a_run_that_completes_nothing_has_null_latencies(tmp_path: Path, capsys) -> None:
    words = ["run", "demo", *SMALL, "--set", "engine.num_gpu_blocks_override=2", "--json"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {found[key] for key in found if key.endswith("_ms")} == {None}


def test_a_plan_that_serves_nobody_keeps_no_latency(tmp_path: Path, capsys) -> None:
    """Though no request need be completed."""
    words = ["plan", "demo", *SMALL, "--set", "engine.num_gpu_blocks_override=2", "--cheapest"]
    levels = ["--slo", "p99_ttft_ms<=1000", "--slo", "completion>=0"]
    assert main([*words, *levels, "--out", str(tmp_path)]) == 1
    assert "error: not one request fits" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["compare", "sweep"])
def test_many_runs_print_a_row_each(tmp_path: Path, capsys, verb: str) -> None:
    vary = ["--vary", "engine.max_num_seqs=1,8"]
    rows = printed(capsys, verb, "demo", *SMALL, *vary, "--out", str(tmp_path))
    assert [row["engine.max_num_seqs"] for row in rows] == [1, 8]
    assert rows[0]["mean_ttft_ms"] > rows[1]["mean_ttft_ms"]


def test_memory_prints_plain_numbers(capsys) -> None:
    """The parts of the budget add up, and what fits is what they leave."""
    found = printed(capsys, "memory", "--model", "llama-3-8b", "--gpu", "A100-80GB")
    parts = ("weights_bytes", "activations_bytes", "context_bytes", "cuda_graphs_bytes")
    left = found["usable_bytes"] - sum(found[part] for part in parts)
    assert found["kv_cache_bytes"] == left
    assert found["tokens"] == found["num_gpu_blocks"] * found["block_size"]
    assert found["tokens"] == pytest.approx(left / found["kv_bytes_per_token"], rel=1e-3)
    longest = found["concurrent"][str(found["max_model_len"])]
    assert longest == (found["num_gpu_blocks"] - 1) // (found["max_model_len"] // 16)


@pytest.mark.medium
def test_lists_are_json(capsys) -> None:
    rows = printed(capsys, "profile", "list")
    assert {"profile", "gpu", "dtype", "p95_relative_error"} < rows[0].keys()
    shown = printed(capsys, "profile", "show", rows[0]["profile"])
    assert {"model", "hardware", "fit"} < shown.keys()
    assert (
        printed(capsys, "trace", "describe", str(ROOT / "scenarios/demo.yaml"))["requests"] == 2000
    )
    assert main(["profile", "list"]) == 0
    told = capsys.readouterr().out
    assert f"models: {', '.join(shipped_models())}\n" in told
    assert "median, P95: errors of the step times fitted; TP: GPUs that share each layer\n" in told


def test_the_fields_are_documented(capsys) -> None:
    """Of what has no file whose columns are told elsewhere."""
    told = (ROOT / "docs" / "metrics.md").read_text("utf-8").partition("## Other verbs")[2]
    found = printed(capsys, "memory", "--model", "llama-3-8b", "--gpu", "H100-80GB")
    for name in {
        *found,
        *printed(capsys, "trace", "describe", str(ROOT / "scenarios/demo.yaml")),
    } - {"model", "gpu"}:
        assert f"`{name}`" in told


def test_an_installation_that_is_whole(capsys) -> None:
    found = printed(capsys, "doctor")
    assert found["problems"] == []
    assert found["run"]["requests"] == 20
    assert found["required"]["numpy"] == metadata.version("numpy")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\nno problem found\n")


def test_what_is_missing_or_old_is_told(monkeypatch, capsys) -> None:
    """A package that is not there, one that is too old, and a folder that is none."""
    wanted = ["numpy>=99", "no-such-package>=1", "pyarrow; extra == 'parquet'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    monkeypatch.setenv("HEADWAY_DATA", "/no/such/folder")
    assert main(["doctor"]) == 1
    *_, old, missing, data = capsys.readouterr().out.splitlines()
    assert old == f"numpy is {metadata.version('numpy')}: pip install 'numpy>=99'"
    assert missing == "no-such-package is missing: pip install 'no-such-package>=1'"
    assert data == "HEADWAY_DATA /no/such/folder: no such folder"


def test_a_demo_that_cannot_run_is_told(monkeypatch, tmp_path: Path, capsys) -> None:
    """The shipped one is meant, whatever is called so in the working directory."""
    (tmp_path / "demo.yaml").write_text("model: no-such-model\n", "utf-8")
    monkeypatch.setattr("simulator.scenario.load.FOLDERS", [tmp_path])
    assert main(["doctor"]) == 1
    assert f"a run of the demo fails: {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["compare", "sweep"])
def test_runs_that_complete_nothing_exit_with_1_and_warn_by_name(
    tmp_path: Path, capsys, verb: str
) -> None:
    few = ["--set", "engine.num_gpu_blocks_override=2", "--out", str(tmp_path)]
    assert main([verb, "demo", *SMALL, "--vary", "engine.max_num_seqs=1,8", *few]) == 1
    # A sweep tells what its points share once, of the one that ends first.
    told = "engine.max_num_seqs=[18]: not one" if verb == "sweep" else "max_num_seqs=8: all 20"
    said = capsys.readouterr()
    assert re.search(told, said.err)
    assert ": no run completed a request." in said.out


def test_replications_of_an_overloaded_run_say_so(tmp_path: Path, capsys) -> None:
    fast = ["--set", "workload.num_prompts=150", "--set", "workload.request_rate=40"]
    words = ["run", "demo", *fast, "--replications", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "Overloaded: by the last arrival demo " in capsys.readouterr().out
