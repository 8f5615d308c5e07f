"""The whole engine on fake CUDA tensors, which have shapes and a device and no memory.

What a GPU would find first is looked for without one: a tensor on the wrong device, an address that
kernels' wide loads cannot take, a grid that no GPU launches, a wait or a copy within the capture of
a graph, more than one copy to the device in a step, events that come before the inputs.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend.cuda.graphs import MIXED_SIZES
from simulator.core.executor import MIXED_GRAPH_PROMPTS
from simulator.core.request import Chunk, Request
from simulator.models.load import load_model

MODELS = ("llama-3.1-8b", "qwen3-4b")
KERNELS = (
    *("decode_split", "decode_combine", "prefill_tile"),
    *("add_rmsnorm", "rope_store", "silu_mul"),
)
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
"""Programs of a launch, by axis (CUDA C programming guide, table of technical specifications)."""
ALIGNMENT = 16  # bytes: wide loads
WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default")
MEMORY = 139 << 30
CUDA = torch.device("cuda")


@dataclass
class Seen:
    """What happened on the device that is not there; `wrong` says what should not have."""

    wrong: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # copy, record, replay, read: of a step
    launches: Counter[str] = field(default_factory=Counter)
    grids: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the last launch of each
    capturing: bool = False
    captures: int = 0

    def launch(self, name: str, grid: Sequence[int], given: Mapping[str, object]) -> None:
        """Look at one launch of a Triton kernel."""
        self.launches[name] += 1
        self.grids[name] = (*grid,)
        if any(not 0 < size <= most for size, most in zip(grid, MAX_GRID, strict=False)):
            self.wrong.append(f"{name}: grid {tuple(grid)}")
        for argument, value in given.items():
            if isinstance(value, Tensor):
                if value.device.type != "cuda":
                    self.wrong.append(f"{name}: {argument} is on {value.device}")
                if value.storage_offset() * value.element_size() % ALIGNMENT:
                    self.wrong.append(f"{name}: {argument} begins at {value.storage_offset()}")

    def allocate(self, what: str) -> None:
        """Note what a capture may not do."""
        if self.capturing:
            self.wrong.append(f"in a capture: {what}")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of torch's while a graph is captured."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        tensors = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors) or str(function) in WAITS:
            self.seen.allocate(f"{function} of the host's")
        return function(*given, **named)


class Kernel:
    """Stands in for a Triton kernel."""

    def __init__(self, name: str, seen: Seen) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return lambda **given: self.seen.launch(self.name, grid, given)


class HostBlock:
    """Stands in for the tensor on the host: what is done with it needs no torch."""

    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, np.int32)

    def __len__(self) -> int:
        return len(self.array)

    def numpy(self) -> Any:
        """Return the array."""
        return self.array


class FakeBlock:
    """Stands in for a `StagingBuffer`: numpy on the host, nothing on the device."""

    def __init__(self, size: int, device: torch.device, *, fixed: bool = False) -> None:
        from gpu_backend.staging import StagingBuffer

        self.fixed = fixed
        self._kind = StagingBuffer
        self._copied = None
        self._allocate(size)

    seen: Seen  # set by `faked`

    def _allocate(self, size: int) -> None:
        self.seen.allocate("a block of inputs")
        self._host = HostBlock(size)
        self.array = self._host.array
        self._there = torch.empty(size, dtype=torch.int32, device=CUDA)
        self._end = 0

    def stage(self, parts: Sequence[Any]) -> Any:
        """Copy as the real one does."""
        return self._kind.stage(self, parts)  # type: ignore[arg-type]

    def lines(self, count: int, size: int) -> Any:
        """View them as the real one does."""
        return self._kind.lines(self, count, size)  # type: ignore[arg-type]

    def send(self) -> None:
        """Note the copy."""
        if not self.seen.capturing:
            self.seen.order.append("copy")


def _index(self: Tensor, places: Any) -> Tensor:
    """Index with slices and numbers; torch's own asks a CUDA that is not there."""
    found, axis = self, 0
    for place in places if isinstance(places, tuple) else (places,):
        if isinstance(place, slice):
            first, last, _ = place.indices(found.shape[axis])
            found = found.narrow(axis, first, max(0, last - first))
            axis += 1
        else:
            found = found.select(axis, int(place))
    return found


