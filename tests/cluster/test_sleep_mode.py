"""Models that share GPUs by sleep mode: who is awake when, what a wake-up takes, who waits."""

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.candidate import resources
from headway.report.vllm_serve import serve_command
from simulator import Result, load_scenario, run
from simulator.build.kv_room import memory_budget
from simulator.cluster.config import SleepModeConfig
from simulator.cluster.sleep_mode import SleepTimes
from simulator.scenario.load import resolve
from simulator.util.errors import HeadwayError

FLEET = """
model: llama-3-8b
gpu: {name: H100-80GB}
engine: {name: textbook, max_model_len: 4096, num_gpu_blocks_override: 2000}
cost: {kind: linear, base: 0.5}
cluster:
  router: least_outstanding
  sleep_mode: {}
  groups:
    a: {}
    b: {model: qwen3-8b, cost: {kind: linear, base: 0.5}}
workload:
  trace: {path: trace.csv, format: requests}
"""
THIRD = "cluster.groups.c={model: qwen3-4b, cost: {kind: linear, base: 0.5}}"
A, B, C = "llama-3-8b", "qwen3-8b", "qwen3-4b"
Row = tuple[float, int, str]
"""When a request comes, how many steps it takes, and the model that it asks for."""

MEASURED = [  # level, GB of weights on each GPU, GPUs, s to fall asleep, s to wake up
    (1, 1.2, 1, 0.09, 0.26),  # Qwen3-0.6B
    (1, 61.1, 1, 2.78, 2.87),  # Qwen3-Coder-30B-A3B
    (2, 1.2, 1, 0.11, 0.85),  # Qwen3-0.6B
    (2, 8.3, 1, 0.45, 2.58),  # Phi-3-vision
]
"""On A100, vLLM 0.11: blog "Zero-Reload Model Switching with vLLM Sleep Mode", 2025-10-26."""


def fleet(folder: Path, rows: list[Row], *changes: str, stepwise: bool = False) -> Result:
    folder.mkdir(exist_ok=True)
    lines = [f"{at},16,{steps},{model}\n" for at, steps, model in rows]
    head = "arrival,prompt_tokens,output_tokens,model\n"
    (folder / "trace.csv").write_text(head + "".join(lines))
    (folder / "s.yaml").write_text(FLEET)
    return run(load_scenario(folder / "s.yaml", [*changes]), stepwise=stepwise)


@cache
def loaded(name: str) -> float:
    """Return the bytes of a model's weights on its GPU: parameters, and tables of a few MB."""
    spec = resolve(load_scenario({"model": name, "gpu": {"name": "H100-80GB"}}))
    size = memory_budget(spec.engine, spec.model, spec.gpu).weights
    parameters = {A: 8_030_261_248, B: 8_190_735_360, C: 4_022_468_096}[name]
    assert size == pytest.approx(2 * parameters, rel=0.002)
    return size


def switch(level: int = 1, name: str = A, to: str = B) -> float:
    """Return how long it takes from one of the two models to the other: bytes by bandwidth."""
    if level == 2:
        return 0.25 + 0.55 + loaded(to) / 4.1e9
    return 0.05 + loaded(name) / 22e9 + 0.2 + loaded(to) / 22e9


@pytest.mark.parametrize(("level", "size", "gpus", "sleep", "wake"), MEASURED)
def test_times_are_those_that_were_measured(level, size, gpus, sleep, wake) -> None:
    """Within 6 % of those that wake, and 0.2 s of those that fall asleep."""
    times = SleepTimes.of(SleepModeConfig(level=level), size * 1e9, gpus)
    assert times.wake == pytest.approx(wake, rel=0.06)
    assert times.sleep == pytest.approx(sleep, abs=0.21)


def test_gpus_that_share_a_switch_want_half_the_bandwidth() -> None:
    """Qwen3-235B in FP8 on four A100 took 5.4 s to wake and 5.9 s to sleep, in the same blog."""
    times = SleepTimes.of(SleepModeConfig(bandwidth=11), 235.1e9 / 4, 4)
    assert (times.sleep, times.wake) == (pytest.approx(5.9, rel=0.1), pytest.approx(5.4, rel=0.05))


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_waits_for_sleep_and_wake(tmp_path: Path, level: int) -> None:
    """By hand: the first is served at once, the second when b, idle until then, is awake."""
    rows = [(0.0, 4, A), (5.0, 2, B), (30.0, 1, B)]
    got = fleet(tmp_path, rows, f"cluster.sleep_mode.level={level}").requests
    took = [2.0, switch(level) + 1.0, 0.5]
    assert got.e2el.tolist() == pytest.approx(took, abs=1e-6)


