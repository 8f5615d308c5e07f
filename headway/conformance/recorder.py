"""What an engine decides and what comes of it, as the rows of a recorded schedule.

A row is written when the outcome of its step is known, in order of processing, as text: the same
text as a recording's as long as all fields are the same. The clock counts nanoseconds in integers,
so equal means equal.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from simulator.core.request import Request, Step
from simulator.features.drafts.as_sums import DraftedSet
from simulator.features.images.images import Images
from simulator.features.images.work import EncoderWork, work_of
from simulator.policies.waiting_queues import FrontQueue
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.offloading import HoldersFirst
from simulator.schedulers.vllm.pipeline import PipelineScheduler

SETTINGS = (
    "async_scheduling",
    "pipeline_parallel_size",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_model_len",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "watermark",
)
"""Settings of a case that Headway's scheduler and vLLM take alike."""


class StepLimit(Exception):  # noqa: N818  it is no error
    """The case has had its `max_steps`."""


@dataclass(slots=True)
class StepRow:
    """A step, or a leap of equal ones, from its scheduling until its outcome."""

    t: int  # when the scheduler decided
    tokens: int
    context: int
    decodes: int
    scheduled: Sequence[tuple[int, int, int]]  # id, tokens, tokens before
    new: list[tuple[int, int]]  # id and tokens found in the prefix cache
    resumed: list[tuple[int, int]]
    preempted: list[int]
    blocks: list[tuple[int, int]]  # (free, hashed) after scheduling it, and each further one
    running: int
    tokenless: list[int]  # of the scheduled, those who get no token
    start: int
    encoder: str = ""  # what it encodes and evicts, as JSON
    queue: list[tuple[int, int, int | None]] = field(default_factory=list)
    """From when on how many waited, and which request first."""


