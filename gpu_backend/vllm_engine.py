"""Live runs on the vLLM that is installed: its own engine, in this process, with random weights.

The engine decides and computes; what it did in each step is read off its scheduler, and written as
a simulation writes it. The clock is `exec`: it advances by what the engine takes, and idle time is
skipped. Its time is the wall's, and of a step in all: what of it was the host's or the scheduler's
is not measured, and NaN. Tried with vLLM 0.32 on a CPU.
"""

import os
import tempfile
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from importlib import import_module
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import simpy

from gpu_backend.engine import Measured
from gpu_backend.live import Clock, LiveRun, LiveStep, Progress, several_devices
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.build.policy_table import VLLM_POLICIES
from simulator.core.log import (
    LENGTH,
    REJECTED,
    STEP_ROW,
    STOP,
    UNFINISHED,
    Log,
    pack_run,
    pack_span,
    pack_step,
)
from simulator.core.request import Chunk, Request, Step
from simulator.models.load import MODELS, shipped_models
from simulator.scenario.draw import make_workload
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import play
from simulator.util.errors import HeadwayError, one_line
from simulator.util.files import resolve as resolve_path

CLOCK: Clock = "exec"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""Of the environment, where nothing else is said: the engine in this process, and no network."""
KEYS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "async_scheduling",
    "long_prefill_token_threshold",
)
"""Keys of `engine:` that vLLM's EngineArgs have under the same names."""
FIRST_TOKEN = 2  # of prompts: below are the models' special ones
WARM_UP = ((16, 8), (128, 8), (512, 8), (64, 32))  # prompts and answers, tokens


def run_vllm(
    scenario: Scenario, *, engine: "VllmEngine | None" = None, progress: Progress | None = None
) -> LiveRun:
    """Run a scenario on vLLM; `engine` may be one that is there already."""
    parts = resolve(scenario)
    workload = make_workload(scenario)
    if workload.cancel_after is not None:
        raise HeadwayError("--engine vllm: clients that hang up (cancel_after) are not carried out")
    if engine is None:
        engine = VllmEngine(scenario, parts)
    env = simpy.Environment()
    replica = _Replica(env, scenario, parts, engine, workload.segments is not None)
    result = play(scenario, parts, workload, replica, progress)  # type: ignore[arg-type]
    return LiveRun(result, replica.timings, CLOCK, "cpu" if parts.gpu.name == "CPU" else "cuda")


class VllmEngine:
    """An engine of vLLM's in this process, and what it does in each step."""

    def __init__(self, scenario: Scenario, parts: EngineSpec) -> None:
        wanted = scenario.engine
        wrong = several_devices(wanted, "--engine vllm")
        if scenario.cluster is not None:
            wrong.append("cluster: --engine vllm is one engine, without a router")
        if wanted.policy_name not in VLLM_POLICIES:
            wrong.append(
                f"engine.scheduling_policy: --engine vllm has {' and '.join(VLLM_POLICIES)}, not "
                f"{wanted.policy_name}"
            )
        if not wanted.follows_vllm:
            wrong.append(f"engine.name: --engine vllm is no {wanted.name}")
        if wrong:
            raise HeadwayError(wrong)
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        options = {key: getattr(wanted, key) for key in KEYS}
        options = {key: value for key, value in options.items() if value is not None}
        options["max_model_len"] = parts.max_model_len
        with tempfile.TemporaryDirectory() as folder:
            options["model"] = _model_folder(scenario, Path(folder))
            try:
                vllm = import_module("vllm")
                arguments = import_module("vllm.engine.arg_utils").EngineArgs(
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                    scheduling_policy=wanted.policy_name,
                    **options,
                )
                engine_class = import_module("vllm.v1.engine.llm_engine").LLMEngine
                self.engine: Any = engine_class.from_engine_args(arguments)
            except Exception as error:  # whatever vLLM has against it
                raise HeadwayError(f"--engine vllm: it does not start: {one_line(error)}") from None
        self.version = str(vllm.__version__)
        self.vocab_size = parts.model.vocab_size
        self._sampling = vllm.SamplingParams
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        for number, (prompt, answer) in enumerate(WARM_UP):
            size = min(prompt, parts.max_model_len - answer - 1)
            if size > 0:
                self.add(f"warm-up-{number}", [FIRST_TOKEN + number] * size, answer, 0)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def describe(self) -> dict[str, object]:
        """Tell what runs."""
        return {"engine": f"vllm {self.version}", "weights": "random"}

    def add(self, name: str, tokens: list[int], output: int, priority: int) -> str:
        """Send a request; return the name under which the engine's scheduler knows it."""
        wanted = self._sampling(
            max_tokens=output, ignore_eos=True, temperature=0.0, detokenize=False
        )
        prompt = {"prompt_token_ids": tokens}
        found = self.engine.add_request(name, prompt, wanted, priority=priority)
        return name if found is None else str(found)


