"""Troubles of fleets: each has the right first finding, and following its advice helps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.planning.diagnose import follow, gain, value_of
from simulator import load_scenario, run
from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.autoscaler_waits import autoscaler_waits
from simulator.diagnosis.evidence import Evidence
from simulator.diagnosis.fleet_rules import Outage, _scale_sooner, explained, find_outages, routing

FLEET = """name: fleet
engine: {name: textbook, max_num_seqs: 8, max_num_batched_tokens: 512, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 1500, request_rate: 20, input_len: 64, output_len: 50}
cluster: {replicas: 3, router: least_outstanding}
"""
OUTAGES = (
    "{replica: 1, start: 15, duration: 20}, {replica: 2, start: 20, duration: 15}, "
    "{replica: 0, start: 60}"
)
WAVES = ("cluster.replicas=1", "workload.num_prompts=3000")


def scaled(*more: str, **keys: float) -> tuple[str, ...]:
    block = ", ".join(f"{name}: {value}" for name, value in keys.items())
    return *WAVES, f"cluster.autoscaling={{max_replicas: 6, {block}}}", *more


RATE, WAVE = "workload.request_rate=25", "workload.diurnal={period: 160, amplitude: 0.9}"
SHORT_WAVE = "workload.diurnal={period: 30, amplitude: 1}"
CASES: dict[str, tuple[tuple[str, ...], str, str, tuple[str, ...]]] = {
    "failures": (
        (f"cluster.failures={{outages: [{OUTAGES}]}}",),
        *("failures", "cluster.replicas"),
        (
            "replica 1 from 15 s to 35 s, replica 2 from 20 s to 35 s",
            "replica 0 from 60 s to the end",
        ),
    ),
    "startup_delay": (
        scaled(
            *("workload.request_rate=16", "workload.diurnal={period: 120, amplitude: 0.9}"),
            startup_delay=30,
            interval=1,
        ),
        *("autoscaling", "cluster.autoscaling.startup_delay"),
        ("while replicas start (startup_delay 30 s)",),
    ),
    "interval": (
        scaled(RATE, WAVE, startup_delay=1, interval=40),
        *("autoscaling", "cluster.autoscaling.interval"),
        ("while the autoscaler waits for its next look (interval 40 s)",),
    ),
    "target": (
        scaled(RATE, startup_delay=1, interval=1, target=40),
        *("autoscaling", "cluster.autoscaling.target"),
        ("while target 40 of queue_depth calls for no more replicas",),
    ),
    "cooldown": (
        scaled(
            *(RATE, SHORT_WAVE, "cluster.replicas=6"),
            startup_delay=10,
            interval=1,
            cooldown=0,
        ),
        *("autoscaling", "cluster.autoscaling.cooldown"),
        ("taken away", "(cooldown 0 s, startup_delay 10 s)"),
    ),
    "session affinity": (
        ("cluster.router=session_affinity", "workload.clients=[8, 1, 1]"),
        *("routing", "cluster.router"),
        ("Session affinity pins a backlog to replica 0: 100% of all waiting is there",),
    ),
    "random router": (
        (
            *("cluster.router=random", "workload.request_rate=5", "engine.max_num_seqs=2"),
            "workload.output_len={kind: lognormal, median: 40, sigma: 1.2, high: 800}",
        ),
        *("routing", "cluster.router"),
        ("wait at one replica while another is free (router random",),
    ),
    "scattered prefixes": (
        (
            *("engine.enable_prefix_caching=true", "engine.num_gpu_blocks_override=600"),
            *("engine.max_model_len=1024", "cluster.router=round_robin", "cost.per_token=1e-4"),
            *("workload.request_rate=30", "workload.output_len=5"),
            "workload.prefix_groups={num_prefixes: 40, prefix_len: 512}",
        ),
        *("scattered_prefixes", "cluster.router"),
        ("round_robin sends prompts that begin alike to different replicas",),
    ),
}


def findings(path: Path, *sets: str) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    scenario = load_scenario(path, sets)
    summary = run(scenario).summary()
    return scenario, summary, summary["headway"]["diagnosis"]


@pytest.mark.many
@pytest.mark.parametrize("name", CASES)
def test_the_first_finding_names_the_trouble_and_its_advice_helps(write, name: str) -> None:
    sets, rule, key, words = CASES[name]
    scenario, summary, (first, *_) = findings(write(FLEET), *sets)
    assert first["rule"] == rule
    assert all(word in first["text"] for word in words), first["text"]
    advice = first["advice"][0]
    assert advice["key"] == key
    after = run(follow(scenario, advice)).summary()
    metric = first["metric"]
    assert gain(metric, value_of(summary, metric), value_of(after, metric)) > 0.1


def test_a_calm_fleet_has_none_of_them(write) -> None:
    assert findings(write(FLEET))[2] == []
    rules = {
        finding["rule"]
        for sets in (
            ("cluster.failures={outages: [{replica: 1, start: 15, duration: 1}]}",),
            ("cluster.router=random", "workload.request_rate=5"),
            scaled("workload.request_rate=2", startup_delay=1, interval=1),
        )
        for finding in findings(write(FLEET), *sets)[2]
    }
    assert not rules & {"failures", "autoscaling", "routing", "scattered_prefixes"}


@pytest.mark.parametrize(
    ("router", "share", "blamed"),
    [("random", 0.4, True), ("random", 0.004, False), ("least_outstanding", 0.4, False)],
)
def test_a_router_is_to_blame_that_looks_at_no_replica_where_requests_wait(
    router: str, share: float, blamed: bool
) -> None:
    """Half of the requests' time they wait, and that much of it beside a free replica."""
    run = SimpleNamespace(
        misrouted=2 * share,
        share=lambda _: 0.5,
        waited=[3.0, 1.0],
        record=SimpleNamespace(scenario=load_scenario("demo", [f"cluster={{router: {router}}}"])),
        advisor=SimpleNamespace(replicas=list),
    )
    found = routing(run)  # type: ignore[arg-type]
    assert (found is not None) == blamed
    assert found is None or found.weight == pytest.approx(share)


