"""What lets SGLang's scheduler run without a GPU: mocks for modules, and no model.

Modules that are only there with a GPU, and that a schedule does not need, are mocks. In place of a
model is a worker that gives each request its next token by name. `recorder.py` plays the cases.
"""

import logging
import os
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

from headway.conformance.case_model import SglangCase
from headway.sglang.policy import check_sglang
from simulator.util.errors import HeadwayError, one_line

ONLY_WITH_GPU = ("torchvision", "flashinfer")
ROW_ROOM = 600  # slots of a request beyond its context, which drafts take


class _Missing(types.ModuleType):
    """A module that is not there; whatever is asked of it is a mock."""

    __path__: list[str] = []  # noqa: RUF012  as of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _StandIns(MetaPathFinder, Loader):
    """Finds modules that are missing, for SGLang alone: others ask whether they are there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asks = frame.f_code.co_filename if frame is not None else ""
        if f"{os.sep}sglang{os.sep}" not in asks:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


@cache
def load_sglang() -> str:
    """Import SGLang's scheduler, and return its version; HeadwayError where that cannot be."""
    found = check_sglang()
    missing = tuple(name for name in ONLY_WITH_GPU if find_spec(name) is None)
    sys.meta_path.append(_StandIns(missing))
    logging.disable(logging.CRITICAL)  # it tells of all models that want a GPU
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("managers.scheduler", "models.registry"):
                import_module(f"sglang.srt.{name}")
    except ImportError as error:
        raise HeadwayError(
            f"headway.sglang: SGLang {found} cannot be imported: {one_line(error)}"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    return found


class Worker:
    """Computes nothing: a request's next token has the number of its name."""

    is_hybrid_swa = False
    weight_load_time = 0.0
    draft_swa_window = 0
    hicache_draft_plan = primary_draft_kv_pool = None
    forward: Callable[[Any], Any]

    def __init__(self, case: SglangCase, arguments: Any, model_config: Any) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import (
            NgramEmbeddingManager,
        )

        config, kind, device = case.config, torch.float32, "cpu"
        page = config.page_size
        size = config.max_total_tokens // page * page
        self._size, self._seats, self._arguments = size, config.max_running_requests, arguments
        self.graph_time_usage: dict[str, Any] = {}
        self.graph_memory_usage: dict[str, Any] = {}
        self.model_config = model_config
        runner = self.model_runner = MagicMock()
        shape = {"head_num": 1, "head_dim": 1, "layer_num": 1}
        pool = MHATokenToKVPool(size, page, kind, **shape, device=device, enable_memory_saver=False)
        self._rows = ReqToTokenPool(self._seats, config.context_length + ROW_ROOM, device, False)
        options = {"dtype": kind, "device": device, "kvcache": pool, "need_sort": False}
        if page == 1:
            self._allocator = TokenToKVPoolAllocator(size, **options)
        else:
            self._allocator = PagedTokenToKVPoolAllocator(size, page, **options)
        runner.device = device
        runner.model_config = model_config
        runner.token_to_kv_pool = pool
        runner.token_to_kv_pool_allocator = self._allocator
        runner.req_to_token_pool = self._rows
        runner.forward_stream = torch.cpu.Stream()
        runner.canary_manager = runner.hisparse_coordinator = runner.eplb_manager = None
        runner._pending_elastic_scale_update = None
        runner.ngram_embedding_manager = NgramEmbeddingManager(enabled=False, table=None, n=0)
        runner.mtp_draft_device_pools = runner.mtp_draft_mamba_pools = ()
        runner.prefill_aware_swa = runner.is_hybrid_swa = False
        runner.attn_backend.extend_attention_block_m = 64

    def get_worker_info(self) -> tuple[Any, ...]:
        given, stream = self._arguments, self.model_runner.forward_stream
        longest = min(given.context_length - 1, self._size - 1)
        limits = given.max_prefill_tokens, self._seats, given.max_queued_requests
        return (self._size, *limits, longest, longest - 5, 0, "cpu", stream, None, None, None)

    def get_memory_pool(self) -> tuple[Any, Any]:
        return self._rows, self._allocator

    def get_pad_input_ids_func(self) -> None:
        """Say that prompts have no images."""

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, **_: Any) -> Any:
        result = self.forward(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def recorded_scheduler(recording: Any, arguments: Any, ports: Any) -> Any:
    """Make a scheduler of SGLang's that tells a recording (`recorder.py`) what it does."""
    from sglang.srt.managers import scheduler

    class Recorded(scheduler.Scheduler):
        """SGLang's scheduler, that tells what it does."""

        def init_tp_model_worker(self) -> None:
            self.tp_worker = Worker(recording.case, arguments, self.model_config)
            self.tp_worker.forward = recording.compute

        def maybe_init_draft_worker(self) -> None:
            self.draft_worker = self.tp_worker if recording.drafting is not None else None
            self.external_corpus_manager = None

        def init_memory_pools(self) -> None:
            """Leave that to the worker."""

        def init_all_attention_backends(self) -> None:
            """Have none."""

        def init_all_cuda_graphs(self) -> None:
            """Have none."""

        def publish_load_snapshot(self, force: bool = False) -> None:
            """Tell no router."""

        def maybe_sleep_on_idle(self) -> None:
            """Lose no time."""

        def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
            self.process_input_requests(recording.arrivals())
            return []

        def send_abort_output(self, abort_req: Any, req: Any) -> None:
            recording.aborted(req)

        def get_next_batch_to_run(self, *given: Any, **named: Any) -> Any:
            recording.begin_pass()
            plan = super().get_next_batch_to_run(*given, **named)
            recording.chosen(plan)
            return plan

        def process_batch_result(self, batch: Any, result: Any) -> Any:
            recording.computed()
            done = super().process_batch_result(batch, result)
            recording.processed(batch)
            return done

        def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
            super()._add_request_to_queue(req, is_retracted)
            recording.queued(req, is_retracted=is_retracted)

        def on_idle(self) -> None:
            super().on_idle()
            recording.idle()

        def get_prefill_adder_class(self) -> Any:
            return _ordered_adder(super().get_prefill_adder_class())

    made = Recorded(arguments, ports)
    made.load_publisher = MagicMock()
    return made


def _ordered_adder(adder: Any) -> Any:
    """Let those preempted at once queue up in the order in which SGLang chose them.

    It puts them into a set, whose order comes from where they lie in memory.
    """
    from sglang.srt.runtime_context import get_schedule

    class Ordered(adder):
        def preempt_to_schedule(self, req: Any) -> bool:
            before, sign = len(self.preempt_list), 1
            if get_schedule().schedule_low_priority_values_first:
                sign = -1
            done = super().preempt_to_schedule(req)
            self.preempt_list[before:] = sorted(
                self.preempt_list[before:],
                key=lambda one: (one.priority * sign, -one.time_stats.wait_queue_entry_time),
            )
            return bool(done)

    return Ordered