@contextmanager
def faked(seen: Seen, *, capture_fails: str = "") -> Iterator[None]:
    """Put a CUDA that is not there under torch and the engine.

    `capture_fails` is "all", or "prompts": then the first capture does.
    """
    from gpu_backend import input_batch

    real_index, real_cpu, real_empty = Tensor.__getitem__, Tensor.cpu, torch.empty

    def index(self: Tensor, places: Any) -> Any:
        return _index(self, places) if self.device.type == "cuda" else real_index(self, places)

    def read(self: Tensor, *given: Any) -> Any:
        if self.device.type != "cuda":
            return real_cpu(self, *given)
        seen.allocate("a copy to the host")
        seen.order.append("read")
        return HostBlock(self.numel())

    def tensor(values: Sequence[Any], **named: Any) -> Tensor:
        return real_empty(len(values), dtype=torch.int64, **named)

    def empty(*sizes: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        return real_empty(*sizes, **named)

    @contextmanager
    def capture(graph: object, pool: object = None) -> Iterator[None]:
        seen.captures += 1
        if capture_fails == "all" or (capture_fails and seen.captures == 1):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        seen.capturing = True
        yield
        seen.capturing = False

    def to(name: str) -> Any:
        return lambda *_, **__: seen.order.append(name)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    event = SimpleNamespace(
        record=to("record"), synchronize=to("wait"), elapsed_time=lambda other: 1.0
    )
    kernels = ModuleType("gpu_backend.cuda.kernels")
    vars(kernels).update({name: Kernel(name, seen) for name in KERNELS}, LOG2E=1.4427)
    generator = type("Generator", (), {
        "__init__": lambda self, device: None, "manual_seed": lambda self, seed: None,
    })  # fmt: skip
    patches = {
        "is_available": lambda: True, "device_count": lambda: 1,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY), "Event": lambda **_: event,
        "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda other: nullcontext(), "synchronize": lambda *_: None,
        "graph_pool_handle": object, "CUDAGraph": lambda: SimpleNamespace(replay=to("replay")),
        "_sleep": to("sleep"), "graph": capture,
        "get_device_properties": lambda device: SimpleNamespace(uuid="0"),
    }  # fmt: skip
    block = type("Block", (FakeBlock,), {"seen": seen})
    with ExitStack() as stack:
        stack.enter_context(_modules(kernels))
        for name, stand_in in patches.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        for name, method in (("__getitem__", index), ("cpu", read)):
            stack.enter_context(patch.object(Tensor, name, method))
        stack.enter_context(patch.object(Tensor, "normal_", lambda self, *_, **__: self))
        stack.enter_context(patch.object(torch, "Generator", generator))
        stack.enter_context(patch.object(torch, "tensor", tensor))
        stack.enter_context(patch.object(torch, "empty", empty))
        stack.enter_context(patch.object(input_batch, "StagingBuffer", block))
        # torch built for CUDA would start the driver
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Watch(seen))
        yield


@contextmanager
def _modules(kernels: ModuleType) -> Iterator[None]:
    """Let the modules that launch kernels be imported over stand-ins, without Triton."""
    import gpu_backend.cuda as package

    names = ("kernels", "ops")
    before = {name: sys.modules.pop(f"gpu_backend.cuda.{name}", None) for name in names}
    for name in names:  # `from gpu_backend.cuda import ops` would find them there
        vars(package).pop(name, None)
    sys.modules["gpu_backend.cuda.kernels"] = package.kernels = kernels  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(f"gpu_backend.cuda.{name}", None)
            vars(package).pop(name, None)
            if module is not None:
                sys.modules[f"gpu_backend.cuda.{name}"] = module
                setattr(package, name, module)