def test_who_is_busy_ends_what_it_has_after_max_wait(tmp_path: Path) -> None:
    """By hand: b waits 3 s, then until a's request ends at 10 s; a's next until b is idle."""
    rows = [(0.0, 20, A), (1.0, 2, B), (6.0, 1, A)]
    result = fleet(tmp_path, rows, "cluster.sleep_mode.max_wait=3")
    got = result.requests
    awake = 10.0 + switch()
    first = awake + 1.0 - 1.0
    again = awake + 1.0 + switch(name=B, to=A) + 0.5 - 6.0
    assert got.e2el.tolist() == pytest.approx([10.0, first, again], abs=1e-6)
    told = result.summary()["headway"]["cluster"]["sleep_mode"]
    waits = [awake - 1.0, awake + 1.0 + switch(name=B, to=A) - 6.0]
    assert told["requests_that_waited"] == 2
    assert told["mean_wait_ms"] == pytest.approx(500 * sum(waits))
    assert told["share_of_ttft"] == pytest.approx(sum(waits) / (sum(waits) + 1.5))
    switching = switch() + switch(name=B, to=A)
    assert told["share_switching"] == pytest.approx(switching / sum(waits))
    assert told["host_memory_gb"] == pytest.approx(loaded(B) / 1e9)


def test_idle_timeout_keeps_a_model_awake(tmp_path: Path) -> None:
    """By hand: a is idle from 2 s on; b may have its GPU from 6 s on, and came at 3 s."""
    rows = [(0.0, 4, A), (3.0, 1, B)]
    got = fleet(tmp_path, rows, "cluster.sleep_mode.idle_timeout=4").requests
    assert got.e2el[1] == pytest.approx(3.0 + switch() + 0.5, abs=1e-6)
    sooner = ["cluster.sleep_mode.idle_timeout=4", "cluster.sleep_mode.max_wait=1"]
    got = fleet(tmp_path, rows, *sooner).requests
    assert got.e2el[1] == pytest.approx(1.0 + switch() + 0.5, abs=1e-6)


def test_a_busy_model_starves_nobody(tmp_path: Path) -> None:
    """A model that is never idle gives way after max_wait, when what it has is over."""
    rows = [(0.4 * k, 6, A) for k in range(300)]
    rows += [(20.0, 1, B), (50.0, 1, B), (21.0, 1, C)]
    got = fleet(tmp_path, sorted(rows), THIRD, "cluster.sleep_mode.max_wait=5").requests
    waited = got[got.model != A].ttft
    most = 5.0 + 2 * (3.0 + switch() + 1.0) + 0.5  # behind the other one, too
    assert len(waited) == 3
    assert waited.max() < most


def test_a_cache_is_lost_in_sleep(tmp_path: Path) -> None:
    """All prompts begin alike: the first after each wake-up finds nothing, all others do."""
    load = "workload={num_prompts: 60, request_rate: 0.3, input_len: 64, output_len: 2, "
    load += "prefix_groups: {num_prefixes: 1, prefix_len: 48}, "
    load += "models: {llama-3-8b: 1, qwen3-8b: 1}}"
    (tmp_path / "s.yaml").write_text(FLEET)
    changes = [load, "engine.enable_prefix_caching=true"]
    result = run(load_scenario(tmp_path / "s.yaml", changes))
    assert result.cluster is not None
    got, wakes = result.requests, 0
    for server in (0, 1):
        ups = [at for at, one, state in result.cluster.changes if (one, state) == (server, "up")]
        mine = got[got.replica == server]  # FCFS: in the order in which they came
        since = np.searchsorted(ups, mine.arrival + mine.e2el, "right")
        first = np.diff(since, prepend=0) > 0
        assert (mine.cached_tokens == np.where(first, 0, 48)).all()
        wakes += len(ups)
    assert 10 < wakes < 60