# One replica of one seat, a second each; a second replica is away from 2 to 6 s.
ONE_BY_ONE = """name: one
engine: {name: textbook,
  max_num_seqs: 1, max_num_batched_tokens: 64, max_model_len: 64, block_size: 16,
         enable_prefix_caching: false}
cost: {kind: linear, base: 1}
workload: {num_prompts: 12, request_rate: 1, burstiness: inf, input_len: 8, output_len: 2}
"""


def test_what_failures_cost_by_hand(write) -> None:
    """One request a second, each of 2 s, on two replicas of one seat: nobody waits.

    With one away from 2.5 to 6.5 s the other takes one after the other from 3 s on: those of 2
    (which was lost), 3, 4, 5 and 6 s end at 5, 7, 9, 11 and 13 s, those of 7, 8 and 9 s, at the one
    that is back, at 9, 11 and 13 s, and those of 10, 11 and 12 s at 15, 15 and 17 s. Only at 13 s
    no more than one waits again. So all but the first are affected: 48 s for eleven.
    """
    away = "failures: {outages: [{replica: 1, start: 2.5, duration: 4}]}"
    sets = [f"cluster={{replicas: 2, router: least_outstanding, {away}}}"]
    result = run(load_scenario(write(ONE_BY_ONE), sets))
    evidence = Evidence(result, result.summary())
    found = find_outages(evidence)
    assert found is not None
    assert found.each == [Outage(1, 2.5, 6.5)]
    assert found.most_down == 1
    assert found.mean_others == pytest.approx(2.0)
    assert found.mean_affected == pytest.approx(48 / 11)
    assert found.excess == pytest.approx(48 - 22)


def test_a_failure_that_nobody_feels_costs_nothing(write) -> None:
    """A request each 10 s, of 2 s; the one of 30 s comes while the idle replica is away."""
    away = "failures: {outages: [{replica: 1, start: 25, duration: 10}]}"
    sets = [f"cluster={{replicas: 2, router: least_outstanding, {away}}}"]
    result = run(load_scenario(write(ONE_BY_ONE), [*sets, "workload.request_rate=0.1"]))
    found = find_outages(Evidence(result, result.summary()))
    assert found is not None
    assert (found.mean_affected, found.excess) == (pytest.approx(2.0), pytest.approx(0.0))


