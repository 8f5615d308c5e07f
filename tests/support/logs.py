"""Logs made by hand, and by hypothesis, next to the plain lists that they must amount to.

All times are multiples of 1/64 s, so that sums and differences of them are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from simulator.build.engine_spec import EngineSpec
from simulator.core.engine_config import EngineConfig, GpuConfig
from simulator.core.log import REASONS, STEP, Log, pack_request, pack_run
from simulator.costs.linear import LinearCost
from simulator.models.gpus import find_gpu
from simulator.models.power import gpu_power
from simulator.models.spec import ModelSpec
from simulator.results.metrics import PERCENTILES, RunMetrics, Summary
from simulator.results.record import PartialRecord
from simulator.schedulers.vllm.rules import NEWEST_RELEASE, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload
from tests.support.engines import Clock, workload

TICK = 1 / 64


@dataclass
class ObservedRequest:
    """One request as a client sees it."""

    sent: float
    scheduled: float = -1.0
    tokens: list[float] = field(default_factory=list)  # when each came out
    reason: str = "stop"
    replica: int = 0
    prompt: int = 5
    cached: int = 0
    preemptions: int = 0

    @property
    def completed(self) -> bool:
        return self.reason in ("stop", "length")

    @property
    def finish(self) -> float:
        return self.tokens[-1] if self.completed else -1.0


@dataclass
class LoggedRun:
    """What happened in a run: requests, single steps (dicts with start and end), and the logs."""

    requests: list[ObservedRequest]
    steps: list[list[dict]]  # per replica
    logs: list[Log]

    @property
    def sent(self) -> np.ndarray:
        return np.array([r.sent for r in self.requests])

    @property
    def workload(self) -> Workload:
        return make_workload(self.requests)


def make_workload(requests: list[ObservedRequest], **options) -> Workload:
    """Return the workload that would have led to these requests."""
    return Workload(
        arrival=np.array([r.sent for r in requests], float),
        prompt_tokens=np.array([r.prompt for r in requests], int),
        output_tokens=np.array([max(len(r.tokens), 1) for r in requests], int),
        **options,
    )


TINY = ModelSpec(
    name="tiny",
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    intermediate_size=16,
    vocab_size=100,
)


def summarize(
    load: Workload,
    sent: np.ndarray,
    logs: list[Log],
    *,
    goodput: dict[str, float] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
    model: ModelSpec = TINY,
    power: dict[str, float] | None = None,
    **engine,
) -> Summary:
    """Return the summary of logs, of engines with these settings on A100s."""
    scenario = SimpleNamespace(
        models=[],
        engine=EngineConfig(**{"max_num_seqs": 20, "block_size": 4, **engine}),
        gpu=GpuConfig(power=power or {}),
        slo=[],
        place=str,
        goodput=SimpleNamespace(bounds=goodput or {}, classes={}),
        cluster=None,
    )
    gpu, given = find_gpu("A100-80GB"), scenario.gpu.power
    spec = EngineSpec(
        engine=scenario.engine,
        model=model,
        gpu=gpu,
        memory=None,
        cost=LinearCost(base=1.0),
        power=gpu_power(given.idle, given.max, gpu.max_power),
        carbon_intensity=scenario.gpu.carbon_intensity,
        release=NEWEST_RELEASE,
        rules=rules_of(NEWEST_RELEASE),
        num_gpu_blocks=1000,
        max_model_len=1000,
        policy=Scheduler,
        arguments={},
        order=None,
        predicts=False,
        seed=3,
        folder=Path(),
        blame=lambda block, error: HeadwayError(f"{block}: {error}"),
    )
    metrics = RunMetrics(scenario, load, [spec] * len(logs))
    metrics.add(PartialRecord(load, sent, logs))
    return metrics.summary({"version": "1", "seed": 3}, percentiles)


def add_step(log: Log, start: float, end: float, **values: int) -> None:
    """Write down a row of steps; what is not given is 0, `steps` 1."""
    row = np.zeros(1, STEP)
    for name, value in ({"start": start, "end": end, "steps": 1} | values).items():
        row[name] = value
    log.step_rows += row.tobytes()


def add_request(log: Log, number: int, seen: ObservedRequest) -> None:
    """Write down a request's row, and that it joined the queue as it was sent."""
    if seen.reason != "rejected":
        log.joined.append(seen.sent)
    log.request_rows += pack_request(
        seen.scheduled,
        seen.tokens[0] if seen.tokens else -1.0,
        seen.finish,
        number,
        seen.preemptions,
        seen.cached,
        len(seen.tokens),
        REASONS.index(seen.reason),
    )


def add_run(log: Log, number: int, start: float, first_tick: int, ticks: int) -> None:
    """Write down a run of tokens."""
    log.run_rows += pack_run(start, number, first_tick, ticks)


