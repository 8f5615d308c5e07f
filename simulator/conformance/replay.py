"""A case played through Headway's own scheduler, block manager and replica, all recorded."""

from collections import deque
from collections.abc import Iterable, Iterator

import simpy
from simpy.core import EmptySchedule

from simulator.conformance.cases import Case
from simulator.conformance.recorded_engine import (
    RecordedAsyncReplica,
    RecordedAsyncScheduler,
    RecordedClock,
    RecordedCounter,
    RecordedInstalledScheduler,
    RecordedManager,
    RecordedReplica,
    RecordedScheduler,
)
from simulator.conformance.recorder import Recorder, StepLimit, dump
from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.policies.orders import Priority
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
        config = case.config
        named = [r.named_prompt(config.hash_id_tokens) for r in case.requests]
        self.requests = [
            Request(r.id, r.arrival_ns, r.prompt_len, r.output_len, "", r.priority or 0, prompt)
            for r, prompt in zip(case.requests, named, strict=True)
        ]
        self._env = simpy.Environment()
        asynchronous = config.async_scheduling
        self._recorder = recorder = Recorder(
            self._env, asynchronous=asynchronous, max_steps=case.max_steps
        )
        scheduler = self._make_scheduler(installed)
        scheduler.recorder, recorder.scheduler = recorder, scheduler
        replica = RecordedAsyncReplica if asynchronous else RecordedReplica
        clock, empty = RecordedClock(recorder, case.step_time), case.step_time.empty_ns
        self._engine = replica(self._env, scheduler, clock, leap=leap, empty_step_seconds=empty)
        self._engine.recorder = recorder
        self._arrivals = deque(sorted(self.requests, key=lambda r: (r.arrival, r.id)))
        self._alarm = Alarm(self._env, self._arrive)
        if self._arrivals:
            self._alarm.set(self._arrivals[0].arrival)

    def _make_scheduler(self, installed: bool) -> RecordedScheduler:
        config = self.case.config
        options = config.model_dump(include={*_OPTIONS})
        options["scheduler_reserve_full_isl"] = config.reserve_full_isl
        size = (config.num_gpu_blocks, config.block_size)
        if installed:
            return RecordedInstalledScheduler(
                InstalledBlocks(*size),
                enable_prefix_caching=config.enable_prefix_caching,
                policy_name=config.policy,
                async_scheduling=config.async_scheduling,
                **options,
            )
        caching = config.enable_prefix_caching
        blocks: RecordedCounter | RecordedManager
        blocks = RecordedManager(*size, prefix_caching=True) if caching else RecordedCounter(*size)
        blocks.recorder = self._recorder
        kind = RecordedAsyncScheduler if config.async_scheduling else RecordedScheduler
        return kind(blocks, policy=Priority() if config.policy == "priority" else None, **options)

    def _arrive(self, alarm: simpy.Event) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0].arrival <= self._env.now:
            self._engine.submit(arrivals.popleft())
        if arrivals:
            self._alarm.set(arrivals[0].arrival)

    def header(self) -> str:
        """Give the line that begins the log of a case."""
        case = self.case
        return dump(
            {
                "type": "case",
                "schema": 1,
                "name": case.name,
                "headway": __version__,
                "config": case.config.model_dump(),
                "step_time": case.step_time.model_dump(),
                "requests": len(case.requests),
            }
        )

    def rows(self) -> Iterator[str]:
        """Play the case; yield a line for every step, every request and the end."""
        step, recorder = self._env.step, self._recorder
        lines = recorder.lines
        try:
            while True:
                step()
                if lines:
                    yield from lines
                    lines.clear()
        except StepLimit:
            self._engine.cut()
        except EmptySchedule:
            recorder.write_empty()
        yield from lines
        yield from map(recorder.request_row, self.requests)
        done = all(request.finish >= 0 for request in self.requests)
        yield dump({"type": "end", "steps": recorder.steps, "complete": done})

    def log(self) -> Iterator[str]:
        """Play the case; yield the header and all rows."""
        yield self.header()
        yield from self.rows()

    def states(self, ids: Iterable[int]) -> list[str]:
        """Describe requests as they are now, one line each."""
        return [self._recorder.state(self.requests[id]) for id in ids]