def _chunks(pieces: Sequence[tuple[int, int]]) -> list[Chunk]:
    """Make requests of (cached, new) tokens with blocks of their own."""
    chunks, block = [], 1
    for number, (start, new) in enumerate(pieces):
        count = -(-(start + new + 1) // 16)
        blocks = list(range(block, block + count))
        chunks.append(Chunk(Request(number, 0.0, start + new, 4, blocks=blocks), start, new))
        block += count
    return chunks


def check_engine(model: str, layers: int = 0) -> tuple[Seen, str]:
    """Build an engine and run steps of every kind; give what was seen, and what was launched.

    Layers are alike: a few of them (0: all) take less time.
    """
    seen = Seen()
    spec = load_model(model)
    if layers:
        spec = replace(spec, num_hidden_layers=layers)
    with faked(seen):
        from gpu_backend.engine import Engine

        engine = Engine(spec, 24576, 16, "cuda", max_num_seqs=256, mixed_sizes=MIXED_SIZES)
        sizes = [*engine.mixed_sizes, *engine.capture_sizes]
        if seen.captures != len(sizes) or engine.mixed_sizes != [*MIXED_SIZES]:
            seen.wrong.append(f"{seen.captures} captures of {len(sizes)} sizes")
        check_graph_tiles(engine, seen)
        per_step = {}
        end = ["read", "wait"]  # a step that samples nothing copies nothing, and must be waited for
        for name, pieces, wanted in (
            ("decode 3", [(1023, 1)] * 3, ["copy", "record", "replay", "record", *end]),
            ("decode 256", [(1023, 1)] * 256, ["copy", "record", "replay", "record", *end]),
            ("decode 257", [(1023, 1)] * 257, ["copy", "record", "record", *end]),
            (
                "mixed",
                [(1023, 1)] * 5 + [(0, 700), (512, 100)],
                ["copy", "record", "record", *end],
            ),
            ("prompt", [(0, 2048)], ["copy", "record", "record", *end]),
            (
                "mixed 105",
                [(1023, 1)] * 5 + [(0, 70), (512, 30)],
                ["copy", "record", "replay", "record", *end],
            ),
            ("prompt 512", [(0, 512)], ["copy", "record", "replay", "record", *end]),
            ("9 prompts", [(0, 8)] * 9, ["copy", "record", "record", *end]),
        ):
            engine.reset()
            seen.order.clear()
            seen.launches.clear()
            done = engine.execute(_chunks(pieces))
            if seen.order != wanted:
                seen.wrong.append(f"{name}: {' '.join(seen.order)}, not {' '.join(wanted)}")
            per_step[name] = seen.launches.total()
            if name == "decode 256":
                seen.order.clear()
                engine.execute(None)
                if seen.order != wanted:
                    seen.wrong.append(f"{name}, going on: {' '.join(seen.order)}")
            if bool(done.bucket) != ("replay" in wanted):
                seen.wrong.append(f"{name}: bucket {done.bucket}")
        _swap(engine, seen)
        launched = ", ".join(f"{name} {count}" for name, count in per_step.items() if count)
    return seen, f"{model}: {seen.captures} graphs; Triton launches: {launched}"


def _swap(engine: Any, seen: Seen) -> None:
    """Copy blocks out and back; the pieces on the host are real ones there."""
    request = Request(-1, 0.0, 1, 1)
    try:
        engine.swap_out(request, list(range(1, 101)))
        engine.swap_in(request, list(range(300, 200, -1)))
    except (RuntimeError, AssertionError) as error:
        seen.wrong.append(f"swap: {str(error).splitlines()[0]}")


def check_graph_tiles(engine: Any, seen: Seen) -> None:
    """Look at the launches that a graph of a step with prompts holds: for the most rows and tiles.

    They are those of the fullest steps: every tile of the longest prompts, and the last of others.
    """
    from gpu_backend.cuda.ops import prefill_cut
    from gpu_backend.input_batch import most_tiles, prefill_tiles

    rows = prefill_cut(engine.dtype).rows
    for size in engine.mixed_sizes:
        batch = engine.inputs.padding(size, mixed=True)
        with torch.inference_mode():
            engine.model.hidden(batch)
        tiles, decodes = seen.grids["prefill_tile"][1], seen.grids["decode_split"][1]
        count = min(MIXED_GRAPH_PROMPTS, size // 2)
        new = np.full(count, 2, np.int32)
        new[0] += size - new.sum()
        spread = np.full(count, size // count, np.int32)
        needed = max(len(prefill_tiles(some * 0, some, 0, rows)) for some in (new, spread))
        if not needed <= tiles == most_tiles(size, rows) or decodes != min(size, 256):
            seen.wrong.append(f"graph of {size} tokens: {tiles} tiles, {decodes} decodes")


def check_timings() -> list[str]:
    """Time steps as on the day: each launched one by one also behind work that hides launches."""
    seen = Seen()
    with faked(seen):
        from tools.campaign import timings

        bench = SimpleNamespace(cuda=True, device="cuda")
        spec = replace(load_model("llama-3.2-1b"), num_hidden_layers=2)
        with (
            patch.object(timings, "read_config", lambda path: spec),
            patch.object(timings, "write_atomic", lambda path, content: None),
        ):
            rows = [*timings.steps(bench, "llama-3.2-1b", graphs=False)]  # type: ignore[arg-type]
            eager = [*seen.order]
            replayed = [
                row
                for row in timings.mixed_steps(bench, "llama-3.2-1b", Path())  # type: ignore[arg-type]
                if row["kernel"] == "step" and row["variant"] == "mixed graph"
            ]
    if len(replayed) != 2 * len(MIXED_SIZES):
        seen.wrong.append(f"{len(replayed)} graphs of steps with prompts were timed")
    behind = [place for place, what in enumerate(eager) if what == "sleep"]
    wrong = [f"step {row['variant']}: no kernels_us" for row in rows if not row.get("kernels_us")]
    if len(behind) != len(rows) * timings.REPEATS:
        wrong.append(f"{len(behind)} steps behind other work, not {timings.REPEATS} of {len(rows)}")
    orders = {" ".join(eager[place + 1 : place + 5]) for place in behind}
    wrong += [f"behind other work: {order}" for order in orders - {"copy record record read"}]
    return wrong + seen.wrong


def check_failing_capture() -> list[str]:
    """Let captures raise: the engine says so, and runs without graphs where it is told to."""
    wrong: list[str] = []
    seen = Seen()
    with faked(seen, capture_fails="prompts"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        from gpu_backend.engine import Engine

        spec = replace(load_model("llama-3.2-1b"), num_hidden_layers=2)
        engine = Engine(spec, 2048, 16, "cuda", mixed_sizes=MIXED_SIZES)
        done = engine.execute(_chunks([(0, 99)]), keep=False)
        if not told or engine.mixed_sizes or done.bucket or not engine.capture_sizes:
            wrong.append("a capture of a step with prompts that raises was not told")
    wrong += seen.wrong
    seen = Seen()
    with faked(seen, capture_fails="all"):
        from gpu_backend.engine import Engine

        spec = replace(load_model("llama-3.2-1b"), num_hidden_layers=2)
        try:
            Engine(spec, 2048, 16, "cuda")
            wrong.append("a capture that raises was not told")
        except RuntimeError:
            pass
        engine = Engine(spec, 2048, 16, "cuda", graphs=False)
        if engine.execute(_chunks([(99, 1)] * 3), keep=False).bucket:
            wrong.append("a step ran as a graph without graphs")
    return wrong + seen.wrong
