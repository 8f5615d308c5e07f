"""A case played through Headway's own scheduler, block manager and replica, all recorded.

They behave as in a simulation, and tell a recorder what they do.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import simpy
from simpy.core import EmptySchedule

from headway.conformance.case_model import Case, StepTime
from headway.conformance.pulling import Pulling
from headway.conformance.recorder import SETTINGS, Recorder, StepLimit, dump
from headway.vllm.installed import InstalledBlocks, InstalledScheduler
from headway.vllm.interface import MAMBA
from simulator.core.alarm import Alarm
from simulator.core.decode_set import DecodeSet
from simulator.core.executor import Executor, Leap, StageTimes, Timing
from simulator.core.request import Media, Request, Step
from simulator.engine.core import ExecutedStep, InFlight
from simulator.engine.loop import EngineLoop
from simulator.engine.replica import PipelineReplica, Replica
from simulator.features.drafts.as_sums import Speculative
from simulator.features.drafts.blocks import DraftBlocks, DraftHybridBlocks, SlotCounter
from simulator.features.drafts.roles import KINDS
from simulator.features.drafts.walk import (
    AsyncDraftWalk,
    AsyncHostDrafts,
    DraftWalk,
    HostDrafts,
    PipelineDrafts,
)
from simulator.features.images.images import EncoderLimits, Images, encoder_of
from simulator.features.lora.lora import Lora
from simulator.features.states.states import States
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.hybrid_manager import HybridManager
from simulator.kv_cache.state_manager import StateManager
from simulator.kv_cache.tiers import HostTier
from simulator.policies.orders import Priority
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.feature import Feature
from simulator.schedulers.limits import Limits
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.kv_roles import AsyncConsumer, Consumer
from simulator.schedulers.vllm.offloading import AsyncOffloading, Offloading
from simulator.schedulers.vllm.pipeline import PipelineScheduler
from simulator.schedulers.vllm.rules import (
    NEWEST_RELEASE,
    Release,
    options_without_effect,
    rules_of,
    write_release,
)
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from simulator.util.version import __version__


class _RecordedBlocks(BlockCounter):
    """Blocks that tell, step by step of a leap, how many are left."""

    recorder: Recorder

    def take_ticks(self, decodes: DecodeSet, ticks: int, skip: int = 0) -> None:
        for tick in range(skip, skip + ticks):
            super().take_ticks(decodes, 1, tick)
            self.recorder.blocks.append((self.free, self.hashed))


class RecordedCounter(_RecordedBlocks, BlockCounter):
    """Blocks without prefix caching."""


class RecordedManager(_RecordedBlocks, BlockManager):
    """Blocks with prefix caching."""


class RecordedHybrid(_RecordedBlocks, HybridManager):
    """Blocks of groups of layers, some with a window."""


class Recorded(SchedulerBase):
    """A scheduler that tells whom it admits and preempts."""

    recorder: Recorder

    def schedule(self, now: float) -> Step:
        self.recorder.begin_step()
        return super().schedule(now)

    def start(self, request: Request) -> None:
        self.recorder.admitted.append(request)
        super().start(request)

    def preempt(self, request: Request) -> None:
        self.recorder.preempted.append(request.id)
        super().preempt(request)


def recorded(kind: type[SchedulerBase]) -> Callable[..., Recorded]:
    """Make a scheduler's class that tells a recorder what it does."""
    return type(f"Recorded{kind.__name__}", (Recorded, kind), {})


class RecordedClock:
    """The step-time model of a case, in nanoseconds; an executor of a recorded engine."""

    def __init__(self, recorder: Recorder, times: StepTime, stages: int) -> None:
        self.recorder, self.times, self.stages = recorder, times, stages

    def execute(self, step: Step) -> Timing:
        row = self.recorder.add_step(step)
        return Timing(self.times.duration(row.tokens, row.context))

    def stage_seconds(self, step: Step) -> StageTimes:
        return StageTimes(0, [self.execute(step).seconds] * self.stages, 0)

    def leap(self, step: Step, repeats: int) -> Leap:
        first, more = self.execute(step).seconds, self.times.per_context_token_ns * step.decodes
        return Leap([first + more * k for k in range(self.recorder.leap_limit(repeats))])