@dataclass(slots=True)
class _Told:
    """A step that the engine has scheduled: who takes part, and how it is then."""

    start: float  # s, of perf_counter
    parts: list[tuple[str, int, int, bool]]  # request, cached and new tokens, whether it decodes
    waiting: int
    running: int
    blocks: int
    kv_tokens: int
    preempted: list[str]
    end: float = 0.0
    brought: frozenset[str] = frozenset()  # requests that got a token of it


@dataclass(slots=True)
class _Live:
    """A request on its way, and its tokens' run."""

    request: Request
    first_tick: int = -1
    ticks: int = 0


@dataclass
class _Replica:
    """The engine behind the interface of a replica, for `play`."""

    env: simpy.Environment
    scenario: Scenario
    parts: EngineSpec
    engine: VllmEngine
    named: bool
    timings: list[LiveStep] = field(default_factory=list)
    on_finish: Callable[[Request], None] | None = None
    cancel: None = None  # whoever hangs up is refused above

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.parts, self.named)
        blocks = self.scheduler.blocks
        self.log = Log(blocks.usable, blocks.block_size, self.scheduler.num_seats)
        self.live: dict[str, _Live] = {}
        self.told: list[_Told] = []  # steps in flight
        self.over: list[_Told] = []  # steps that have ended, not yet written
        self.last_end = 0.0
        self.wake = self.env.event()
        self.engine.engine.reset_prefix_cache()
        inner = self.engine.scheduler
        self._inner = inner.schedule, inner.update_from_output
        inner.schedule = self._schedule
        inner.update_from_output = self._update
        self.process = self.env.process(self._run())

    def submit(self, request: Request) -> None:
        """Send a request to the engine, now."""
        if not self.scheduler.fits(request):
            self._record(request, REJECTED)
            return
        self.log.joined.append(self.env.now)
        tokens: list[int] = []
        for name, count in request.contents:
            tokens += _tokens(repr(name), count, self.engine.vocab_size)
        output = min(request.output_tokens, request.max_tokens or request.output_tokens)
        output = min(output, self.parts.max_model_len - request.prompt_tokens)
        known = self.engine.add(str(request.id), tokens, output, request.priority)
        self.live[known] = _Live(request)
        if not self.wake.triggered:
            self.wake.succeed()

    def abandon(self) -> None:
        """Write down the requests that are still here, when the run is stopped before its end."""
        self.on_finish = None
        for one in self.live.values():
            self._record(one.request, UNFINISHED)
        self.engine.engine.abort_request([*self.live])
        self.live.clear()

    def final_log(self) -> Log:
        """Return the log; the engine is free for another run."""
        inner = self.engine.scheduler
        inner.schedule, inner.update_from_output = self._inner
        return self.log

    def _run(self) -> Generator[simpy.Event, None, None]:
        """Let the engine take its steps, and the clock advance by what they take."""
        mark = perf_counter()
        while True:
            if not self.live:
                self.wake = self.env.event()
                yield self.wake
                mark = perf_counter()
            self.engine.engine.step()
            now = perf_counter()
            yield self.env.timeout(now - mark)
            mark = now
            shift = self.env.now - now
            over, self.over = self.over, []
            for step in over:
                self._write(step, shift)

    # What the engine's scheduler is seen to do.

    def _schedule(self, *given: Any, **named: Any) -> Any:
        scheduler, start = self.engine.scheduler, perf_counter()
        waiting = len(scheduler.waiting)
        output = self._inner[0](*given, **named)
        if output.num_scheduled_tokens:
            parts = []
            for name, count in output.num_scheduled_tokens.items():
                one = scheduler.requests[name]
                cached = one.num_computed_tokens - count  # which counts what is scheduled now
                parts.append((name, cached, count, cached >= one.num_prompt_tokens))
            pool = scheduler.kv_cache_manager.block_pool
            told = _Told(
                start,
                parts,
                waiting=waiting,
                running=len(scheduler.running),
                blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                kv_tokens=sum(one.num_computed_tokens for one in scheduler.running),
                preempted=[*(getattr(output, "preempted_req_ids", None) or ())],
            )
            self.told.append(told)
        return output

    def _update(self, scheduled: Any, *given: Any, **named: Any) -> Any:
        end = perf_counter()
        found = self._inner[1](scheduled, *given, **named)
        if scheduled.num_scheduled_tokens:
            step = self.told.pop(0)
            step.end = end
            step.brought = frozenset(
                one.request_id
                for outputs in found.values()
                for one in outputs.outputs
                if one.new_token_ids
            )
            self.over.append(step)
        return found

    # What is written of it.

    def _write(self, told: _Told, shift: float) -> None:
        """Write a step, the tokens that it brought, and the requests that ended with it."""
        start, end = max(told.start + shift, self.last_end), told.end + shift
        self.last_end = end
        chunks = tuple((cached, new) for _, cached, new, decodes in told.parts if not decodes)
        heard = [part for part in told.parts if part[3] and part[0] in told.brought]
        decodes, ghosts = len(heard), sum(part[3] for part in told.parts) - len(heard)
        context = sum(cached + new for _, cached, new, decoding in told.parts if decoding)
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in chunks)
        row = {
            "context": context,
            "prefill_context": pairs,
            "kv_tokens": told.kv_tokens,
            "prefill_tokens": sum(new for _, new in chunks),
            "decodes": decodes,
            "wasted": ghosts,
            "running": told.running,
            "waiting": told.waiting,
            "blocks_used": told.blocks,
            "prefills": len(chunks),
            "preempted": len(told.preempted),
        }
        self.log.step_rows += pack_span(start, end, 1) + pack_step(*(row[key] for key in STEP_ROW))
        tick = len(self.log.tick_ends)
        if decodes:
            self.log.tick_ends.append(end)
        for name in told.preempted:
            self.live[name].request.preemptions += 1
        for name, cached, _, decoding in told.parts:
            if name in self.live:
                self._advance(name, told, (start, end), cached, tick if decoding else -1)
        whole = Step([Chunk(_NOBODY, at, new) for at, new in chunks], decodes + ghosts, context)
        seconds, predicted = max(end - start, 1e-9), self.parts.cost.execute(whole).seconds
        self.timings.append(
            LiveStep(
                start=start,
                seconds=seconds,
                predicted_s=predicted,
                schedule_s=nan,
                decodes=decodes + ghosts,
                context=context,
                chunks=chunks,
                measured=Measured(device_s=nan, host_s=nan, wall_s=seconds),
            )
        )

    def _advance(
        self, name: str, told: _Told, span: tuple[float, float], cached: int, tick: int
    ) -> None:
        """Note a request's part in a step; `tick` is the step's number for one that decodes."""
        one, (start, end) = self.live[name], span
        request = one.request
        if request.first_scheduled < 0:
            request.first_scheduled, request.cached = start, cached
        if name not in told.brought:
            return
        request.generated += 1
        if request.first_token < 0:
            request.first_token = end
        if tick >= 0 and tick == one.first_tick + one.ticks:
            one.ticks += 1
        else:  # a prompt's token, or one after ticks without it
            self._end_run(one)
            request.run_start, one.first_tick, one.ticks = end, len(self.log.tick_ends), 0
        if request.generated >= self._limit(request):
            request.finish = end
            self._end_run(one)
            del self.live[name]
            whole = request.generated == request.output_tokens
            self._record(request, STOP if whole else LENGTH)

    def _limit(self, request: Request) -> int:
        wanted = min(request.output_tokens, request.max_tokens or request.output_tokens)
        return min(wanted, self.parts.max_model_len - request.prompt_tokens)

    def _end_run(self, one: _Live) -> None:
        if one.first_tick >= 0:
            request = one.request
            self.log.run_rows += pack_run(request.run_start, request.id, one.first_tick, one.ticks)

    def _record(self, request: Request, reason: int) -> None:
        self.log.record(request, reason, request.generated, request.first_token)
        if self.on_finish is not None:
            self.on_finish(request)


_NOBODY = Request(-1, 0.0, 1, 1)


def _model_folder(scenario: Scenario, spare: Path) -> str:
    """Find the folder with the model's config.json."""
    if scenario.known_model in shipped_models():
        return str(MODELS / scenario.known_model)
    found = resolve_path(scenario.known_model, scenario.folder)
    if found.is_dir():
        return str(found)
    if found.name == "config.json":
        return str(found.parent)
    (spare / "config.json").write_bytes(found.read_bytes())
    return str(spare)


def _tokens(name: str, count: int, vocab_size: int) -> list[int]:
    """Draw a segment's tokens; the first of a longer one are those of a shorter one."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    found: list[int] = random.integers(FIRST_TOKEN, vocab_size, count).tolist()
    return found
