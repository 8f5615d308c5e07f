"""A case played through Headway's own SGLang scheduler, all recorded."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import simpy

from headway.conformance.case_model import SglangCase
from headway.conformance.recorder import Recorder, StepLimit, dump
from headway.conformance.replay import RecordedClock, RecordedReplica, Replay
from simulator.build.policy_table import find_order
from simulator.core.executor import Timing
from simulator.core.request import Request, Step
from simulator.engine.core import ExecutedStep, InFlight
from simulator.engine.replica import Replica
from simulator.features.drafts.blocks import EagleTree
from simulator.features.drafts.eagle import OverlappedSpeculativeSgLang, SpeculativeSgLang
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.hierarchical_cache import HierarchicalCache
from simulator.kv_cache.radix_cache import RadixCache
from simulator.schedulers.limits import Limits
from simulator.schedulers.sglang.options import SglangOptions
from simulator.schedulers.sglang.overlap import OverlappedSgLang
from simulator.schedulers.sglang.prefill import PrefillBudget
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.util.errors import HeadwayError, one_line

_QUEUE_SHOWN = 8  # requests
_UNURGENT = 2**53  # the priority of who has none
Memory = tuple[int, int, float, int]
"""Tokens free and evictable, the new-token ratio, and the tokens free on the host."""


@dataclass(slots=True)
class _Row:
    """A step, or a leap of equal ones, from its choice to its outcome."""

    t: int
    start: int
    mode: str
    tokens: int
    context: int
    scheduled: list[tuple[int, int, int]]  # id, tokens, tokens before
    facts: dict[str, Any]  # what only its first step has to tell
    full: bool
    running: int
    memory: list[Memory]  # after each choice
    queue: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """From when on how many waited, and the first of them."""


class SglangRecorder(Recorder):
    """Is told what a recorded engine does, and writes the rows."""

    scheduler: "RecordedSgLang"
    pending: deque[_Row]  # type: ignore[assignment]
    out = "retracted"

    def __init__(
        self, env: simpy.Environment, *, asynchronous: bool, max_steps: int | None
    ) -> None:
        super().__init__(env, asynchronous=asynchronous, max_steps=max_steps)
        self.spins = 0
        self.retracted: list[int] = []
        self.sent_away: list[Request] = []  # for others that are more urgent
        self.aborted: list[int] = []
        self.gone: set[int] = set()  # all who were
        self.first_scheduled: dict[int, int] = {}  # by request

    def memory(self) -> Memory:
        """Count the free tokens and the evictable ones; give the new-token ratio."""
        blocks, host = self.scheduler.blocks, self.scheduler.host
        size = blocks.block_size
        evictable = blocks.evictable if isinstance(blocks, RadixCache) else 0
        on_host = 0 if host is None else host.host_free * size
        free, ratio = blocks.free - evictable, self.scheduler.ratio.value
        return free * size, evictable * size, ratio, on_host

    def add_step(self, step: Step) -> _Row:  # type: ignore[override]
        """Take in what has just been chosen."""
        scheduler = self.scheduler
        now = int(self.env.now)
        rows = [(chunk.request.id, chunk.tokens, chunk.start) for chunk in step.prefills]
        if step.decodes:
            rows += scheduler.decoded
        starts = {chunk.request: chunk.start for chunk in step.prefills}
        pairs = [(r.preemptions > 0, [r.id, starts[r]]) for r in self.admitted]
        facts: dict[str, Any] = {
            "new": [pair for again, pair in pairs if not again],
            "resumed": [pair for again, pair in pairs if again],
            "chunked": None if scheduler.chunked is None else scheduler.chunked.id,
            "retracted": self.retracted,
            "preempted": [
                r.id for r in sorted(self.sent_away, key=scheduler.queue.entered.__getitem__)
            ],
            "aborted": self.aborted,
            "spins": self.spins,
        }
        if scheduler.host is not None:
            loads = step.copies.loads if step.copies is not None else []
            size = scheduler.blocks.block_size
            facts["loaded"] = [[load.request.id, load.count * size] for load in loads]
        row = _Row(
            t=now,
            start=now,
            mode=("mixed" if step.decodes else "prefill") if step.prefills else "decode",
            tokens=step.tokens,
            context=step.context + sum(c.start + c.tokens for c in step.prefills),
            scheduled=rows,
            facts=facts,
            full=scheduler.full,
            running=scheduler.batch_size,
            memory=[self.memory()],
        )
        self.pending.append(row)
        self.queue_changed()
        self.steps += 1
        self.admitted, self.retracted, self.sent_away, self.aborted = [], [], [], []
        self.spins = 0
        return row

    def leap_limit(self, repeats: int) -> int:
        """Return how many of so many equal steps there may still be.

        One more is chosen than there may be; with two in flight it has no outcome.
        """
        if self.max_steps is None:
            return repeats
        return max(min(repeats, self.max_steps + 2 - self.steps - self.asynchronous), 1)

    def begun(self, start: int) -> None:
        """Take in when the batch just chosen will be computed."""
        row = self.pending[-1]
        row.start = start
        for id, _ in row.facts["new"]:
            self.first_scheduled[id] = start

    def queue_changed(self) -> None:
        """Take in who waits from now on."""
        if self.pending:
            waiting = self.scheduler.queue
            shown = [request.id for request in islice(waiting, _QUEUE_SHOWN)]
            self.pending[-1].queue.append((int(self.env.now), len(waiting), shown))

    def write_outcome(self, ends: Sequence[float]) -> None:
        """Write down the outcome of the oldest row: a line for each of its steps."""
        row = self.pending.popleft()
        self.finished = [id for id in self.finished if id not in self.gone]
        start, last = row.start, len(ends) - 1
        lag = 1 if self.asynchronous else 0
        for k, moment in enumerate(ends):
            end = int(moment)
            after = row.memory[k]
            if k == last:
                after = self.memory()
            elif self.asynchronous:
                after = row.memory[k + 1]
            t = row.t if not k else row.start if k == lag else int(ends[k - 1 - lag])
            self._write_step(row, k, (t, start, end), after, self.finished if k == last else [])
            start = end
        self.finished = []
        if self.max_steps is not None and self.steps > self.max_steps:
            raise StepLimit

    def _write_step(
        self,
        row: _Row,
        k: int,
        times: tuple[int, int, int],
        after: Memory,
        finished: list[int],
    ) -> None:
        t, start, end = times
        facts = row.facts
        if k:
            empty: list[int] = []
            facts = dict.fromkeys(facts, empty) | {"chunked": None, "spins": 0}
        free, evictable, ratio, on_host = row.memory[k]
        waiting, shown = next((n, ids) for since, n, ids in reversed(row.queue) if since <= t)
        line = {
            "type": "step",
            "step": self._written,
            "t": t,
            "start": start,
            "dur": end - start,
            "mode": row.mode,
            "tokens": row.tokens,
            "context": row.context + k * row.tokens,
            "sched": [[id, count, before + k] for id, count, before in row.scheduled],
            "new": facts["new"],
            "resumed": facts["resumed"],
            "chunked": facts["chunked"],
            "retracted": facts["retracted"],
            "preempted": facts["preempted"],
            "aborted": facts["aborted"],
            "finished": finished,
            "free": free,
            "evictable": evictable,
            "ratio": round(ratio, 9),
            "full": row.full,
            "running": row.running,
            "waiting": waiting,
            "queue": shown,
            "spins": facts["spins"],
        }
        hosted = self.scheduler.host is not None
        if hosted:
            line |= {"loaded": facts["loaded"], "host_free": on_host}
        line |= {"free_end": after[0], "evictable_end": after[1]}
        if hosted:
            line["host_free_end"] = after[3]
        self.lines.append(dump(line))
        self._written += 1

    def received(self, request: Request) -> int:
        return self.scheduler.received(request)

    def request_fields(self, request: Request) -> dict[str, Any]:
        row = super().request_fields(request)
        row["first_scheduled"] = self.first_scheduled.get(request.id)
        row["retractions"], row["reason"] = row.pop("preemptions"), None
        if request.state == "finished":
            stops = not request.ignore_eos and (request.max_tokens or 0) > request.output_tokens
            matched = stops and request.generated == request.output_tokens
            row["reason"] = "FINISH_MATCHED_TOKEN" if matched else "FINISH_LENGTH"
        if request.id in self.gone:
            row["reason"] = "FINISH_ABORT"
        return row

    def limits(self, request: Request) -> str:
        return f"{super().limits(request)}, limit {request.allowed}"

    def write_empty(self) -> None:
        """Do nothing: a pass in which nothing runs has no row."""


class RecordedSgLang(SgLang):
    """The scheduler, which tells what it does."""

    recorder: SglangRecorder
    verifies = 1  # tokens of each decode
    batch_size = 0  # of the running batch, as the last pass left it
    coming: deque[Request]  # later
    says: list[int]  # the tokens of each answer, where a prompt is read as a whole

    def _pass(self, step: Step) -> bool:
        runs = super()._pass(step)
        if runs:
            mixed = step.decodes and step.prefills
            self.batch_size = 0 if mixed else self.decodes.count
        elif self.waiting and self._is_idle():
            self.recorder.spins += 1
        return runs

    def _passes_again(self) -> bool:
        """Stop where nobody waits but somebody will come: the recording's clock goes on to there.

        A split prompt that `prefill_decode_interval` holds back is left alone until then.
        """
        return super()._passes_again() and (bool(self.waiting) or not self.coming)

    def _start_batch(self, step: Step, budget: PrefillBudget) -> None:
        """Let an answer begin where the prompt breaks off: its tokens have their names by place."""
        super()._start_batch(step, budget)
        for request, _ in budget.batch:
            says, unread = self.says[request.id], request.pending
            if request is not self.chunked and (unread or request.output_tokens != says):
                begun = request.generated - unread
                request.output_tokens = says + unread if begun < says else request.allowed + 1
                request.output_limit = self.output_limit(request)

    def _decode_all(self, step: Step) -> None:
        computed, width = self.decodes.computed, self.verifies if not step.prefills else 1
        self.decoded = [(r.id, width, computed(r)) for r in self.batch.members_in_order()]
        super()._decode_all(step)

    def lock_hits(self, request: Request, hits: Sequence[int]) -> None:
        self.recorder.admitted.append(request)
        super().lock_hits(request, hits)

    def send_away(self, request: Request, left: int) -> None:
        self.recorder.sent_away.append(request)
        super().send_away(request, left)

    def _retract(self) -> None:
        recorder = self.recorder
        before = len(recorder.sent_away)
        super()._retract()
        recorder.retracted += [request.id for request in recorder.sent_away[before:]]
        del recorder.sent_away[before:]

    def _abort(self, request: Request) -> None:
        self.recorder.aborted.append(request.id)
        self.recorder.gone.add(request.id)
        super()._abort(request)

    def take_ticks(self, ticks: int, skip: int) -> None:
        for tick in range(skip, skip + ticks):
            super().take_ticks(1, tick)
            self.recorder.pending[-1].memory.append(self.recorder.memory())
        self.recorder.steps += ticks


class RecordedOverlappedSgLang(RecordedSgLang, OverlappedSgLang):
    """The same with two batches in flight."""


class RecordedSpeculativeSgLang(RecordedSgLang, SpeculativeSgLang):
    """The same with drafts."""


class RecordedOverlappedSpeculative(RecordedSgLang, OverlappedSpeculativeSgLang):
    """The same with two batches in flight."""


class RecordedSglangReplica(RecordedReplica):
    """A replica of SGLang's."""

    recorder: SglangRecorder

    def begin(self, now: float, start: float) -> InFlight | None:
        batch = super().begin(now, start)
        if batch is not None:
            self.recorder.begun(int(start))
        return batch

    def _rest(self, now: float) -> float:
        """Wait for whatever comes next, also where somebody waits in vain: SGLang does."""
        if self.batch_queue or self.scheduler.next_wakeup() is not None:
            return Replica._rest(self, now)
        return -1.0

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        Replica.commit(self, scheduled, decided, start, ends)
        self.recorder.write_outcome(ends)


