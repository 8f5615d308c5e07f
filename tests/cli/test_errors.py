"""Bad input: a line for each mistake, exit code 2, nothing written."""

import os
from pathlib import Path

import pytest

from headway.cli.main import main
from tests.support.commands import TRACE, names

USAGE = [
    (["run"], "SCENARIO: is missing (scenario file (YAML), or a shipped one's name: demo)"),
    (["replay", "small.yaml"], "--url: is missing (address of an OpenAI-compatible server)"),
    (["run", "small.yaml", "--sed", "1"], "--sed: unknown option; did you mean --seed?"),
    (["run", "small.yaml", "--vary", "1"], "--vary: unknown option; `headway run --help` has ..."),
    (
        ["rnu", "small.yaml"],
        "rnu: no verb; there are init, run, compare, sweep, plan, rollouts,...",
    ),
    (
        ["run", "small.yaml", "--seed", "x"],
        "--seed x: must be a whole number such as 64 (seed, in place of the scenario's)",
    ),
    (["run", "small.yaml", "--seed", "2.5"], "--seed 2.5: must be a whole number such as 64 (..."),
    (["run", "small.yaml", "--seed"], "--seed: needs a value (seed, in place of the scenario's)"),
    (["run", "small.yaml", "--seed=1", "--seed=2"], "--seed 2: is given before; give it once"),
    (
        ["run", "small.yaml", "--quiet=x"],
        "--quiet x: takes no value (print errors and warnings o...",
    ),
    (
        ["run", "small.yaml", "--warmup", "5s"],
        "--warmup 5s: must be a number such as 0.5 (seconds left out after the first request)",
    ),
    (
        ["run", "small.yaml", "--format", "parket"],
        "--format parket: must be one of csv, parquet (format of the tables)...",
    ),
    (["run", "small.yaml", "more.yaml"], "unexpected argument: more.yaml"),
    (
        ["run", "small.yaml", "workload.num_prompts=4"],
        "unexpected argument: workload.num_prompts=4; a key is set by --set workload.num_prompts=4",
    ),
    (["compare", "small.yaml"], "--vary: is missing; for example --vary engine.max_num_seqs=64..."),
    (["run", "none.yaml"], "none.yaml: no such file"),
    (["run", "small.yaml", "--set", "seed"], "--set seed: must be dotted.key=value, as ..."),
    (
        ["run", "small.yaml", "--seed", "-1"],
        "--seed -1: must be 0 or more (seed, in place of the scenario's)",
    ),
    (
        ["run", "small.yaml", "--set", "engine.max_num_seqs=0"],
        "--set engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, not 0 (most...",
    ),
    (
        ["compare", "small.yaml", "--vary", "engine.block_size=16,0"],
        "--vary engine.block_size=0: engine.block_size: must be at least 1, not 0 (tokens ...",
    ),
    (["compare", "small.yaml", "--vary", "seed=1,"], "--vary seed=1,: must be dotted.key=..."),
    (["run", "small.yaml", "--out", "small.yaml"], "--out small.yaml: small.yaml is not a folder"),
    (["run", "small.yaml", "--out", "small.yaml/x"], "--out small.yaml/x: ..."),
    (["run", "small.yaml", "--slo", "x"], "--slo x: must be METRIC..."),
    (["run", "small.yaml", "--set", "slo=[x]"], "--set slo=[x]: slo: x: must be METRIC..."),
    (
        ["trace", "from-metrics", "http://host:8000/metrics"],
        "http:/host:8000/metrics: cannot be read: No such file or directory; save it first: curl "
        "http://host:8000/metrics > metrics.txt",
    ),
    (
        ["calibrate", "--from-requests", "good.csv", "--columns", "x", "--scenario", "small.yaml"],
        "--columns x: 'x' must be FIELD=COLUMN, as arrival=start_ms",
    ),
    (["trace", "describe", "none.csv"], "none.csv: no such file"),
    (["trace", "describe", "bad.csv"], "bad.csv:2: num_prefill_tokens: ..."),
    (
        ["trace", "describe", "good.csv", "--format", "azur"],
        "--format azur: 'azur' is not known; ...",
    ),
    (["trace", "convert", "good.csv", "small.yaml/x"], "OUT small.yaml/x: ..."),
    (
        ["memory", "--model", "llama-3-8b", "--gpu", "H100-80GB", "--block-size", "0"],
        "--block-size 0: engine.block_size: must be at least 1, not 0 (tokens ...",
    ),
    (
        ["memory", "--model", "llama-9", "--gpu", "H100-80GB"],
        "--model llama-9: model: no file and no shipped model 'llama-9'; ...",
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
        "headway: error: --set engine.block_size=0: engine.block_size: must be at least 1, not 0 "
        "(tokens in a block of the KV cache; vllm: a multiple of 16)",
        "headway: error: --vary engine.max_num_seqs=0: engine.max_num_seqs: must be at least 1, "
        "not 0 (most running requests; left out, 256, or 1024 on GPUs from 70 GiB on, except A100)",
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


@pytest.mark.parametrize("name", ["zero", "pipe"])
def test_a_trace_that_is_no_file_is_refused_at_once(folder, capsys, name):
    """A device has no end, and what a pipe says is gone after the first look."""
    path = Path("/dev/zero")
    if name == "pipe":
        path = folder / "pipe"
        os.mkfifo(path)
    assert main(["trace", "describe", str(path)]) == 2
    (folder / "s.yaml").write_text(f"workload: {{trace: {{path: {path}, format: azure}}}}\n")
    assert main(["run", "s.yaml"]) == 2
    told = capsys.readouterr().err.splitlines()
    refused = f"{path}: cannot be read: is a pipe or a device, not a file"
    assert told == [
        f"headway: error: {where}{refused}" for where in ("", "s.yaml:1: workload.trace.path: ")
    ]


def test_a_device_is_no_scenario(folder, capsys):
    """Nor a model or a profile."""
    assert main(["run", "/dev/zero"]) == 2
    assert main(["run", "small.yaml", "--set", "model=/dev/zero"]) == 2
    told = capsys.readouterr().err.splitlines()
    refused = "/dev/zero: cannot be read: is a pipe or a device, not a file"
    assert told == [
        f"headway: error: {where}{refused}" for where in ("", "--set model=/dev/zero: model: ")
    ]


LEAVING = """import sys
class Policy:
    def key(self, request):
        if request.id == 3:
            sys.exit(0)
        return request.arrival
def route(request, targets):
    sys.exit("no")
"""


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("engine.scheduling_policy=leaving:Policy", "leaving.py:5: key raised SystemExit: 0"),
        (
            "cluster={replicas: 2, router: leaving:route}",
            "leaving.py:8: route raised SystemExit: no",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_code_of_the_users_does_not_end_the_command(folder, capsys, command, setting, where):
    """Whatever it asks Python for: it is told, and nothing counts as done."""
    (folder / "leaving.py").write_text(LEAVING)
    vary = ["--vary", "seed=1", "--jobs", "1"] if command == "sweep" else []
    assert main([command, "small.yaml", "--set", setting, "--quiet", *vary]) in (1, 2)
    assert where in capsys.readouterr().err


def test_too_little_memory_is_one_line(monkeypatch, capsys) -> None:
    def fail(*arguments, **options):
        raise MemoryError("Unable to allocate 76.3 MiB")

    monkeypatch.setattr("simulator.workload.generate.draw_lengths", fail)
    assert main(["run", "demo"]) == 2
    assert capsys.readouterr().err == (
        "headway: error: not enough memory: Unable to allocate 76.3 MiB\n"
    )
