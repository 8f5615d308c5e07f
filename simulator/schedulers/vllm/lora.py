"""Adapters (LoRA) of an engine: who may be admitted beside whom, and what has to be loaded.

As in vLLM 0.33. The scheduler (`Scheduler.schedule`) passes over a waiting request whose adapter
would be one more than `max_loras` among those of all who run, scheduled in this step or not (to
0.32: who are scheduled in it); those behind it are tried, and it keeps its place. The worker
(`LRUCacheWorkerLoRAManager`) keeps the last used `max_cpu_loras` adapters in host memory and the
last used `max_loras` in slots on the GPU. It loads what a step needs before the step, one after the
other; an adapter that leaves host memory leaves its slot, too.
"""

from collections import OrderedDict
from collections.abc import Iterable

from simulator.core.request import AdapterWork, Request, Step


class AdapterSlots:
    """Which adapters lie in host memory and on the GPU, by their names."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        self.max_loras, self.max_cpu_loras = max_loras, max_cpu_loras
        self._host: OrderedDict[str, None] = OrderedDict()  # the longest unused first
        self._gpu: OrderedDict[str, None] = OrderedDict()

    def refuses(self, request: Request, running: set[str]) -> bool:
        """Say whether a request's adapter would be one too many beside those that run."""
        name = request.model
        return bool(name) and len(running) >= self.max_loras and name not in running

    def work(self, step: Step, running: Iterable[Request], refused: int) -> AdapterWork:
        """Load what a step just scheduled needs; return what that and its tokens come to."""
        work = AdapterWork(refused=refused)
        used: dict[str, None] = {}
        chunks = (*(step.singles or ()), *step.prefills)
        computed = [(request, 1) for request in running if request.joined >= 0]
        computed += [(chunk.request, chunk.tokens) for chunk in chunks]
        for request, tokens in computed:
            if request.model:
                used[request.model] = None
                work.tokens += tokens
        work.active = len(used)
        for name in used:
            self._use(name, work)
        return work

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