class SglangClock(RecordedClock):
    """The step-time model; a step waits for what it loads, layer by layer."""

    def execute(self, step: Step) -> Timing:
        loads = sum(load.count for load in step.copies.loads) if step.copies is not None else 0
        return Timing(max(super().execute(step).seconds, loads * self.times.load_block_ns))


class SglangReplay(Replay):
    """One run of a case of SGLang's."""

    case: SglangCase
    _recorder: SglangRecorder

    def __init__(self, case: SglangCase, *, leap: bool = False) -> None:
        self.case = case
        self.release = None  # of vLLM
        config = case.config
        self.requests = []
        for one in case.requests:
            request = Request(one.id, one.arrival_ns, one.prompt_len, one.output_len)
            request.segments = one.named_prompt(config.hash_id_tokens)
            none = -_UNURGENT if not config.schedule_low_priority_values_first else _UNURGENT
            request.priority = none if one.priority is None else one.priority
            request.max_tokens = one.max_new_tokens or one.output_len
            request.ignore_eos = one.ignore_eos
            request.client, request.hint = one.client, one.hint
            self.requests.append(request)
        self._env = simpy.Environment()
        overlaps = not config.disable_overlap_schedule
        recorder = SglangRecorder(self._env, asynchronous=overlaps, max_steps=case.max_steps)
        self._recorder = recorder
        scheduler = self._make_sglang(overlaps)
        scheduler.recorder, recorder.scheduler = recorder, scheduler
        clock = SglangClock(recorder, case.step_time, 1)
        self._engine = RecordedSglangReplica(self._env, scheduler, clock, leap=leap)
        self._engine.recorder = recorder
        self._await_arrivals()
        scheduler.coming = self._arrivals
        scheduler.says = [one.output_len for one in case.requests]

    def _make_blocks(self) -> BlockCounter:
        config, times = self.case.config, self.case.step_time
        pool = config.max_total_tokens // config.page_size + 1, config.page_size
        if config.enable_hierarchical_cache:
            each = times.store_block_ns
            return HierarchicalCache(
                *pool, config.host_blocks, config.hicache_write_policy, lambda count: count * each
            )
        tree = RadixCache if config.drafts is None else EagleTree
        return (BlockCounter if config.disable_radix_cache else tree)(*pool)

    def _make_sglang(self, overlaps: bool) -> RecordedSgLang:
        config = self.case.config
        options = config.model_dump(include={one.name for one in fields(SglangOptions)})
        chunks = config.chunked_prefill_size > 0
        limits = Limits(
            max_num_seqs=config.max_running_requests,
            max_num_batched_tokens=config.chunked_prefill_size if chunks else 1,
            enable_chunked_prefill=chunks,
            max_model_len=config.context_length,
            speculation=config.drafts,
        )
        kind: Any = RecordedOverlappedSgLang if overlaps else RecordedSgLang
        if config.drafts is not None:
            kind = RecordedOverlappedSpeculative if overlaps else RecordedSpeculativeSgLang
        policy = None
        if config.scheduling_policy is not None:
            field = f"{self.case.name}: config.scheduling_policy"
            try:
                order, arguments = find_order(config.scheduling_policy, Path(), field)
                policy = order(**arguments)
            except ValueError as error:
                raise HeadwayError(one_line(error)) from error
        made: RecordedSgLang = kind(
            self._make_blocks(),
            limits,
            SglangOptions(order=config.schedule_policy, **options),
            policy=policy,
        )
        if config.drafts is not None:
            made.verifies = config.drafts.verified
        return made