class RecordedReplica(Replica):
    """A replica that takes whatever comes, and tells who came, who finished and each outcome."""

    recorder: Recorder

    def submit(self, request: Request) -> None:
        changes = self.scheduler.add(request)
        self.recorder.queue_changed()
        self.arrived(self, changes=changes)

    def _end(self, request: Request) -> None:
        self.recorder.finished.append(request.id)
        super()._end(request)

    def _rest(self, now: float) -> float:
        """Wait for the next arrival; tell of a step that only preempted."""
        if self.scheduler.preempted:
            self.recorder.add_step(Step([]))
            self.recorder.write_outcome([int(now + self.empty_step_seconds)])
        elif not self._polls():
            return -1.0
        return super()._rest(now)

    def _polls(self) -> bool:
        """Say whether the engine looks again though nothing runs."""
        return self.scheduler.traits.polls and bool(self.scheduler.copies or self.scheduler.waiting)

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        recorder = self.recorder
        recorder.blocks.clear()
        super().commit(scheduled, decided, start, ends)
        recorder.add_leap(recorder.pending[0], len(ends) - 1)
        recorder.write_outcome(ends)

    def cut(self) -> None:
        """Tell of the steps that are over when a case is cut short."""


class RecordedAsyncReplica(RecordedReplica):
    """The same with two batches in flight."""

    def _rest(self, now: float) -> float:
        """Wait for the batch in flight or the next arrival; tell of a step that only preempted."""
        recorder, queue = self.recorder, self.batch_queue
        recorder.write_empty()
        if self.scheduler.preempted:
            recorder.add_step(Step([]))
            recorder.empty = recorder.pending.pop()
            if queue:
                recorder.empty.start = int(queue[-1].ends[-1])
        if queue or self.scheduler.preempted or self._polls():
            return EngineLoop._rest(self, now)
        return -1.0

    def begin(self, now: float, start: float) -> InFlight | None:
        batch = super().begin(now, start)
        if batch is not None:
            self.recorder.pending[-1].start = int(start)
            self.recorder.write_empty()
        return batch

    def repeat(self, scheduled: ExecutedStep, times: int) -> None:
        recorder = self.recorder
        recorder.blocks.clear()
        super().repeat(scheduled, times)
        recorder.add_leap(recorder.pending[-1], times)

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        Replica.commit(self, scheduled, decided, start, ends)
        self.recorder.write_outcome(ends)

    def cut(self) -> None:
        recorder = self.recorder
        if recorder.pending and len(recorder.pending[0].blocks) > 1:
            leap = recorder.pending[0]
            recorder.write_outcome(self.batch_queue[0].ends[:-1])
            recorder.pending.append(leap)


class RecordedPipelineReplica(RecordedReplica, PipelineReplica):
    """The same with the batches of pipeline stages in flight."""

    def __init__(self, *given: Any, leap: bool, empty_step_seconds: float) -> None:
        PipelineReplica.__init__(self, *given)
        self.empty_step_seconds = empty_step_seconds
        self._told: deque[bool] = deque()  # of the empty batches in flight: each has a row

    def begin(self, now: float, start: float) -> InFlight | None:
        batch = PipelineReplica.begin(self, now, start)
        if batch is None:
            self._told.append(self.scheduler.preempted > 0)
            if not self.scheduler.preempted:
                return None
            self.recorder.add_step(Step([]))
        self.recorder.pending[-1].start = int(max(now, start))
        return batch

    def commit(
        self, scheduled: ExecutedStep, decided: float, start: float, ends: list[float]
    ) -> None:
        PipelineReplica.commit(self, scheduled, decided, start, ends)
        if scheduled is not None or self._told.popleft():
            self.recorder.write_outcome(ends)