def test_where_the_target_is_high_all_wait_for_it(write) -> None:
    """Of 50 in flight there never are so many: no replica is ordered."""
    block = "autoscaling: {target: 50, max_replicas: 2, interval: 3, startup_delay: 2}"
    result = run(load_scenario(write(ONE_BY_ONE), [f"cluster={{replicas: 1, {block}}}"]))
    found = autoscaler_waits(Evidence(result, result.summary()))
    assert found is not None
    waited = float(result.request_table().queue_time.sum())
    assert found.seconds["target"] == pytest.approx(waited, abs=0.02)
    assert sum(found.seconds.values()) == found.seconds["target"]


def test_an_autoscalers_waits_by_hand(write) -> None:
    """At 3 s it sees a queue and orders a replica, which starts at 5 s: at most two there may be.

    Until 3 s the next look was awaited, until 5 s the replica; then all are there. What is waited
    until then is explained, of all that a request alone would not have waited.
    """
    block = "autoscaling: {target: 0.5, max_replicas: 2, interval: 3, startup_delay: 2}"
    sets = [f"cluster={{replicas: 1, {block}}}"]
    result = run(load_scenario(write(ONE_BY_ONE), sets))
    evidence = AdvisedEvidence(result, result.summary())
    found = autoscaler_waits(evidence)
    assert found is not None
    assert found.most_up == 2
    table = result.request_table()

    def waited(begin: float, end: float) -> float:
        inside = [
            max(min(end, b) - max(begin, a), 0.0)
            for a, b in zip(table.sent, table.first_scheduled, strict=True)
        ]
        return sum(inside)

    orders = [time for time, _, state in result.cluster.changes if state == "starting"]
    (at,) = orders
    assert at == 3.0
    assert found.seconds["interval"] == pytest.approx(waited(0, 3), abs=0.02)
    assert found.seconds["startup_delay"] == pytest.approx(waited(3, 5), abs=0.02)
    assert found.seconds["target"] == found.seconds["cooldown"] == 0
    share = waited(0, 5) / float(table.queue_time.sum())
    assert explained(evidence) == pytest.approx(share, rel=0.005)
    causes = ("startup_delay", "interval", "target", "cooldown")
    first = [_scale_sooner(evidence, cause, found)[0] for cause in causes]
    assert [one.key for one in first] == [f"cluster.autoscaling.{cause}" for cause in causes]
    assert [one.to for one in first] == [0.5, 1.0, 0.25, 2 * first[-1].value]


@pytest.mark.parametrize(
    ("interval", "goes", "second", "cooldown", "startup"),
    [(1, 11.0, 14, 5.0, 5.0), (1, 11.0, 16, 0.0, 10.0), (0.5, 10.5, 11, 6.0, 5.0)],
)
def test_a_replica_that_is_back_soon_was_taken_away_too_early(
    write, tmp_path: Path, interval: float, goes: float, second: int, cooldown, startup
) -> None:
    """It can be back in 2 s, or 1.5: soon is 4 s, or 3. Each time five wait or more as it starts.

    How long it was away, where that counts, is the gap that a longer cooldown spans.
    """
    lines = "".join(f"2023-11-16 18:00:{at:02},8,2\n" for at in [0] * 6 + [second] * 6)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    block = f"{{target: 0.5, max_replicas: 2, interval: {interval}, startup_delay: 1, cooldown: 1}}"
    sets = ["workload={trace: {path: t.csv}}", f"cluster={{replicas: 1, autoscaling: {block}}}"]
    result = run(load_scenario(write(ONE_BY_ONE), sets))
    changes = [(time, state) for time, replica, state in result.cluster.changes if replica]
    assert (goes, "draining") in changes
    assert (second, "starting") in changes
    found = autoscaler_waits(Evidence(result, result.summary()))
    assert found is not None
    assert found.gap == (second - goes if cooldown else 0.0)
    assert found.seconds["cooldown"] == pytest.approx(cooldown, abs=0.1)
    assert found.seconds["startup_delay"] == pytest.approx(startup, abs=0.1)


def test_nobody_could_have_gone_to_a_replica_before_it_was_there(write) -> None:
    """Ordered at 3 s, it would come up at 23 s; by 8 s all have ended."""
    block = "autoscaling: {target: 0.5, max_replicas: 2, interval: 3, startup_delay: 20}"
    sets = ["workload.num_prompts=4", f"cluster={{replicas: 1, {block}}}"]
    result = run(load_scenario(write(ONE_BY_ONE), sets))
    assert next(state for _, replica, state in result.cluster.changes if replica) == "starting"
    assert Evidence(result, result.summary()).misrouted == 0.0
