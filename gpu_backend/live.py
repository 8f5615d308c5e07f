"""Live runs: a scenario's workload, scheduler and blocks drive the engine in place of a cost model.

Three clocks: `model` keeps the cost model's time, so the schedule is that of the simulation to
the step; `exec` advances by what each step took and skips idle time; `wall` is real time.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Literal

import simpy
from simpy.rt import RealtimeEnvironment

from gpu_backend.engine import Engine, Measured
from gpu_backend.executor import TorchExecutor
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.core.engine_config import EngineConfig
from simulator.core.executor import Executor, Timing
from simulator.core.request import Chunk, Request, Step
from simulator.engine.replica import Replica
from simulator.scenario.draw import make_workload
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.run import play
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.workload import Workload

Clock = Literal["exec", "wall", "model"]
Progress = Callable[[float, int, int], None]

CONTENTION_RATIO = 1.3  # wall time / CPU time above which somebody else was using the CPU
MIN_STEP_SECONDS = 1e-9  # s: no step takes no time
WARM_UP_STEPS = (
    *((decodes, 0) for decodes in (1, 4, 16)),
    (4, 64),
    *((0, tokens) for tokens in (16, 32, 64, 128, 256, 512, 1024, 2048)),
)
"""Decodes and prompt tokens of each; on a CPU without prompts of more than 256."""
CPU_WARM_UP_TOKENS = 256


@dataclass(slots=True)
class LiveStep:
    """One step of a live run: what it computed, what was predicted, what was measured."""

    start: float  # s, on the run's clock
    seconds: float  # by which that clock advanced
    predicted_s: float
    schedule_s: float  # CPU time since the step before: scheduler and log; NaN: not measured
    decodes: int
    context: int
    chunks: tuple[tuple[int, int], ...]  # of prompts: (cached, new)
    measured: Measured
    swapped_out: tuple[int, ...] = ()  # blocks of each request that went to the host
    swapped_in: tuple[int, ...] = ()


class ShadowExecutor:
    """Carries out steps on the device beside the cost model, and keeps what both say they take."""

    def __init__(
        self, env: simpy.Environment, live: TorchExecutor, model: Executor, clock: Clock
    ) -> None:
        self.env = env
        self.live = live
        self.model = model
        self.clock = clock
        self.timings: list[LiveStep] = []
        self._last_end = thread_time()

    def execute(self, step: Step) -> Timing:
        """Carry out one forward pass; say what it took on the clock of the run."""
        schedule = thread_time() - self._last_end if self.timings else 0.0
        model = self.model.execute(step)
        predicted, taken = model.seconds, self.live.execute(step).seconds
        if self.live.device != "cpu":  # as on the wall's clock: the device waits for the scheduler
            taken += schedule
        seconds = max(self._elapsed(predicted, taken), MIN_STEP_SECONDS)
        self.timings.append(
            LiveStep(
                start=self.env.now,
                seconds=seconds,
                predicted_s=predicted,
                schedule_s=schedule,
                decodes=step.decodes,
                context=step.context,
                chunks=tuple((chunk.start, chunk.tokens) for chunk in step.prefills),
                swapped_out=tuple(swap.count for swap in step.outgoing or ()),
                swapped_in=tuple(swap.count for swap in step.incoming or ()),
                measured=self.live.last,
            )
        )
        self._last_end = thread_time()
        return Timing(seconds, model.swap, model.features, model.host)

    def _elapsed(self, predicted: float, taken: float) -> float:
        """Get the seconds by which the clock advances; real time has that between steps in it."""
        if isinstance(self.env, RealtimeEnvironment):
            return monotonic() - self.env.real_start - self.env.now
        return predicted if self.clock == "model" else taken


@dataclass(slots=True)
class LiveRun:
    """What a live run yields: the result of any run, and a timing per step."""

    result: Result
    timings: list[LiveStep]
    clock: Clock
    device: str


def several_devices(wanted: EngineConfig, engine: str) -> list[str]:
    """Return a line for each key of `engine:` that asks for more than one device."""
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    several = [key for key in keys if getattr(wanted, key) > 1]
    return [f"engine.{key}: {engine} runs on one device" for key in several]


def build_engine(
    scenario: Scenario, spec: EngineSpec, device: str, *, graphs: bool = True
) -> Engine:
    """Build the engine that a scenario asks for; HeadwayError where it cannot be had."""
    wanted = scenario.engine
    wrong = several_devices(wanted, "the engine")
    if wanted.data_parallel_size == 1 and scenario.cluster is not None:
        wrong.append("cluster: the engine is one, without a router")
    if wanted.quantization:
        wrong.append("engine.quantization: the engine has no quantized weights")
    dtype = spec.model.resolve_dtype(wanted.dtype)
    if wanted.kv_cache_dtype not in {"auto", dtype}:
        wrong.append(f"engine.kv_cache_dtype: the engine's cache has the model's dtype, {dtype}")
    positions = spec.model.max_position_embeddings
    if spec.max_model_len > positions:
        wrong.append(
            f"engine.max_model_len: {spec.max_model_len} is more than the {positions} positions "
            f"of {spec.model.name}"
        )
    if wrong:
        raise HeadwayError(wrong)
    return Engine(
        spec.model,
        spec.num_gpu_blocks,
        wanted.block_size,
        device,
        dtype,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        graphs=graphs,
        mixed_sizes=[int(tokens) for tokens, _ in getattr(spec.cost, "graph_mixed", ())],
    )


def warm_up(engine: Engine, seconds: float = 1.0) -> None:
    """Run steps of several kinds, so that no kernel, buffer or clock is cold in the first one.

    On a GPU every graph is replayed once, since its first time takes longer. The cache's contents
    do not matter: nobody reads a page that was not written for him before.
    """
    size = engine.block_size
    most = WARM_UP_STEPS[-1][1] if engine.device.type == "cuda" else CPU_WARM_UP_TOKENS
    longest = min(most, (engine.num_blocks - 1) * size, engine.spec.max_position_embeddings)
    length = min(128, longest)
    pages = list(range(1, -(-longest // size) + 1))
    if engine.graphs is not None:
        engine.graphs.replay_all()
    until = monotonic() + seconds
    name = -1
    while monotonic() < until:
        for decodes, tokens in WARM_UP_STEPS:
            if tokens > longest:
                continue
            chunks = []
            for start, new in [(length - 1, 1)] * decodes + [(0, min(tokens, longest))]:
                if new:
                    request = Request(name, 0.0, start + new, 2, blocks=pages)
                    name -= 1
                    chunks.append(Chunk(request, start, new))
            engine.execute(chunks, keep=False)
        engine.reset()


def run_live(
    scenario: Scenario,
    device: str = "cpu",
    clock: Clock = "exec",
    *,
    engine: Engine | None = None,
    warm_s: float = 1.0,
    progress: Progress | None = None,
) -> LiveRun:
    """Run a scenario on a device; `engine` may be one that is there already.

    Raises HeadwayError where the scenario asks for what the engine has not.
    """
    spec = resolve(scenario)
    workload = make_workload(scenario)
    _check_lengths(workload, spec)
    try:
        scheduler = make_scheduler(spec, workload.segments is not None, named=True)
    except HeadwayError:
        raise
    except ValueError as error:  # what a simulation may have and a live engine has not
        raise HeadwayError(str(error).split("\n")) from None
    if engine is None:
        engine = build_engine(scenario, spec, device)
    engine.reset()
    executor = TorchExecutor(engine, scheduler)
    warm_up(engine, warm_s)
    env = simpy.Environment() if clock != "wall" else RealtimeEnvironment(strict=False)
    if isinstance(env, RealtimeEnvironment):
        env.sync()
    shadow = ShadowExecutor(env, executor, spec.cost, clock)
    replica = Replica(env, scheduler, shadow)
    result = play(scenario, spec, workload, replica, progress)
    _warn_of_contention(shadow.timings, device, clock)
    return LiveRun(result, shadow.timings, clock, device)


def _check_lengths(workload: Workload, spec: EngineSpec) -> None:
    """Raise HeadwayError for prompts that the model has no positions for.

    A simulation rejects them one by one; here nothing would be measured of them.
    """
    positions, prompts = spec.model.max_position_embeddings, workload.prompt_tokens
    if too_long := int((prompts >= positions).sum()):
        raise HeadwayError(
            f"workload: {too_long} of {len(prompts)} prompts, of up to {prompts.max()} tokens, do "
            f"not fit the {positions} positions of {spec.model.name} with an answer"
        )


def _warn_of_contention(timings: Sequence[LiveStep], device: str, clock: Clock) -> None:
    """Warn where others used the CPU: then wall time tells about them too."""
    busy = sum(timing.measured.busy_s for timing in timings)
    wall = sum(timing.measured.wall_s for timing in timings)
    if device == "cpu" and wall > CONTENTION_RATIO * busy:
        more = ", so the wall clock's figures are not the engine's" if clock == "wall" else ""
        warnings.warn(
            f"the steps took {wall:.1f} s for {busy:.1f} s of CPU time: something else used the "
            f"CPU{more}",
            HeadwayWarning,
            stacklevel=3,
        )