class Replay:
    """One run of a case.

    `leap` goes through all equal steps at once, as `headway run` does. `installed` lets the
    scheduler of the vLLM that is installed decide. `release` is the vLLM whose rules hold, None the
    newest known; options that it lacks have no effect.
    """

    schedulers: tuple[type[SchedulerBase], ...] = (Scheduler, AsyncScheduler)
    replicas: tuple[type[Any], ...] = (RecordedReplica, RecordedAsyncReplica)
    """Synchronous and asynchronous."""

    def __init__(
        self,
        case: Case,
        *,
        leap: bool = False,
        installed: bool = False,
        release: Release | None = None,
    ) -> None:
        options = options_without_effect(release or NEWEST_RELEASE)
        self.case = case = case.with_retention(options.get("prefix_cache_retention_interval", 0))
        self.release = release
        config = case.config
        named = [r.named_prompt(config.hash_id_tokens) for r in case.requests]
        self.requests = [
            Request(
                r.id,
                r.arrival_ns,
                r.prompt_len,
                r.output_len,
                priority=r.priority or 0,
                segments=prompt,
                max_tokens=r.max_tokens,
                model=f"lora-{r.adapter}" if r.adapter else "",
            )
            for r, prompt in zip(case.requests, named, strict=True)
        ]
        self._env = simpy.Environment()
        self._stages = getattr(config, "pipeline_parallel_size", 1)
        overlaps = config.async_scheduling or self._stages > 1
        self._recorder = recorder = Recorder(
            self._env, asynchronous=overlaps, max_steps=case.max_steps
        )
        self._scheduler = scheduler = self._make_scheduler(installed)
        scheduler.recorder, recorder.scheduler = recorder, scheduler
        replica, empty = self.replicas[config.async_scheduling], case.step_time.empty_ns
        if self._stages > 1:
            replica = RecordedPipelineReplica
        clock = self._make_clock()
        self._engine = replica(self._env, scheduler, clock, leap=leap, empty_step_seconds=empty)
        self._engine.recorder = recorder
        self._await_arrivals()

    def _make_clock(self) -> Executor:
        return RecordedClock(self._recorder, self.case.step_time, self._stages)

    def _await_arrivals(self) -> None:
        self._arrivals = deque(sorted(self.requests, key=lambda r: (r.arrival, r.id)))
        self._alarm = Alarm(self._env, self._arrive)
        if self._arrivals:
            self._alarm.set(self._arrivals[0].arrival)

    def _make_scheduler(self, installed: bool) -> Recorded:
        config = self.case.config
        options = config.model_dump(include={*SETTINGS, "prefix_cache_retention_interval"})
        options["scheduler_reserve_full_isl"] = config.reserve_full_isl
        size = (config.num_gpu_blocks, config.block_size)
        release = self.release or NEWEST_RELEASE
        options |= options_without_effect(release)
        retention = options.pop("prefix_cache_retention_interval")
        if installed:
            named = {
                "max_loras": "adapters",
                "encoder_cache_size": "images",
                "speculative_config": "drafts",
                "kv_role": "roles",
            }
            for key, what in named.items():
                if getattr(config, key):
                    raise HeadwayError(f"config.{key}: --installed knows of no {what}")
            return recorded(InstalledScheduler)(
                InstalledBlocks(*size),
                Limits(**options),
                enable_prefix_caching=config.enable_prefix_caching,
                policy_name=config.policy,
            )
        features: list[Feature] = [Lora(config.max_loras)] if config.max_loras else []
        blocks = self._choose_blocks(size, retention, options, features)
        blocks.recorder = self._recorder
        if config.encoder_cache_size:
            limits = EncoderLimits(
                config.encoder_cache_size,
                config.max_num_encoder_input_tokens,
                config.disable_chunked_mm_input,
            )
            features.append(Images(limits))
        times = self.case.step_time
        if config.kv_offloading_blocks:
            threshold = config.store_threshold
            host = HostTier(config.kv_offloading_blocks, write_through=True, threshold=threshold)
            blocks.tier = host
            options["load_time"] = lambda count: count * times.load_block_ns
            options["store_time"] = lambda count: count * times.store_block_ns
        kind = Speculative if isinstance(blocks, SlotCounter) else self._choose_kind()
        made: Recorded = recorded(kind)(
            blocks,
            limits=Limits(**options),
            policy=Priority() if config.policy == "priority" else None,
            rules=rules_of(release),
            features=features,
        )
        if config.encoder_cache_size:
            encoder_of(made).stored = {Media("image", name) for name in config.ec_cache}
        return made

    def _choose_blocks(
        self,
        size: tuple[int, int],
        retention: int | None,
        options: dict[str, Any],
        features: list[Feature],
    ) -> Any:
        """Make blocks."""
        config, drafts = self.case.config, None
        caching, windows = config.enable_prefix_caching, config.kv_cache_groups
        if config.speculative_config is not None:
            options["speculation"] = drafts = config.speculative_config.settings()
        if MAMBA in windows:
            features.append(States())
            return StateManager(
                *size,
                prefix_caching=caching,
                states=[window == MAMBA for window in windows],
                max_model_len=config.max_model_len,
                exports=config.checkpoints,
                prefix_cache_retention_interval=retention,
                prefix_match_unit=config.prefix_match_unit,
            )
        if any(windows):
            lengths = [window for window in windows if isinstance(window, int)]
            return (DraftHybridBlocks if drafts else RecordedHybrid)(
                *size,
                prefix_caching=caching,
                windows=lengths,
                max_in_flight=config.max_num_batched_tokens * (1 + config.async_scheduling),
                max_model_len=config.max_model_len,
                prefix_cache_retention_interval=retention,
            )
        if drafts is None:
            return RecordedManager(*size, True) if caching else RecordedCounter(*size)
        varies = drafts.num_speculative_tokens_per_batch_size is not None
        if caching or config.async_scheduling or varies or config.kv_role:
            return DraftBlocks(*size, prefix_caching=caching)
        ahead, longest = drafts.lookahead, config.max_model_len
        return SlotCounter(*size, lookahead=ahead, max_model_len=longest)

    def _choose_kind(self) -> type[SchedulerBase]:
        """Say what schedules, with drafts or without, in step or ahead."""
        config, ahead = self.case.config, self.case.config.async_scheduling
        drafted: type[Speculative] = (DraftWalk, AsyncDraftWalk)[ahead]
        plain = self.schedulers[ahead]
        if config.kv_offloading_blocks:
            plain, drafted = (
                (Offloading, AsyncOffloading)[ahead],
                (HostDrafts, AsyncHostDrafts)[ahead],
            )
        if self._stages > 1:
            plain, drafted = PipelineScheduler, PipelineDrafts
        if config.kv_role:
            plain, drafted = (Consumer, AsyncConsumer)[ahead], KINDS[config.kv_role][ahead]
        kind: type[SchedulerBase] = drafted if config.speculative_config else plain
        own = {"pull_time": self.case.step_time.load_block_ns}
        return type("Pulling", (Pulling, kind), own) if config.kv_role else kind

    def _arrive(self, alarm: simpy.Event) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0].arrival <= self._env.now:
            self._engine.submit(arrivals.popleft())
        if arrivals:
            self._alarm.set(arrivals[0].arrival)

    def header(self) -> str:
        """Return the line that begins the log of a case."""
        case, release = self.case, self.release
        rules = {} if release is None else {"vllm": write_release(release)}
        return dump(
            {
                "type": "case",
                "schema": 1,
                "name": case.name,
                "headway": __version__,
                **rules,
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
        done = all(request.state == "finished" for request in self.requests)
        yield dump({"type": "end", "steps": recorder.steps, "complete": done})

    def log(self) -> Iterator[str]:
        """Play the case; yield the header and all rows."""
        yield self.header()
        yield from self.rows()

    def states(self, ids: Iterable[int]) -> list[str]:
        """Describe requests as they are now, one line each."""
        return [self._recorder.state(self.requests[id]) for id in ids]
