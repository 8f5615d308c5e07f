"""Calibrate from a server's own log of steps."""

from pathlib import Path

import numpy as np
import pytest

from calibration.engine_steps.steps_file import make_step
from calibration.server_logs.from_steps import _host_between
from headway.cli.main import main
from headway.conformance.live import LiveRecord
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import read_profile

TRUE = PiecewiseCost(
    dense=[[1, 5e-3], [64, 6e-3], [512, 2e-2]], overhead=1e-3, decode_per_context=2e-7
)
HEAD = "decodes,context,chunks,duration_ms\n"
SERVER = "name: server\ncost: {kind: linear, base: 0.01}\n"


def log(count: int = 400, noise: float = 0.02) -> str:
    """Write the steps of an engine whose cost is known."""
    draw = np.random.default_rng(7)
    lines = [HEAD]
    for _ in range(count):
        decodes = int(draw.integers(0, 60))
        context = decodes * int(draw.integers(100, 2000))
        new = int(draw.integers(1, 400)) if not decodes or draw.random() < 0.3 else 0
        chunks = ((0, new),) if new else ()
        seconds = TRUE.execute(make_step(chunks, decodes, context)).seconds * np.exp(
            draw.normal(0, noise)
        )
        text = f"0+{new}" if new else ""
        lines.append(f"{decodes},{context},{text},{1e3 * seconds:.6f}\n")
    return "".join(lines)


def test_known_costs_are_found(put, write, tmp_path, capsys):
    """Of 400 steps with 2 % noise: predictions within 2 %, residuals as small."""
    path, out = put(log(), "steps.csv"), tmp_path / "out"
    command = ["calibrate", "--from-steps", str(path), "--scenario", str(write(SERVER))]
    assert main([*command, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "held out: 80 steps, median 1." in told
    profile = read_profile(out / "server-steps.yaml")
    for step in (
        make_step((), 32, 32000),
        make_step((), 4, 2000),
        make_step(((0, 256),), 16, 9000),
    ):
        assert profile.cost.execute(step).seconds == pytest.approx(
            TRUE.execute(step).seconds, rel=0.03
        )
    assert profile.cost.residuals is not None
    assert 0 < profile.cost.residuals["decode"] < 0.03


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("decodes,context\n1,2\n", "lacks the column chunks or prefill_tokens, duration_s"),
        (HEAD + "1,10,,5\n" * 9, "9 steps are too few to fit: it takes 100"),
        (HEAD + "1,10,,-5\n" * 100, ":2: duration_ms: a step cannot take -5"),
        (HEAD + "5,2,,5\n" * 100, ":2: 5 decodes over 2 tokens: impossible"),
        (HEAD + "0,0,,5\n" * 100, ":2: 0 decodes over 0 tokens: impossible"),
        (HEAD + "1,10,7,5\n" * 100, ":2: chunks: '7' is no piece of a prompt: cached+new"),
        (
            "point,decodes,context,chunks,device_s,wall_s\n1,1,2,,3,3\n",
            "these are steps of `headway calibrate`; --from fits them",
        ),
        ("start,end,chunks\n1,2,\n", "steps of `headway run`, which were simulated, not measured"),
        (HEAD + "x,10,,5\n" * 100, ":2: decodes: 'x' is no number"),
    ],
)
def test_bad_logs(put, write, tmp_path, capsys, text, what):
    """One line that names the place, exit code 2, nothing written."""
    path, out = put(text, "steps.csv"), tmp_path / "out"
    command = ["calibrate", "--from-steps", str(path), "--scenario", str(write(SERVER))]
    assert main([*command, "--out", str(out)]) == 2
    line = capsys.readouterr().err
    assert what in line
    assert line.count("\n") == 1
    assert not out.exists()


def test_a_wrong_unit_is_no_success(put, write, tmp_path, capsys):
    """Seconds for milliseconds: a warning with both figures, and no line on how to use it."""
    path = put(log().replace("duration_ms", "duration_s"), "steps.csv")
    command = ["calibrate", "--from-steps", str(path), "--scenario", str(write(SERVER))]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert "times what the scenario's own cost says; is the unit of its column right?" in told.err
    assert "to use it" not in told.out


def test_a_step_has_the_hosts_work_before_it_where_somebody_waited() -> None:
    """One request from 0 to 100 ns, one from 200 on: between them the server was idle."""
    record = LiveRecord(Path("steps.jsonl"))
    record.arrivals = [{"t": 0}, {"t": 195}]
    record.ends = {0: {"t": 100}, 1: {"t": 260}}
    record.steps = [{"t": 5, "dur": 30}, {"t": 40, "dur": 50}, {"t": 200, "dur": 20}]
    record.steps.append({"t": 210, "dur": 10})  # scheduled while the one before ran
    record.steps.append({"t": 234, "dur": 20})
    assert _host_between(record) == [0, 5, 0, 0, 4]
