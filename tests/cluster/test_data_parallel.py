"""Servers of several data-parallel ranks: vLLM's internal load balancer, and what it is worth."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.report.vllm_serve import serve_command
from simulator import plan
from simulator.cluster.config import FailuresConfig, OutageConfig
from simulator.cluster.data_parallel import Balancer
from simulator.cluster.fleet import Fleet
from simulator.cluster.routers import Least, PowerOfTwo, RoundRobin
from simulator.costs.cost_model import JointStep
from simulator.engine.client import Client, Turns
from simulator.policies.predictor import Noisy
from simulator.scenario.load import load_scenario
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.util.errors import HeadwayWarning
from simulator.workload.workload import Workload
from tests.cluster.test_fleet import N, common_queue
from tests.cluster.test_fleet import play as play_fleet
from tests.cluster.test_fleet import served as served_by
from tests.cluster.test_resilience import World, shares
from tests.engine.test_laws import _unroll, clocks, engines, workloads
from tests.support.engines import Clock, fcfs, workload
from tests.support.engines import play as play_alone
from tests.support.scenarios import SMALL, errors

BOTH = "gpu: {count: 2}\n"


def balancer(ranks: int, front_ends: int = 1) -> Balancer:
    return Balancer(ranks, front_ends, Random(0))


def play(
    load: Workload,
    schedulers: list[Scheduler],
    clock: Clock,
    fronts: int = 1,
    leap: bool = True,
    joint: JointStep | None = None,
) -> Fleet:
    """Run a workload to its end on one server whose ranks these are."""
    env, turns = simpy.Environment(), Turns(load)
    fleet = Fleet(env, RoundRobin(), turns)
    spread = balancer(len(schedulers), fronts)
    fleet.open_target(fleet.add_server("all", schedulers, clock, spread, leap=leap, joint=joint))
    lengths = Noisy(0.0).predictor(load, np.random.default_rng(0))
    client = Client(env, load, fleet.submit, lengths, turns=turns)
    fleet.on_finish = client.finished
    env.run()
    return fleet


# ---------------------------------------------------------------- the balancer, by hand


def test_a_burst_goes_round_whatever_the_stale_counts_say() -> None:
    """What a front end has in flight is exact: counts from before the burst erase nothing."""
    spread = balancer(3)
    ranks = [spread.send(id) for id in range(4)]
    spread.publish([(0, 0, 0.0)] * 3)
    assert ranks + [spread.send(id) for id in range(4, 8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_stale_counts_are_worked_with_until_the_next_ones_come() -> None:
    """Published: 5 and 2 requests. Three go to rank 1 before it has as many as rank 0.

    Then rank 0 is looked at first only every other time; each request counts at once.
    """
    spread = balancer(2)
    spread.publish([(0, 5, 0.0), (0, 2, 0.0)])
    assert [spread.send(id) for id in range(3)] == [1, 1, 1]
    assert [spread.send(id) for id in range(3, 5)] == [1, 0]  # 5 and 5, from 1; 5 and 6
    spread.publish([(0, 0, 0.0), (0, 4, 0.0)])  # 1 and 4 of its own are in flight
    assert spread.send(5) == 0


def test_who_waits_at_a_full_cache_counts_up_to_four_times() -> None:
    """2 wait and 2 run at 90 %: 4 + 2 x 6 x 0.4 = 8.8, more than 8; at 80 %: 7.6, less."""
    for usage, rank in ((0.9, 1), (0.8, 0)):
        spread = balancer(2)
        spread.publish([(2, 2, usage), (0, 8, 0.95)])
        assert spread.send(0) == rank


def test_front_ends_know_of_each_other_by_the_published_counts_alone() -> None:
    """Two of them begin at ranks 0 and 2; each takes its requests for half of all."""
    spread = balancer(4, 2)
    one, two = spread._fronts
    assert [front.choose(2) for front in (one, two, one, two)] == [0, 2, 1, 3]
    assert [one.choose(2) for _ in range(2)] == [2, 3]  # where the other has sent as much
    spread.publish([(0, 1, 0.0), (0, 1, 0.0), (0, 1, 0.0), (0, 9, 0.0)])
    assert two.choose(2) == 0  # 1, 1, max(2, 1), 9; its look begins at rank 0 again


looks = st.tuples(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)), min_size=4)
    | st.none(),
    st.integers(-3, 3),
)


@given(st.integers(2, 4), st.integers(1, 3), st.lists(looks, max_size=40))
def test_the_rank_chosen_is_the_first_with_the_least_score(ranks, fronts, events) -> None:
    """vLLM's rule, spelled out for one of the front ends at a time."""
    spread = balancer(ranks, fronts)
    flying = [[0] * ranks for _ in range(fronts)]
    since = [[0] * ranks for _ in range(fronts)]
    told = [(0, 0, 0.0)] * ranks
    turn = [ranks * k // fronts for k in range(fronts)]
    for counts, front in events:
        if counts is not None:
            told, since = counts[:ranks], [[0] * ranks for _ in range(fronts)]
            spread.publish(told)
        elif front >= 0:
            here = front % fronts
            scores = []
            for (waiting, running, usage), more, own in zip(
                told, since[here], flying[here], strict=True
            ):
                score = max(fronts * own, waiting + more + running)
                scores.append(score + 6 * (waiting + more) * max(0.0, usage - 0.5))
            order = [(turn[here] + k) % ranks for k in range(ranks)]
            best = min(order, key=scores.__getitem__)
            assert spread._fronts[here].choose(fronts) == best
            flying[here][best] += 1
            since[here][best] += fronts
            turn[here] = (turn[here] + 1) % ranks
        else:
            here = -front % fronts
            for rank in range(ranks):
                flying[here][rank] = spread._fronts[here].inflight[rank] = 0


def test_counts_are_published_every_tenth_of_a_second() -> None:
    """Rank 0 gets a long job and rank 1 short ones, which have ended by the next publication.

    Steps of 0.06 s: request 1 ends at 0.06, which its front end knows at once of what is its own
    in flight, but it counts as sent since the last publication until 0.1.
    """
    load = workload((0.0, 4, 100), (0.0, 4, 1), (0.07, 4, 1), (0.08, 4, 1), (0.15, 4, 1))
    fleet = play(load, [fcfs(), fcfs()], Clock(0.06))
    where = {int(id): k for k, log in enumerate(fleet.logs) for id in log.requests["id"]}
    # 0.07: both count 1 since; the look begins at 0. 0.08: 2 and 1. 0.15: 2 (1 ended) and 1.
    assert [where[id] for id in range(5)] == [0, 1, 0, 1, 1]


# ---------------------------------------------------------------- laws and oracles


@given(workloads(), engines(pipelines=False), clocks, st.integers(2, 4), st.integers(1, 3), shares)
@settings(max_examples=120, deadline=None)
def test_leaping_and_stepwise_agree_and_nothing_is_lost(load, engine, clock, ranks, fronts, share):
    leapt, stepped = (
        play(load, [engine() for _ in range(ranks)], clock, fronts, leap, share)
        for leap in (True, False)
    )
    for one, other in zip(leapt.logs, stepped.logs, strict=True):
        assert one.request_rows == other.request_rows
        assert one.run_rows == other.run_rows
        assert one.tick_ends == other.tick_ends
        assert _unroll(one) == _unroll(other)
    ids = np.sort(np.concatenate([log.requests["id"] for log in leapt.logs]))
    assert ids.tolist() == list(range(len(load)))
    assert leapt.targets[0].outstanding == leapt.targets[0].tokens == 0
    assert not leapt.engines[0]._balancer.busy


@pytest.mark.parametrize("gap", [0.0, 0.4])
def test_equal_jobs_go_round_as_behind_a_round_robin_router(gap: float) -> None:
    """At once, and at a constant rate that keeps three engines of one seat just busy enough."""
    load = workload(*[(gap * k, 4, 1) for k in range(60)])
    seats = [[fcfs(max_num_seqs=1, max_num_batched_tokens=8) for _ in range(3)] for _ in range(2)]
    fleet, _ = play_fleet(load, seats[0], Clock(), RoundRobin())
    server = play(load, seats[1], Clock())
    assert [log.request_rows for log in server.logs] == [log.request_rows for log in fleet.logs]


def served(ranks: int, rho: float, front_ends: int = 1) -> np.ndarray:
    """Wait of Poisson arrivals at ranks that serve one request a second each, by request."""
    arrival = np.cumsum(np.random.default_rng(3).exponential(1 / (rho * ranks), N))
    ones = np.ones(N, dtype=np.int64)
    seats = [fcfs(max_num_seqs=1, max_num_batched_tokens=1) for _ in range(ranks)]
    fleet = play(Workload(arrival, ones, ones), seats, Clock(), front_ends)
    rows = np.concatenate([log.requests for log in fleet.logs])
    return rows["first_scheduled"] - arrival[rows["id"]]


@pytest.mark.medium
def test_one_front_end_is_as_good_as_the_least_busy_replica_and_many_are_worse() -> None:
    """One knows all that is in flight: it reaches M/D/k. Four guess from a quarter each, and are
    still better than the better of two replicas drawn by chance."""
    one, four = (served(4, 0.8, fronts).mean() for fronts in (1, 4))
    assert one == pytest.approx(common_queue(4, 0.8).mean())
    assert one == pytest.approx(served_by(Least(), 4, 0.8).mean())
    assert 1.1 * one < four < 0.9 * served_by(PowerOfTwo(1), 4, 0.8).mean()


def test_more_ranks_never_hold_less(tmp_path: Path) -> None:
    """Checked, not assumed, with one front end and with one for each rank."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL.replace("max_num_seqs: 8", "max_num_seqs: 1"))
    for fronts in ("1", "null"):
        means = []
        for ranks in (2, 3, 4, 6):
            options = [f"engine.data_parallel_size={ranks}", f"gpu.count={ranks}"]
            options += [f"engine.api_server_count={fronts}", "workload.num_prompts=400"]
            means.append(run(load_scenario(path, options)).summary()["mean_e2el_ms"])
        assert means == sorted(means, reverse=True), (fronts, means)


def test_a_server_fails_with_all_its_ranks() -> None:
    """Both requests of server 0 begin anew on server 1, which has two of its own."""
    load = workload(*[(0.0, 4, 5)] * 4)
    outage = OutageConfig(replica=0, start=2.0, duration=10.0)
    blocks = {
        "ranks": 2,
        "front_ends": 1,
        "shared": None,
        "failures": FailuresConfig(outages=[outage]),
    }
    seen = World(load, fcfs, Clock(), 2, blocks)
    assert sorted(seen.table.replica.tolist()) == [2, 2, 3, 3]
    counts = seen.fleet.counters
    assert (counts["failures"], counts["tries_lost_in_failures"]) == (1, 2)
    assert seen.reasons() == ["stop"] * 4


# ---------------------------------------------------------------- lock-step


def test_a_step_takes_as_long_as_that_of_the_slowest_rank() -> None:
    """Prompts of 8 and 2 tokens at 1 + 0.1 s a token: 1.8 s for both, then 1.1 s for each decode.

    Rank 1 is done at 2.9 and runs dummy batches; a request that comes at 3.0 begins with the next
    step of rank 0, at 4.0, and its prompt of 5 tokens makes that one 1.5 s long.
    """
    load = workload((0.0, 8, 5), (0.0, 2, 2), (3.0, 5, 1))
    fleet = play(load, [fcfs(), fcfs()], Clock(1.0, 0.1), joint=JointStep())
    zero, one = (log.steps for log in fleet.logs)
    assert fleet.logs[0].requests["first_token"][0] == pytest.approx(1.8)
    assert fleet.logs[0].tick_ends.tolist() == pytest.approx([2.9, 4.0, 5.5, 6.6])
    assert zero["steps"].sum() == 5
    assert one["start"].tolist() == pytest.approx([0.0, 1.8, 4.0])
    assert one["end"].tolist() == pytest.approx([1.8, 2.9, 5.5])


def test_what_ranks_compute_together_comes_on_top_by_the_tokens_of_all() -> None:
    """8 and 2 prompt tokens: 1.8 s and 10 x 0.01; then 1 and 1: 1.1 s and 0.02; alone 0.01."""
    load = workload((0.0, 8, 3), (0.0, 2, 2))
    fleet = play(
        load, [fcfs(), fcfs()], Clock(1.0, 0.1), joint=JointStep(lambda tokens: 0.01 * sum(tokens))
    )
    assert fleet.logs[0].requests["first_token"][0] == pytest.approx(1.9)
    assert fleet.logs[0].tick_ends.tolist() == pytest.approx([3.02, 4.13])


@given(workloads(), engines(pipelines=False), clocks, st.booleans())
@settings(max_examples=120, deadline=None)
def test_one_rank_in_lock_step_is_an_engine_alone(load, engine, clock, leap) -> None:
    """Whatever it schedules by, also with two batches in flight."""
    fleet = play(load, [engine()], clock, leap=leap, joint=JointStep())
    alone, _ = play_alone(load, engine(), clock, leap=leap)
    assert fleet.logs[0].step_rows == alone.step_rows
    assert fleet.logs[0].run_rows == alone.run_rows
    assert fleet.logs[0].decided == alone.decided
    assert np.sort(fleet.logs[0].requests, order="id").tobytes() == (
        np.sort(alone.requests, order="id").tobytes()
    )


@given(workloads(), clocks, st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_all_ranks_with_work_begin_and_end_together(load, clock, ranks) -> None:
    engines = [fcfs(max_model_len=64) for _ in range(ranks)]
    fleet = play(load, engines, clock, leap=False, joint=JointStep())
    rows = np.concatenate([log.steps for log in fleet.logs])
    for start in np.unique(rows["start"]):
        assert len(set(rows["end"][rows["start"] == start])) == 1
    order = np.argsort(rows["start"], kind="stable")
    starts, ends = rows["start"][order], rows["end"][order]
    assert (starts[1:] >= ends[:-1])[starts[1:] != starts[:-1]].all()


# ---------------------------------------------------------------- scenarios


def made(folder: Path, more: str, *overrides: str) -> Result:
    path = folder / "s.yaml"
    path.write_text(SMALL + more)
    return run(load_scenario(path, overrides))


def test_a_server_is_a_cluster_of_one_with_a_log_for_each_rank(tmp_path: Path) -> None:
    result = made(tmp_path, BOTH, "engine.data_parallel_size=2")
    block = result.summary()["headway"]["cluster"]
    group = block["groups"]["all"]
    assert (len(result.logs), block["gpus"], group["replicas"]) == (2, 2, 1)
    assert group["data_parallel_size"] == 2
    assert block["dollars_per_hour"] == pytest.approx(2 * 3.43)
    assert block["replica_hours"] == pytest.approx(result.summary()["duration"] / 3600)
    assert set(result.requests["replica"]) == {0, 1}
    ours = result.summary()["headway"]
    for key in ("mfu", "bandwidth_utilization", "gpu_busy_fraction", "mean_waiting", "steps"):
        assert ours[key] == pytest.approx(group[key])
    again = made(tmp_path, BOTH, "engine.data_parallel_size=2")
    assert json.dumps(again.summary()) == json.dumps(result.summary())


def test_an_older_balancer_is_not_simulated_and_that_is_told(tmp_path: Path) -> None:
    with pytest.warns(HeadwayWarning, match=r"0\.11: its load balancer filled data-parallel ranks"):
        made(tmp_path, BOTH, "engine.data_parallel_size=2", "engine.version='0.11'")


def test_a_router_sees_one_target_for_each_server(tmp_path: Path) -> None:
    """Every other request goes to the server of three ranks; its ranks are numbers 1 to 3."""
    more = """cluster:
  router: round_robin
  groups:
    alone: {}
    many: {gpu: {count: 3}, engine: {data_parallel_size: 3}}
"""
    result = made(tmp_path, more)
    counts = result.requests["replica"].value_counts()
    assert counts[0] == counts[[1, 2, 3]].sum() == 20
    assert result.cluster.groups == ["alone", "many", "many", "many"]
    assert result.cluster.servers == [0, 1, 1, 1]
    block = result.summary()["headway"]["cluster"]
    assert block["gpus"] == 4
    assert block["dollars_per_hour"] == pytest.approx(4 * 3.43)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "gpu: {count: 4}\nengine: {data_parallel_size: 2, tensor_parallel_size: 4}",
            "s.yaml:1: gpu.count: must equal engine.tensor_parallel_size x data_parallel_size "
            "(4 x 2), not 4: these are of one engine",
        ),
        (
            "engine: {data_parallel_size: 0}",
            "s.yaml:1: engine.data_parallel_size: must be at least 1, not 0",
        ),
        (
            "gpu: {count: 1}\nengine: {name: sglang, api_server_count: 2}",
            "s.yaml:2: engine.api_server_count: is vLLM's; sglang is simulated with one front end",
        ),
        (
            "gpu: {count: 2}\nengine: {name: sglang, data_parallel_size: 2}",
            "s.yaml:2: engine.data_parallel_size: the internal load balancer is vLLM's; for sglang",
        ),
    ],
)
def test_what_does_not_go_together_is_told_by_line_and_key(tmp_path, more, message) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(more + "\n")
    told = errors(path)
    assert any(line.startswith(message) for line in told), told


@pytest.mark.medium
def test_the_command_line_and_a_plan_know_the_key(tmp_path: Path) -> None:
    """2 GPUs: one engine of two, or two ranks; combinations that take others are left out."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + BOTH)
    options = ["engine.data_parallel_size=2"]
    command = serve_command(load_scenario(path, options))
    assert "--data-parallel-size 2" in command
    assert "each on" not in command  # one server: nothing to tell apart
    seats = "max_num_seqs: 1, tensor_parallel_size: 2"
    path.write_text((SMALL + BOTH).replace("max_num_seqs: 8", seats))
    axes = {"engine.tensor_parallel_size": [1, 2], "engine.data_parallel_size": [1, 2]}
    frame = plan(path, ["p90_ttft_ms<=500"], axes, cheapest=True, jobs=1)
    row = frame.iloc[0]  # the cost model given here knows of no tensor parallelism
    assert (int(row["engine.data_parallel_size"]), row["gpus"]) == (2, 2)
    assert frame["holds"].astype(bool).sum() == 1
