"""`headway sweep`: one row per point, on every backend the same, and nothing run twice."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.main import main
from headway.planning.journal import read_journal
from headway.planning.runs import metric_values
from headway.planning.sweep import load_sweep_points, run_sweep
from simulator import load_scenario
from simulator.scenario.planning_config import SpreadConfig
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.util.files import lock_folder
from simulator.util.workers import parallel_map, use_backend
from tests.support.scenarios import TINY


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_varied_keys_then_the_numbers_of_the_runs_own_summary(small: Path):
    out = small.parent / "out"
    args = ["--vary", "engine.max_num_seqs=1,4", "--vary", "workload.request_rate=10,50"]
    assert main(["sweep", str(small), *args, "--out", str(out), "--jobs", "2"]) == 0
    rows = rows_of(out)
    assert [(r["engine.max_num_seqs"], r["workload.request_rate"]) for r in rows] == [
        ("1", "10"),
        ("1", "50"),
        ("4", "10"),
        ("4", "50"),
    ]
    assert [*rows[0]][:2] == ["engine.max_num_seqs", "workload.request_rate"]
    alone = metric_values(run(load_scenario(small, ["workload.request_rate=10"])).summary())
    assert {key: rows[2][key] for key in alone} == {key: str(value) for key, value in alone.items()}


def listening() -> set[IPv4Address | IPv6Address]:
    """The addresses at which this process and those below it listen."""
    psutil = pytest.importorskip("psutil")
    here = psutil.Process()
    found = set()
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == "LISTEN":
                    found.add(ip_address(one.laddr.ip.removeprefix("::ffff:")))
    return found


@pytest.mark.medium
@pytest.mark.parametrize("name", ["loky", "dask", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_every_backend_gives_the_same_bytes_and_survives_a_killed_worker(name: str, small: Path):
    """One cluster for all, since it takes seconds to start; the sweep comes after the killing."""
    pytest.importorskip({"dask": "distributed", "loky": "joblib"}.get(name, name))
    points = load_sweep_points(small, [("engine.max_num_seqs", ["1", "2", "4"])])
    killed, here, there = (small.parent / word for word in ("killed", "here", "there"))

    def square(number: int) -> int:
        if number == 3 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    with use_backend(name, 2):
        results = list(parallel_map(square, range(12), 2))
        assert all(address.is_loopback for address in listening())
        run_sweep(points, there, backend=None)
    assert killed.exists()
    assert sorted(results) == [(k, k * k) for k in range(12)]
    run_sweep(points, here, jobs=1)
    assert (there / "results.csv").read_bytes() == (here / "results.csv").read_bytes()


def test_the_block_in_the_scenario_makes_the_points(small: Path):
    small.write_text(
        TINY
        + """
sweep:
  grid: {engine.max_num_seqs: [1, 2]}
  points: [{seed: 1, workload.num_prompts: 5}, {seed: 2, workload.num_prompts: 6}]
"""
    )
    points = load_sweep_points(small, [("workload.output_len", ["3"])])
    assert [point.varied for point in points] == [
        {
            "engine.max_num_seqs": seats,
            "seed": seed,
            "workload.num_prompts": prompts,
            "workload.output_len": "3",
        }
        for seats in ("1", "2")
        for seed, prompts in (("1", "5"), ("2", "6"))
    ]
    assert points[3].scenario is not None
    assert points[3].scenario.seed == 2
    assert run(load_scenario(small)).scenario.sweep is not None  # and `run` takes no notice


def test_random_points_stay_inside_and_are_the_same_each_time(small: Path):
    small.write_text(
        TINY
        + """
sweep:
  random:
    samples: 30
    keys:
      engine.max_num_seqs: {low: 1, high: 64, log: true}
      workload.request_rate: {low: 0.5, high: 2.5}
      engine.scheduling_policy: {choice: [fcfs, sjf]}
