"""Copies between GPU and host for a recorded SGLang: nothing moves, and a case's clock says when.

HiCache asks for copies and polls whether they are done. Here each way is a link, on which copies
take their turns, so long a page; one to the host begins when the batch under way is over, one from
it with the batch that waits for it. No host memory is pinned, nor asked whether there is enough.
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from headway.conformance.case_model import SglangCase

PENDING = 2**62
PLENTY = 2**50  # bytes


class Links:
    """The links of a recording; `clock()` is now, `busy_until()` when what is launched is over."""

    def __init__(
        self, case: SglangCase, clock: Callable[[], int], busy_until: Callable[[], int]
    ) -> None:
        self._page, self._times = case.config.page_size, case.step_time
        self._clock, self._busy_until = clock, busy_until
        self._free = 0  # when that to the host is
        self._stores: list[int] = []  # when each is done
        self._loads: list[tuple[Any, int]] = []  # of the pass at hand, with their pages
        links = self

        class Event:
            """Is done by a moment of the clock."""

            done = 0

            def __init__(self, **_: Any) -> None:
                """Take no timing."""

            def query(self) -> bool:
                return self.done <= clock()

            def record(self, *_: Any) -> None:
                """Happen at once."""

            wait = synchronize = record

        def store(_: Any, transfers: list[Any]) -> Any:
            links._free = max(clock(), busy_until(), links._free) + (
                links._pages(transfers) * links._times.store_block_ns
            )
            links._stores.append(links._free)
            return links._told(Event(), links._free)

        def load(_: Any, transfers: list[Any], **__: Any) -> Any:
            told = links._told(Event(), PENDING)
            links._loads.append((told.finish_event, links._pages(transfers)))
            return told

        stream = SimpleNamespace(wait_stream=lambda _: None)
        device = SimpleNamespace(Event=Event, Stream=lambda *_: stream)
        memory = "sglang.srt.mem_cache"
        transfer = import_module(f"{memory}.l2_transfer")
        transfer.device_module = device  # type: ignore[attr-defined]
        transfer.L2TransferEngine.submit_device_to_host = store
        transfer.L2TransferEngine.submit_host_to_device = load
        controller = import_module("sglang.srt.managers.cache_controller")
        controller.device_module = device  # type: ignore[attr-defined]
        common = import_module(f"{memory}.pool_host.common")
        common._cuda_host_register = lambda *_: None  # type: ignore[attr-defined]
        base = import_module(f"{memory}.pool_host.base")
        base.available_host_memory_bytes = lambda **_: PLENTY  # type: ignore[attr-defined]

    def _pages(self, transfers: list[Any]) -> int:
        return sum(len(one.host_indices) for one in transfers) // self._page

    def _told(self, event: Any, done: int) -> Any:
        event.done = done
        return SimpleNamespace(start_event=event, finish_event=event, timing_enabled=False)

    def begin_batch(self, start: int) -> int:
        """Hear when the batch of the pass at hand begins; return what its loads take, ns."""
        taken = 0
        for event, pages in self._loads:
            taken += pages * self._times.load_block_ns
            event.done = start + taken
        self._loads.clear()
        return taken

    def next_store(self) -> int | None:
        """Return when the next copy to the host is done; None: none is under way."""
        self._stores = [done for done in self._stores if done > self._clock()]
        return self._stores[0] if self._stores else None
