"""A case played through Headway's own scheduler, block manager and replica, every decision noted.

The rows are those of a recorded schedule (`simulator.conformance.cases`), in order of
processing, as text: the same text as the recorder's as long as all fields are the same. The clock
counts nanoseconds in integers, so equal means equal.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import simpy
from simpy.core import EmptySchedule

from simulator.conformance.cases import Case
from simulator.conformance.observed import (
    Clock,
    Cut,
    NotedAsyncReplica,
    NotedAsyncScheduler,
    NotedCounter,
    NotedInstalled,
    NotedManager,
    NotedReplica,
    NotedScheduler,
    Row,
)
from simulator.core.alarm import Alarm
from simulator.core.request import Request, Step
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.policies.orders import Priority
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.installed import InstalledBlocks
from simulator.util.version import __version__

_OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "watermark",
)


class Replay:
    """One run of a case.

    `leap` goes through all equal steps at once, as `headway run` does. `installed` lets the
    scheduler of the vLLM that is installed decide.
    """

    def __init__(self, case: Case, *, leap: bool = False, installed: bool = False) -> None:
        self.case = case
        self.steps = 0  # scheduled so far
        self.told = 0
        self.flying: deque[Row] = deque()  # scheduled, without outcome
        self.empty: Row | None = None  # asynchronous: a step that only preempted
        self.finished: list[int] = []  # by the outcome at hand
        self.trail: list[tuple[int, int]] = []
        self.asynchronous = bool(case.config["async_scheduling"])
        self.requests = [
            Request(r.id, r.arrival_ns, r.prompt_len, r.output_len, "", r.priority, r.segments)
            for r in case.requests
        ]
        self._lines: list[str] = []
        self._env = simpy.Environment()
        self.scheduler = self._make_scheduler(leap, installed)
        self.scheduler.replay = self
        self.blocks = self.scheduler.blocks
        self.engine = self._make_engine(leap)
        self._arrivals = deque(sorted(self.requests, key=lambda r: (r.arrival, r.id)))
        self._alarm = Alarm(self._env, self._arrive)
        if self._arrivals:
            self._alarm.set(self._arrivals[0].arrival)

    def _make_blocks(self, leap: bool) -> BlockCounter:
        config = self.case.config
        size = (config["num_gpu_blocks"], config["block_size"])
        caching = config["enable_prefix_caching"]
        if not leap:
            return BlockManager(*size, prefix_caching=True) if caching else BlockCounter(*size)
        noted = NotedManager(*size, prefix_caching=True) if caching else NotedCounter(*size)
        noted.trail = self.trail
        return noted

    def _make_scheduler(self, leap: bool, installed: bool) -> NotedScheduler:
        config = self.case.config
        options = {key: config[key] for key in _OPTIONS}
        options["scheduler_reserve_full_isl"] = config["reserve_full_isl"]
        if installed:
            return NotedInstalled(
                InstalledBlocks(config["num_gpu_blocks"], config["block_size"]),
                enable_prefix_caching=config["enable_prefix_caching"],
                policy_name=config["policy"],
                async_scheduling=self.asynchronous,
                **options,
            )
        return (NotedAsyncScheduler if self.asynchronous else NotedScheduler)(
            self._make_blocks(leap),
            policy=Priority() if config["policy"] == "priority" else None,
            **options,
        )

    def _make_engine(self, leap: bool) -> Replica:
        nap, clock = self.case.step_time["empty_ns"], Clock(self)
        engine: NotedReplica | NotedAsyncReplica
        if self.asynchronous:
            engine = NotedAsyncReplica(self._env, self.scheduler, clock, leap=leap, nap=nap)
        else:
            engine = NotedReplica(self._env, self.scheduler, clock, leap=leap, nap=nap)
        engine.replay = self
        return engine

    def _arrive(self, alarm: simpy.Event) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0].arrival <= self._env.now:
            self.engine.submit(arrivals.popleft())
        if arrivals:
            self._alarm.set(arrivals[0].arrival)

    def rows(self) -> Iterator[str]:
        """Play the case; yield a line for every step, every request and the end."""
        step, lines = self._env.step, self._lines
        try:
            while True:
                step()
                if lines:
                    yield from lines
                    lines.clear()
        except Cut:
            if self.flying and self.flying[0].trail and isinstance(self.engine, NotedAsyncReplica):
                leap = self.flying[0]
                self.tell(self.engine._flights[0].ends[:-1])
                self.flying.append(leap)
        except EmptySchedule:
            self.tell_empty()
        yield from lines
        for request in self.requests:
            yield _request_row(request, self._received(request))
        done = all(request.finish >= 0 for request in self.requests)
        yield _dump({"type": "end", "steps": self.steps, "complete": done})

    def header(self) -> str:
        """Give the line that begins the log of a case."""
        case = self.case
        return _dump(
            {
                "type": "case",
                "schema": 1,
                "name": case.name,
                "headway": __version__,
                "config": case.config,
                "step_time": case.step_time,
                "requests": len(case.requests),
            }
        )

    def note(self, step: Step) -> Row:
        """Note what has just been scheduled."""
        scheduler, blocks = self.scheduler, self.blocks
        tokens, context = step.decodes, step.context
        for chunk in step.prefills:
            tokens += chunk.tokens
            context += chunk.start + chunk.tokens
        new: list[tuple[int, int]] = []
        resumed: list[tuple[int, int]] = []
        if scheduler.boarded:
            starts = {chunk.request: chunk.start for chunk in step.prefills}
            for request in scheduler.boarded:
                (resumed if request.preemptions else new).append((request.id, starts[request]))
        sched = self._scheduled(step)
        row = Row(
            t=int(self._env.now),
            tokens=tokens,
            context=context,
            decodes=step.decodes,
            sched=",".join([f"[{id},{count},{before}]" for id, count, before in sched]),
            members=[(id, before) for id, _, before in sched] if self.engine.leaper else [],
            new=new,
            resumed=resumed,
            preempted=scheduler.evicted,
            free=blocks.free,
            hashed=blocks.hashed,
            running=len(scheduler.running),
            silent=[c.request.id for c in step.prefills if c.request in scheduler.partial],
            queue=[],
            start=int(self._env.now),
        )
        self.flying.append(row)
        self.note_queue()
        self.steps += 1
        return row

    def _scheduled(self, step: Step) -> Iterable[tuple[int, int, int]]:
        """List (id, tokens, tokens before), in the order of the running list."""
        scheduler = self.scheduler
        running: Iterable[Request] = scheduler.running
        tick = scheduler.decodes.tick
        chunks = {c.request: (c.tokens, c.start) for c in (*step.prefills, *(step.singles or ()))}
        if step.decodes == len(step.singles or ()):
            return [(r.id, *chunks[r]) for r in running if r in chunks]
        if isinstance(scheduler, AsyncScheduler):
            tick -= 1  # it has been counted
            chunks |= {
                r: (1, r.computed - 1) for r in scheduler.in_flight[-1].last if r not in chunks
            }
        if not chunks:
            return [(r.id, 1, r.computed + tick - r.joined) for r in running if r.joined >= 0]
        return [
            (r.id, *chunks[r]) if r in chunks else (r.id, 1, r.computed + tick - r.joined)
            for r in running
            if r in chunks or r.joined >= 0
        ]

    def note_queue(self) -> None:
        """Note how many wait from now on."""
        if self.flying:
            waiting = self.scheduler.waiting
            head = waiting.head().id if waiting else None
            self.flying[-1].queue.append((int(self._env.now), len(waiting), head))

    def tell(self, ends: list[float]) -> None:
        """Write down the outcome of the oldest row: a line for each of its steps."""
        row = self.flying.popleft()
        free, hashed = row.free, row.hashed
        frees = [free, *(left for left, _ in row.trail)]
        start = row.start
        last = len(ends) - 1
        for k, moment in enumerate(ends):
            end = int(moment)
            if k:
                free, hashed = row.trail[k - 1]
            if k < len(row.trail):
                free_end = frees[k + 1] if self.asynchronous else free
            else:
                free_end = self.blocks.free
            finished = self.finished if k == last else []
            t = row.t if not k else row.start if k == 1 and self.asynchronous else 0
            if k > self.asynchronous:
                t = int(ends[k - 1 - self.asynchronous])
            self._line(row, k, (t, start, end), (free, free_end, hashed), finished)
            start = end
        self.finished = []

    def tell_empty(self) -> None:
        """Write down an empty step of the asynchronous engine, processed after the next one."""
        if self.empty is not None:
            row, self.empty = self.empty, None
            counts = (row.free, self.blocks.free, row.hashed)
            self._line(row, 0, (row.t, row.start, row.start), counts, [])

    def _line(
        self,
        row: Row,
        k: int,
        times: tuple[int, int, int],
        counts: tuple[int, int, int],
        finished: list[int],
    ) -> None:
        t, start, end = times
        free, free_end, hashed = counts
        sched = row.sched if not k else ",".join([f"[{id},1,{n + k}]" for id, n in row.members])
        waiting, head = next((n, who) for since, n, who in reversed(row.queue) if since <= t)
        self._lines.append(
            f'{{"type":"step","step":{self.told},"t":{t},"dur":{end - start},'
            f'"tokens":{row.tokens},"context":{row.context + k * row.decodes},'
            f'"sched":[{sched}],"new":{_pairs(row.new if not k else ())},'
            f'"resumed":{_pairs(row.resumed if not k else ())},'
            f'"preempted":{_ids(row.preempted if not k else ())},"finished":{_ids(finished)},'
            f'"free":{free},"free_end":{free_end},"hashed":{hashed},"running":{row.running},'
            f'"waiting":{waiting},"head":{"null" if head is None else head}'
            + (f',"start":{start}}}' if self.asynchronous else "}")
        )
        self.told += 1

    def _received(self, request: Request) -> int:
        """Count the tokens that have come out."""
        tokens = request.generated
        scheduler = self.scheduler
        if request.joined >= 0:
            tokens += scheduler.decodes.tick - request.joined
        if self.asynchronous:  # what is in flight has been counted
            for row in self.flying:
                ids = {id for id, _, _ in json.loads(f"[{row.sched}]")}
                tokens -= request.id in ids.difference(row.silent)
        return tokens

    def states(self, ids: Iterable[int]) -> list[str]:
        """Describe requests as they are now, one line each."""
        scheduler = self.scheduler
        lines = []
        for request in (self.requests[id] for id in ids):
            ticks = scheduler.decodes.tick - request.joined if request.joined >= 0 else 0
            received = self._received(request)
            if request.finish >= 0:
                status = f"finished at {int(request.finish)}"
            elif request in scheduler.running:
                status = "running"
            else:
                status = "preempted" if request.preemptions else "waiting"
            lines.append(
                f"request {request.id}: {status}, arrival {int(request.arrival)}, priority "
                f"{request.priority}, prompt {request.prompt_tokens}, answer {received} of "
                f"{request.max_tokens}, computed {request.computed + ticks}, preempted "
                f"{request.preemptions} times"
            )
        return lines


def _ids(ids: Iterable[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return f"[{','.join([f'[{id},{count}]' for id, count in pairs])}]"


def _request_row(request: Request, received: int) -> str:
    done, seen = request.finish >= 0, request.first_scheduled >= 0
    return _dump(
        {
            "type": "request",
            "id": request.id,
            "arrival": int(request.arrival),
            "first_scheduled": int(request.first_scheduled) if seen else None,
            "first_token": int(request.first_token) if request.first_token >= 0 else None,
            "finish": int(request.finish) if done else None,
            "output_tokens": received,
            "cached": request.cached if seen else None,
            "preemptions": request.preemptions,
        }
    )


def _dump(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))