"""
    )
    points = load_sweep_points(small)
    assert [p.varied for p in points] == [p.varied for p in load_sweep_points(small)]
    seats = [int(p.varied["engine.max_num_seqs"]) for p in points]
    rates = [float(p.varied["workload.request_rate"]) for p in points]
    assert 1 <= min(seats) < 8 < max(seats) <= 64  # half of them below 8 on a log scale
    assert 0.5 <= min(rates) < 1
    assert 2 < max(rates) <= 2.5
    assert {p.varied["engine.scheduling_policy"] for p in points} == {"fcfs", "sjf"}
    assert len({p.varied["workload.request_rate"] for p in points}) == 30
    other = load_sweep_points(small, seed=1)
    assert [p.varied for p in other] != [p.varied for p in points]


@given(st.integers(1, 50), st.integers(0, 50), st.booleans(), st.integers(0, 9))
def test_a_whole_spread_draws_whole_numbers_within(low: int, more: int, log: bool, seed: int):
    import numpy as np

    value = SpreadConfig(low=low, high=low + more, log=log).draw(np.random.default_rng(seed))
    assert isinstance(value, int)
    assert low <= value <= low + more


def test_a_failed_point_is_recorded_and_the_others_go_on(
    small: Path, capsys: pytest.CaptureFixture[str]
):
    out = small.parent / "out"
    policy = "engine.scheduling_policy=fcfs,{policy: broken:Broken}"
    (small.parent / "broken.py").write_text(
        "class Broken:\n    def key(self, request):\n        return 1 / 0\n"
    )
    code = main(["sweep", str(small), "--vary", policy, "--out", str(out), "--jobs", "2"])
    assert code == 1
    good, bad = rows_of(out)
    assert good["completed"] == "20"
    assert good["error"] == ""
    assert bad["completed"] == ""
    assert "ZeroDivisionError" in bad["error"]
    said = capsys.readouterr()
    assert "1 of 2 points done" in said.out
    assert "headway: error: engine.scheduling_policy={policy: broken:Broken}: " in said.err


def test_a_point_that_contradicts_itself_is_a_row_too(small: Path):
    out = small.parent / "out"
    vary = "engine.max_num_seqs=2,5000"  # more than max_num_batched_tokens
    assert main(["sweep", str(small), "--vary", vary, "--out", str(out)]) == 1
    assert "max_num_batched_tokens: must be at least" in rows_of(out)[1]["error"]


def test_what_is_done_is_not_run_again(small: Path, monkeypatch: pytest.MonkeyPatch):
    out = small.parent / "out"
    points = load_sweep_points(small, [("engine.max_num_seqs", ["1", "2", "4"])])
    run_sweep(points[:2], out, jobs=1)
    seen: list[int] = []
    progress: list[tuple[int, int]] = []

    def watched(function, items, jobs=None):
        seen.extend(item.engine.max_num_seqs for item in items)
        return ((k, function(item)) for k, item in enumerate(items))

    monkeypatch.setattr("headway.planning.runs.parallel_map", watched)
    rows = run_sweep(points, out, progress=lambda *counts: progress.append(counts))
    assert seen == [4]
    assert progress == [(2, 3), (3, 3)]
    assert [row["completed"] for row in rows] == [20, 20, 20]
    small.write_text(TINY.replace("input_len: 20", "input_len: 21"))
    run_sweep(load_sweep_points(small, [("engine.max_num_seqs", ["1"])]), out)
    assert seen == [4, 1]  # another scenario is another point


@pytest.mark.medium
def test_a_sweep_that_was_killed_goes_on_where_it_was(small: Path):
    """Killed for good (SIGKILL to all) as soon as something is done; then the same command."""
    out, whole = small.parent / "out", small.parent / "whole"
    rates = ",".join(str(k) for k in range(1, 41))
    command = [sys.executable, "-m", "headway", "sweep", str(small)]
    command += ["--vary", f"workload.request_rate={rates}", "--set", "workload.num_prompts=300"]
    first = subprocess.Popen([*command, "--jobs", "2", "--out", out], start_new_session=True)
    journal = out / "points.jsonl"
    while first.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    with journal.open("ab") as file:
        file.write(b'{"point": "cut sho')  # as a kill in the middle of a line leaves it
    done = read_journal(journal)
    assert 1 <= len(done) < 40
    for folder in (out, whole):  # in this process
        assert main([*command[3:], "--jobs", "1", "--out", str(folder)]) == 0
    assert (out / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    assert len(journal.read_bytes().splitlines()) == 40  # no point was run twice


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to vary; give --vary key=a,b,c or a block `sweep`"),
        (["--vary", "engine.max_num_sqs=1,2"], "did you mean max_num_seqs?"),
        (["--vary", "engine.max_num_seqs=1,2", "--jobs", "0"], "--jobs 0: must be 1 or more ("),
        (
            ["--vary", "seed=1,2", "--seed", "3"],
            "--vary seed: --seed 3 would have no effect",
        ),
    ],
)
def test_a_wrong_command_is_one_clear_error(
    small: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    out = small.parent / "out"
    assert main(["sweep", str(small), *args, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{grid: {seed: []}}", "small.yaml:7: sweep.grid.seed: must not be empty"),
        ("{grid: {seed: 1}}", "sweep.grid.seed: must be a list, not 1"),
        ("{gird: {seed: [1]}}", "sweep.gird: unknown key; did you mean grid?"),
        (
            "{random: {samples: 2, keys: {seed: {low: 3, high: 1}}}}",
            "sweep.random.keys.seed: needs low and high with low <= high, or choice",
        ),
        (
            "{random: {samples: 2, keys: {seed: {low: 0, high: 1, log: true}}}}",
            "sweep.random.keys.seed.low: must be more than 0 for log, not 0",
        ),
        (
            "{grid: {seed: [1], engine.max_num_seqs: [1]}, points: [{seed: 2}]}",
            "a key is varied twice: seed$",
        ),
    ],
)
def test_a_wrong_block_names_its_key(small: Path, block: str, message: str):
    small.write_text(TINY + f"sweep: {block}\n")
    with pytest.raises(HeadwayError, match=message.replace("?", r"\?")) as told:
        load_sweep_points(small)
    assert len(told.value.messages) == 1


def test_points_may_put_a_scenario_right_and_without_any_it_says_what_is_wrong(small: Path):
    """Two GPUs want an engine of two; the first point has one, and says so."""
    text = TINY.replace("A100-80GB}", "A100-80GB, count: 2}")
    text = text.replace("{name: textbook,", "{name: textbook, tensor_parallel_size: 1,")
    small.write_text(text)
    with pytest.raises(HeadwayError, match=r"gpu.count: must equal engine.tensor_parallel_size"):
        load_sweep_points(small)
    small.write_text(text + "sweep: {grid: {engine.tensor_parallel_size: [1, 2]}}\n")
    for more in ((), [("seed", ["3"])]):
        wrong, right = load_sweep_points(small, more)
        assert "gpu.count: must equal engine.tensor_parallel_size (1), not 2" in wrong.error
        assert right.scenario.engine.tensor_parallel_size == 2


def test_a_damaged_journal_is_told_by_its_line(small: Path):
    out = small.parent / "out"
    points = load_sweep_points(small, [("seed", ["1"])])
    run_sweep(points, out, jobs=1)
    journal = out / "points.jsonl"
    journal.write_text("what?\n" + journal.read_text())
    with pytest.raises(HeadwayError, match=r"points.jsonl:1: is no line of a sweep"):
        run_sweep(points, out, jobs=1)


def test_two_sweeps_into_one_folder_are_refused(small: Path, capsys: pytest.CaptureFixture[str]):
    out = small.parent / "out"
    command = ["sweep", str(small), "--vary", "seed=1,2", "--jobs", "1", "--out", str(out)]
    with lock_folder(out):
        assert main(command) == 2
    assert capsys.readouterr().err == (
        f"headway: error: {out}: another command is writing there; wait for it, or give "
        "another --out\n"
    )
    assert main(command) == 0


@pytest.mark.parametrize("what", ["removed", "renamed", "emptied", "replaced"])
def test_a_folder_that_vanishes_is_told(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
):
    """After the first of three points; it does not come back with a part of the table."""
    out = small.parent / "out"

    def each(function, items, jobs=None):
        for number, item in enumerate(items):
            if number == 1:
                if what == "renamed":
                    out.rename(small.parent / "elsewhere")
                elif what == "emptied":
                    (out / "points.jsonl").unlink()
                else:
                    shutil.rmtree(out)
                if what == "replaced":
                    out.mkdir()
                    (out / "theirs").touch()
            yield number, function(item)

    monkeypatch.setattr("headway.planning.runs.parallel_map", each)
    command = ["sweep", str(small), "--vary", "seed=1,2,3", "--jobs", "1", "--out", str(out)]
    assert main(command) == 2
    assert capsys.readouterr().err == (
        f"headway: error: {out}/points.jsonl: was taken away or replaced while runs were written "
        "down there; stopped\n"
    )
    left = [path.name for path in out.iterdir()] if out.exists() else None
    assert left == {"emptied": ["results.csv"], "replaced": ["theirs"]}.get(what)


def test_a_backend_that_does_not_start_leaves_nothing(small: Path):
    out = small.parent / "out"
    args = ["--vary", "seed=1,2", "--backend", "dask", "--address", "nowhere", "--out", str(out)]
    assert main(["sweep", str(small), *args]) == 2
    assert not out.exists()


def test_of_points_that_are_alike_the_one_with_the_fewest_seats_is_best(small: Path, capsys):
    """At so low a load nobody needs more than four; one seat is too few."""
    args = ["--vary", "engine.max_num_seqs=64,4,1", "--set", "workload.request_rate=2"]
    args += ["--slo", "p99_ttft_ms<=500", "--out", str(small.parent / "out"), "--jobs", "1"]
    assert main(["sweep", str(small), *args]) == 0
    assert "\nBest: max_num_seqs=4: " in capsys.readouterr().out


@pytest.mark.parametrize("key", ["engine.tensor_parallel_size", "gpu.count"])
def test_a_value_that_no_point_takes_is_refused_before_any_run(small: Path, capsys, key: str):
    """3 GPUs for 32 heads: the good points ran, and the sweep gave 1 at its end."""
    out = small.parent / "out"
    assert main(["sweep", str(small), "--vary", f"{key}=1,3", "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": engine.tensor_parallel_size: 3 does not divide the 4 attention heads of " in line
    assert not out.exists()


def test_a_value_that_one_model_takes_is_kept(small: Path):
    """3 divides the 12 heads of opt-125m: of the other model alone it is a row's error."""
    vary = [("model", ["opt-125m", "llama-3-8b"]), ("gpu.count", ["1", "3"])]
    points = load_sweep_points(small, vary)
    assert [bool(point.error) for point in points] == [False, False, False, True]
