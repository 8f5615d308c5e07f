"""Adapters (LoRA) of an engine: who may be admitted beside whom, and what has to be loaded.

As in vLLM 0.33. The scheduler (`Scheduler.schedule`) passes over a waiting request whose adapter
would be one more than `max_loras` among those of all who run, scheduled in this step or not (to
0.32: who are scheduled in it); those behind it are tried, and it keeps its place. The worker
(`LRUCacheWorkerLoRAManager`) keeps the last used `max_cpu_loras` adapters in host memory and the
last used `max_loras` in slots on the GPU. It loads what a step needs before the step, one after the
other; an adapter that leaves host memory leaves its slot, too.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Self

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Request, Step
from simulator.costs.cost_model import CostModel
from simulator.features.lora.work import KEY, AdapterWork
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.schedulers.feature import Conflict, Feature
from simulator.schedulers.running_requests import RunningRequests
from simulator.util.errors import ScenarioError


class Lora(Feature):
    """Which adapters lie in host memory and on the GPU, by their names."""

    key = KEY
    lacking = "knows no adapters", "does"
    live = "computes no adapters"
    passes_over = True

    def __init__(self, max_loras: int, max_cpu_loras: int = 0) -> None:
        self.max_loras, self.max_cpu_loras = max_loras, max(max_loras, max_cpu_loras)
        self._host: OrderedDict[str, None] = OrderedDict()  # the longest unused first
        self._gpu: OrderedDict[str, None] = OrderedDict()
        self._active: set[str] = set()  # adapters of those who run
        self._refused = 0  # in this step

    @classmethod
    def conflicts(cls, engine: EngineConfig) -> Iterator[Conflict]:
        for key in ("max_loras", "max_cpu_loras", "max_lora_rank", "lora_load_bandwidth"):
            if engine.is_given(key) and not engine.enable_lora:
                yield Conflict(f"engine.{key}", "engine.enable_lora", "needs enable_lora: true")
        if engine.max_cpu_loras is not None and engine.max_cpu_loras < engine.max_loras:
            what = f"must be at least max_loras ({engine.max_loras}), not {engine.max_cpu_loras}"
            yield Conflict("engine.max_cpu_loras", "engine.max_loras", what)

    @classmethod
    def of(cls, engine: EngineConfig, model: ModelSpec) -> Self:
        return cls(engine.max_loras, engine.cpu_loras)

    @classmethod
    def cost(cls, inner: CostModel, engine: EngineConfig, model: ModelSpec, gpu: Gpu) -> CostModel:
        from simulator.features.lora.cost import lora_cost

        return lora_cost(inner, model, gpu, engine)

    @classmethod
    def slot_bytes(cls, engine: EngineConfig, model: ModelSpec) -> int:
        from simulator.features.lora.size import adapter_size

        size = adapter_size(model, engine.max_lora_rank, engine.tensor_parallel_size)
        return int(engine.max_loras * size.slot_bytes)

    def attach(self, scheduler: Any) -> None:
        self._running: RunningRequests = scheduler.running
        self._counts_all = scheduler.rules.counts_all_adapters
        if scheduler.keeps_books:
            what = "needs policies of a key alone: fcfs, priority, sjf"
            raise ScenarioError("engine.enable_lora", what)

    def begin(self, step: Step) -> None:
        using: Iterable[Request] = self._running
        if not self._counts_all:
            using = [chunk.request for chunk in (*step.prefills, *(step.singles or ()))]
            using += [one for one in self._running if one.joined >= 0]
        self._active = {one.model for one in using if one.model}

    def may_admit(self, request: Request) -> bool:
        name = request.model
        refused = bool(name) and len(self._active) >= self.max_loras and name not in self._active
        self._refused += refused
        return not refused

    def on_admit(self, request: Request) -> None:
        if request.model:
            self._active.add(request.model)

    def annotate(self, step: Step) -> None:
        """Load what a step needs; say what that and its tokens come to."""
        refused, self._refused = self._refused, 0
        if not step.decodes and not step.prefills:
            return
        work = AdapterWork(refused=refused)
        step.add_work(KEY, work)
        used: dict[str, None] = {}
        chunks = (*(step.singles or ()), *step.prefills)
        running = self._running
        computed = [(one, running.decodes.verified(one)[0]) for one in running if one.joined >= 0]
        computed += [(chunk.request, chunk.tokens) for chunk in chunks]
        for request, tokens in computed:
            if request.model:
                used[request.model] = None
                work.tokens += tokens
        work.active = len(used)
        for name in used:
            self._use(name, work)

    def _use(self, name: str, work: AdapterWork) -> None:
        if name not in self._host:
            work.read += 1
            if len(self._host) >= self.max_cpu_loras:
                oldest, _ = self._host.popitem(last=False)
                self._gpu.pop(oldest, None)
        self._host[name] = None
        self._host.move_to_end(name)
        if name not in self._gpu:
            work.copied += 1
            if len(self._gpu) >= self.max_loras:
                self._gpu.popitem(last=False)
        self._gpu[name] = None
        self._gpu.move_to_end(name)