def check(result: Result, rows: list[Row], sets: int) -> None:
    """Check what holds of every run."""
    record = result.cluster
    assert record is not None
    assert len(result.requests) == len(rows)
    assert (result.requests.finish_reason == "stop").all()
    places = [server % sets for server in record.servers]
    awake = defaultdict(list)
    for (number, log), place in zip(enumerate(result.logs), places, strict=True):
        mine = [(at, state) for at, server, state in record.changes if server == number]
        ups = [at for at, state in mine if state == "up"]
        offs = [at for at, state in mine if state == "off"] + [np.inf]
        spans = list(zip(ups, offs, strict=False))
        awake[place] += spans
        for step in log.steps:  # nothing runs on a GPU while it sleeps
            assert any(up <= step["start"] and step["end"] <= off for up, off in spans)
    for spans in awake.values():  # one is awake at a time, and the next only later
        spans.sort()
        assert all(off < up for (_, off), (up, _) in pairwise(spans))
    end = max(float(log.steps["end"][-1]) for log in result.logs if log.step_rows)
    paid = sum(record.paid_seconds(server, 0.0, end) for server in set(record.servers))
    assert paid == pytest.approx(sets * end)  # GPUs are paid once, by whoever has them


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 120), st.integers(1, 12), st.sampled_from([A, B, C])),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 2),
    st.sampled_from([0.0, 1.5, 10.0]),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
)
def test_laws(tmp_path_factory, drawn, sets, max_wait, idle, asynchronous) -> None:
    """Requests are conserved, GPUs have one model at a time, stepwise runs agree with leaping."""
    rows = sorted((at / 4, steps, model) for at, steps, model in drawn)
    folder = tmp_path_factory.mktemp("laws")
    name = "vllm" if asynchronous else "textbook"
    mode = f"{{replicas: {sets}, max_wait: {max_wait}, idle_timeout: {idle}}}"
    changes = [THIRD, f"cluster.sleep_mode={mode}", f"engine.name={name}"]
    found = [fleet(folder, rows, *changes, stepwise=way) for way in (False, True, False)]
    check(found[0], rows, sets)
    for other in found[1:]:
        assert other.cluster.changes == found[0].cluster.changes
        for column in ("ttft", "e2el", "replica"):
            assert other.requests[column].tolist() == found[0].requests[column].tolist()
    assert json.dumps(found[0].summary()) == json.dumps(found[2].summary())


def test_what_waits_for_wake_ups_is_told(tmp_path: Path) -> None:
    """The diagnosis has the share of TTFT, and what helps: level 1, or another set of GPUs."""
    rows = [(float(k), 2, (A, B)[k % 2]) for k in range(40)]
    for changes, key in (
        (["cluster.sleep_mode.level=2"], "cluster.sleep_mode.level"),
        (["cluster.sleep_mode.max_wait=60"], "cluster.sleep_mode.replicas"),
    ):
        own = fleet(tmp_path, rows, *changes).summary()["headway"]
        first, told = own["diagnosis"][0], own["cluster"]["sleep_mode"]["share_of_ttft"]
        assert first["rule"] == "wake_ups"
        assert first["text"].startswith(f"{told:.0%} of TTFT is waiting")
        assert first["advice"][0]["key"] == key


def test_the_servers_have_sleep_mode(tmp_path: Path) -> None:
    fleet(tmp_path, [(0.0, 1, A)])
    lines = serve_command(load_scenario(tmp_path / "s.yaml")).splitlines()
    assert [line.endswith(" --enable-sleep-mode") for line in lines if "vllm serve" in line] == [
        True,
        True,
    ]


def test_shared_gpus_count_once(tmp_path: Path) -> None:
    rows = [(float(k), 2, (A, B)[k % 2]) for k in range(40)]
    result = fleet(tmp_path, rows, "cluster.sleep_mode.replicas=2")
    told = result.summary()["headway"]["cluster"]
    assert resources(result.scenario) == (2, 2 * told["dollars_per_hour"] / told["gpus"])
    assert told["gpus"] == 2
    assert told["gpu_hours"] == pytest.approx(2 * result.summary()["duration"] / 3600)
    both = [name for name in told["groups"] if told["groups"][name]["gpus"] == 2]
    assert both == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cluster.sleep_mode.groups=[a]", "cluster.sleep_mode: needs two groups or more"),
        ("cluster.sleep_mode.groups=[a, x]", "sleep_mode.groups: no group 'x'; there is a, b"),
        (
            "cluster.groups.a.replicas=2",
            "cluster.groups.a.replicas: cannot be used with sleep_mode",
        ),
        ("cluster.groups.a.gpu={name: A100-80GB}", "cluster.groups.b.gpu: must be that of a"),
        ("cluster.groups.c={}", "cluster.sleep_mode: each group that shares GPUs needs a model"),
        ("cluster.groups.b.autoscaling={}", "groups.b.autoscaling: cannot be used with sleep_mode"),
        ("cluster.sleep_mode.level=3", "cluster.sleep_mode.level: must be"),
        ("cluster.max_gpu_budget=3", "cluster.max_gpu_budget: cannot be used with sleep_mode"),
        ("cluster.failures={mtbf: 100}", "cluster.failures: needs one model"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        fleet(tmp_path, [(0.0, 1, A)], change)


def test_a_fleet_of_which_the_first_model_sleeps_on_is_diagnosed(tmp_path: Path) -> None:
    slow = ["engine.max_num_seqs=4", "goodput={ttft: 300}"]
    result = fleet(tmp_path, [(0.0, 3, B), (0.0, 3, B)], *slow)
    assert result.summary()["headway"]["diagnosis"]
