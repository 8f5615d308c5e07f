"""A first wave of requests may meet a cold engine: how late it is answered, and how large it is."""

import csv
from pathlib import Path

import numpy as np
import pytest

from calibration.measured.predict import assemble_run, predict
from calibration.measured.requests import read_requests
from calibration.measured.runs import Run, read_runs
from calibration.measured.workload import draw_from_pool, first_wave, frontend, generate
from headway.planning.sensitivity import COLD
from simulator.simulation.run import run as simulate
from simulator.workload.workload import Workload
from tests.support.measured_runs import CLOSED, HEAD, run_of

WAVES = {
    "mean_input_tokens": "32",
    "concurrency": "4",
    "n_requests": "40",
    "mean_output_tokens": "8",
}


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({}, 0.1),
        ({"rate_rps": "2"}, 1 / 40),
        ({"n_requests": "3"}, 1.0),
        ({"concurrency": "", "rate_rps": "2"}, 0.0),
        ({"prompt_pool": "10", "prefix_hit_frac": "0.9"}, 1 / 50),
    ],
)
def test_the_share_of_requests_that_come_at_once(more: dict[str, str], share: float) -> None:
    run = run_of(**WAVES | more)
    load, _ = draw_from_pool(run, generate(run))
    assert first_wave(load) == pytest.approx(share)


def test_clients_of_a_recorded_loop_begin_one_after_the_other() -> None:
    """Two of four requests wait for nobody and come within 0.1 s; the others follow on answers."""
    ones = np.ones(4, dtype=np.int64)
    arrival = np.array([0.0, 0.06, np.nan, np.nan])
    load = Workload(arrival, 8 * ones, ones, after=np.array([-1, -1, 0, 1]))
    assert first_wave(load) == 0.5
    assert first_wave(Workload(arrival[:2], 8 * ones[:2], ones[:2])) == 0.0


def test_the_interval_of_a_closed_loop_has_it_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(HEAD + CLOSED)
    (run,) = read_runs(tmp_path)
    found = predict(run, tmp_path, sensitivity=True).sensitivity
    shares = {one.metric: one.shares.get("cold engine", 0.0) for one in found}
    assert min(shares["mean_ttft_ms"], shares["mean_e2el_ms"]) > 0.0 == shares["mean_tpot_ms"]


def late(run: Run, folder: Path) -> float:
    """Return how many ms longer than predicted a recorded run's first request waited."""
    path = folder / Path(run.word("per_request_file")).name
    requests = read_requests(path, failed=True)
    sizes = requests.prompt[:1], requests.output[:1]
    load = Workload(np.zeros(1), *sizes, frontend=frontend(run))
    scenario, spec = assemble_run(run, folder)
    (ttft,) = simulate(scenario, workload=load, cost=spec.cost).whole().request_table().ttft
    return 1e3 * float(requests.ttft[0] - ttft)


@pytest.mark.medium
def test_first_requests_of_recorded_runs_are_late_by_less(data: Path) -> None:
    """A server that others had used, as two of the six, has nothing to wait for."""
    runs = [run for run in read_runs(data / "e2e") if run.word("per_request_file")]
    found = sorted(late(run, data / "e2e") for run in runs)
    assert found == pytest.approx([-57, 1, 62, 81, 175, 237], abs=6)
    assert found[-1] <= COLD[1]


def test_twins_on_several_gpus_differ_by_what_their_first_requests_may_wait_besides(
    data: Path,
) -> None:
    """Llama-3.1-70B on B200: two runs of the same prompts, clients and GPUs.

    Answers have 1,024 or 8,192 tokens, and a tenth of the requests come first. Twins differ by
    the root of 2 more than one is off; those on one GPU by what a cold engine takes anyhow.
    """
    twins: dict[tuple[str, str], list[float]] = {}
    with (data / "e2e" / "aiconfigurator_silicon_vllm_dense.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["system"] == "b200_sxm" and float(row["isl"]) == 1024:
                at = row["tp_size"], row["concurrency"]
                twins.setdefault(at, []).append(10 * float(row["silicon_ttft_ms"]))
    off = {
        one: [np.diff(two) / 2**0.5 for at, two in twins.items() if (at[0] == "1.0") == one]
        for one in (True, False)
    }
    alone, several = (1.96 * np.sqrt(np.mean(np.square(off[one]))) for one in (True, False))
    assert [len(off[one]) for one in (True, False)] == [5, 15]
    assert alone < COLD[1]
    assert COLD[1] + several == pytest.approx(COLD[2], abs=6)