times = st.integers(0, 200).map(lambda n: n * TICK)
lengths = st.integers(1, 100).map(lambda n: n * TICK)
small = st.integers(0, 20)


@st.composite
def _replica(draw) -> tuple[Log, list[dict]]:
    """A log of steps with ticks, and its single steps listed."""
    log = Log(num_blocks=100, block_size=4, num_seats=20)
    log.seat_rows = draw(st.sampled_from([None, bytearray()]))
    now = draw(times)
    steps = []
    for _ in range(draw(st.integers(0, 8))):
        now += draw(st.one_of(st.just(0.0), times))
        durations = draw(st.lists(lengths, min_size=1, max_size=4))
        leapt = len(durations) > 1
        row = {
            "context": draw(small),
            "kv_tokens": draw(small),
            "prefill_tokens": 0 if leapt else draw(small),
            "decodes": draw(st.integers(1, 9)),
            "wasted": draw(small),
            "running": draw(small),
            "waiting": draw(small),
            "blocks_used": draw(small),
            "preempted": draw(st.integers(0, 2)),
        }
        ends = (now + np.cumsum(durations)).tolist()
        added = draw(st.lists(small, min_size=len(ends) - 1, max_size=len(ends) - 1))
        tick = leapt or draw(st.booleans())
        add_step(log, now, ends[-1], steps=len(ends), **row)
        for index, end in enumerate(ends):
            later = {
                "context": row["context"] + index * (row["decodes"] + row["wasted"]),
                "kv_tokens": row["kv_tokens"] + index * row["decodes"],
                "blocks_used": row["blocks_used"] + sum(added[:index]),
                "preempted": 0 if index else row["preempted"],
            }
            begin = ends[index - 1] if index else now
            steps.append(row | later | {"start": begin, "end": end, "tick": tick})
        log.leap_blocks.extend(added)
        if tick:
            log.tick_ends.extend(ends)
        now = ends[-1]
    return log, steps


@st.composite
def _tokens(draw, log: Log, steps: list[dict], number: int) -> list[float]:
    """Some runs of tokens on the ticks of a log; write them down, give their times."""
    ticks = list(log.tick_ends)
    tokens: list[float] = []
    first = 0
    for _ in range(draw(st.integers(1, 3))):
        after = tokens[-1] if tokens else -1.0
        begins = [step["end"] for step in steps if step["end"] > after]
        if not begins:
            break
        start = draw(st.sampled_from(begins))
        first = max(first, int(np.searchsorted(ticks, start, side="right")))
        count = draw(st.integers(0, len(ticks) - first))
        add_run(log, number, start, first, count)
        tokens += [start, *ticks[first : first + count]]
        first += count
    return tokens


@st.composite
def logged_runs(draw, max_replicas: int = 2, max_requests: int = 6) -> LoggedRun:
    """A run with any requests on any steps; nothing ties the steps' sums to the requests."""
    replicas = [draw(_replica()) for _ in range(draw(st.integers(1, max_replicas)))]
    requests = []
    for number in range(draw(st.integers(0, max_requests))):
        seen = ObservedRequest(sent=0.0, replica=draw(st.integers(0, len(replicas) - 1)))
        log, steps = replicas[seen.replica]
        seen.prompt = draw(st.integers(1, 50))
        seen.reason = draw(st.sampled_from(REASONS))
        if steps and seen.reason != "rejected":
            seen.tokens = draw(_tokens(log, steps, number))
        if seen.completed and not seen.tokens:
            seen.reason = "unfinished"
        if seen.tokens:
            seen.scheduled = draw(st.sampled_from([s["start"] for s in steps]))
            seen.scheduled = min(seen.scheduled, seen.tokens[0])
            seen.cached = draw(st.integers(0, seen.prompt - 1))
            seen.preemptions = draw(st.integers(0, 2))
            seen.sent = max(0.0, seen.scheduled - draw(times))
        else:
            seen.sent = draw(times)
        add_request(log, number, seen)
        requests.append(seen)
    return LoggedRun(requests, [s for _, s in replicas], [log for log, _ in replicas])


CLOCK = Clock(base=0.25, per_token=1 / 128, per_context=1 / 1024)
"""Seconds that add up exactly."""
loads = st.lists(
    st.tuples(st.integers(0, 400).map(lambda n: n * TICK), st.integers(1, 30), st.integers(1, 30)),
    min_size=1,
    max_size=15,
).map(lambda requests: workload(*sorted(requests)))
"""Workloads for a real engine with that clock."""


def logged(**columns: list[int]) -> np.ndarray:
    """Make rows of a step log; columns that are not given are 0, `steps` 1."""
    rows = np.zeros(len(next(iter(columns.values()))), STEP)
    rows["steps"] = 1
    for name, values in columns.items():
        rows[name] = values
    return rows