class Recorder:
    """Is told what a recorded engine does, and writes the rows.

    `asynchronous`: the engine has two batches in flight. `max_steps` ends the case.
    """

    scheduler: SchedulerBase
    out = "preempted"  # the word for a request that was thrown out

    def __init__(
        self, env: simpy.Environment, *, asynchronous: bool = False, max_steps: int | None = None
    ) -> None:
        self.env = env
        self.asynchronous = asynchronous
        self.max_steps = max_steps
        self.steps = 0  # scheduled so far
        self.lines: list[str] = []
        self.pending: deque[StepRow] = deque()  # scheduled, without outcome
        self.empty: StepRow | None = None  # asynchronous: a step that only preempted
        self.admitted: list[Request] = []  # by the step that is being scheduled
        self.preempted: list[int] = []
        self.finished: list[int] = []  # by the outcome at hand
        self.blocks: list[tuple[int, int]] = []  # (free, hashed) after each step of a leap
        self._written = 0

    def begin_step(self) -> None:
        """A step is about to be scheduled."""
        if self.steps == self.max_steps:
            raise StepLimit
        self.admitted, self.preempted = [], []

    def add_step(self, step: Step) -> StepRow:
        """Take in what has just been scheduled."""
        scheduler = self.scheduler
        now = int(self.env.now)
        tokens, context = step.decodes + step.drafts, step.context
        for chunk in step.prefills:
            tokens += chunk.tokens
            context += chunk.start + chunk.tokens
        new: list[tuple[int, int]] = []
        resumed: list[tuple[int, int]] = []
        if self.admitted:
            starts = {chunk.request: chunk.start for chunk in step.prefills}
            for request in self.admitted:
                (resumed if request.preemptions else new).append((request.id, starts[request]))
        row = StepRow(
            t=now,
            tokens=tokens,
            context=context,
            decodes=step.decodes,
            scheduled=self._scheduled(step),
            new=new,
            resumed=resumed,
            preempted=self.preempted,
            blocks=[(scheduler.blocks.free, scheduler.blocks.hashed)],
            running=len(scheduler.running),
            tokenless=self._tokenless(step),
            start=now,
            encoder=self._encoder_fields(work_of(step)),
        )
        self.pending.append(row)
        self.queue_changed()
        self.steps += 1
        return row

    def leap_limit(self, repeats: int) -> int:
        """Return how many of so many equal steps there may still be."""
        return repeats if self.max_steps is None else min(repeats, self.max_steps - self.steps + 1)

    def _scheduled(self, step: Step) -> Sequence[tuple[int, int, int]]:
        """List (id, tokens, tokens before), in the order of the running list."""
        scheduler = self.scheduler
        running: Iterable[Request] = scheduler.running
        tick = scheduler.decodes.tick
        chunks = {c.request: (c.tokens, c.start) for c in (*step.prefills, *(step.singles or ()))}
        if isinstance(scheduler.decodes, DraftedSet):
            chunks |= {r: scheduler.decodes.verified(r) for r in running if r.joined >= 0}
            return [(r.id, *chunks[r]) for r in running if r in chunks]
        if step.decodes == len(step.singles or ()):
            return [(r.id, *chunks[r]) for r in running if r in chunks]
        if isinstance(scheduler, AsyncScheduler):
            tick -= 1  # it has been counted
            chunks |= {
                r: (1, r.computed - 1) for r in scheduler.in_flight[-1].ending if r not in chunks
            }
        if not chunks:
            return [(r.id, 1, r.computed + tick - r.joined) for r in running if r.joined >= 0]
        return [
            (r.id, *chunks[r]) if r in chunks else (r.id, 1, r.computed + tick - r.joined)
            for r in running
            if r in chunks or r.joined >= 0
        ]

    def _tokenless(self, step: Step) -> list[int]:
        """List who computes without getting a token: amid a prompt, or after its last."""
        scheduler = self.scheduler
        getting: set[Request] = set()
        if isinstance(scheduler, AsyncScheduler) and scheduler.in_flight:
            getting = {request for request, _ in scheduler.in_flight[-1].first_tokens}
        requests = [chunk.request for chunk in (*step.prefills, *(step.singles or ()))]
        partial = scheduler.running.partial
        return [r.id for r in requests if r in partial and r not in getting]

    def queue_changed(self) -> None:
        """Take in how many wait from now on."""
        if self.pending:
            waiting = self.scheduler.waiting
            line = waiting.others if isinstance(waiting, HoldersFirst | FrontQueue) else waiting
            head = line.head().id if line else None
            count = len(waiting) + len(getattr(self.scheduler, "loading", ()))
            self.pending[-1].queue.append((int(self.env.now), count, head))

    def add_leap(self, row: StepRow, more: int) -> None:
        """Take in that `more` equal steps came after a row's first, with what blocks they took."""
        self.steps += more
        row.blocks += self.blocks

    def write_outcome(self, ends: Sequence[float]) -> None:
        """Write down the outcome of the oldest row: a line for each of its steps."""
        row = self.pending.popleft()
        start, last = row.start, len(ends) - 1
        for k, moment in enumerate(ends):
            end = int(moment)
            free, hashed = row.blocks[k]
            if k + 1 < len(row.blocks):
                free_end = row.blocks[k + 1][0] if self.asynchronous else free
            else:
                free_end = self.scheduler.blocks.free
            t = row.t if not k else row.start if k == 1 and self.asynchronous else 0
            if k > self.asynchronous:
                t = int(ends[k - 1 - self.asynchronous])
            finished = self.finished if k == last else []
            self._write(row, k, (t, start, end), (free, free_end, hashed), finished)
            start = end
        self.finished = []

    def write_empty(self) -> None:
        """Write down an empty step of the asynchronous engine, processed after the next one."""
        if self.empty is not None:
            row, self.empty = self.empty, None
            ((free, hashed),) = row.blocks
            counts = (free, self.scheduler.blocks.free, hashed)
            self._write(row, 0, (row.t, row.start, row.start), counts, [])

    def _write(
        self,
        row: StepRow,
        k: int,
        times: tuple[int, int, int],
        counts: tuple[int, int, int],
        finished: list[int],
    ) -> None:
        """Write the line of a row's k-th step."""
        t, start, end = times
        free, free_end, hashed = counts
        scheduled = ",".join([f"[{id},{count},{n + k}]" for id, count, n in row.scheduled])
        waiting, head = next((n, who) for since, n, who in reversed(row.queue) if since <= t)
        self.lines.append(
            f'{{"type":"step","step":{self._written},"t":{t},"dur":{end - start},'
            f'"tokens":{row.tokens},"context":{row.context + k * row.decodes},'
            f'"sched":[{scheduled}],"new":{_pairs(row.new if not k else ())},'
            f'"resumed":{_pairs(row.resumed if not k else ())},'
            f'"preempted":{_ids(row.preempted if not k else ())},"finished":{_ids(finished)},'
            f'"free":{free},"free_end":{free_end},"hashed":{hashed},"running":{row.running},'
            f'"waiting":{waiting},"head":{"null" if head is None else head}'
            + (row.encoder if not k or not row.encoder else self._encoder_fields(None))
            + (f',"start":{start}}}' if self.asynchronous else "}")
        )
        self._written += 1

    def _encoder_fields(self, work: EncoderWork | None) -> str:
        """Write which items are encoded, by request, which outputs are evicted, and loaded."""
        if not (images := [one for one in self.scheduler.features if isinstance(one, Images)]):
            return ""
        found: dict[str, Any] = {
            "encoded": [[one.id, numbers] for one, numbers in work.encoded.items()] if work else [],
            "evicted": [media.name for media in work.evicted] if work else [],
        }
        if images[0].stored:
            loaded = work.loaded.items() if work else ()
            found["loaded"] = [[one.id, numbers] for one, numbers in loaded]
        return f",{dump(found)[1:-1]}"

    def received(self, request: Request) -> int:
        """Count the tokens of an answer that have come out."""
        tokens = self.scheduler.decodes.generated(request)
        if isinstance(self.scheduler, PipelineScheduler):
            return tokens - request.unknown
        if isinstance(self.scheduler, AsyncScheduler):  # what is in flight has been counted
            for row in self.pending:
                ids = {id for id, _, _ in row.scheduled}
                tokens -= request.id in ids.difference(row.tokenless)
        return tokens

    def request_row(self, request: Request) -> str:
        """Return the line of a request, at the end."""
        return dump(self.request_fields(request))

    def request_fields(self, request: Request) -> dict[str, Any]:
        """Return what that line holds."""
        seen = request.first_scheduled >= 0
        return {
            "type": "request",
            "id": request.id,
            "arrival": int(request.arrival),
            "first_scheduled": int(request.first_scheduled) if seen else None,
            "first_token": int(request.first_token) if request.first_token >= 0 else None,
            "finish": int(request.finish) if request.finish >= 0 else None,
            "output_tokens": self.received(request),
            "cached": request.cached if seen else None,
            "preemptions": request.preemptions,
        }

    def state(self, request: Request) -> str:
        """Describe a request as it is now."""
        status = request.state.replace("preempted", self.out)
        if status == "finished":
            status = f"finished at {int(request.finish)}"
        return (
            f"request {request.id}: {status}, arrival {int(request.arrival)}, priority "
            f"{request.priority}, prompt {request.prompt_tokens}, answer "
            f"{self.received(request)} of {self.limits(request)}, computed "
            f"{self.scheduler.decodes.computed(request)}, {self.out} {request.preemptions} times"
        )

    def limits(self, request: Request) -> str:
        """Return the tokens at which an answer ends."""
        return str(request.output_limit)


def _ids(ids: Iterable[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return f"[{','.join([f'[{id},{count}]' for id, count in pairs])}]"


def dump(row: dict[str, Any]) -> str:
    """Write a row without blanks."""
    return json.dumps(row, separators=(",", ":"))
