"""Any scheduler of another engine with any options, for the laws that hold for all."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.hierarchical_cache import WRITE_POLICIES, HierarchicalCache
from simulator.kv_cache.radix_cache import EVICTION_POLICIES, RadixCache
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.schedulers.continuous_batching import ContinuousBatching, Orca, Sarathi
from simulator.schedulers.fastgen import FastGen
from simulator.schedulers.sglang.overlap import OverlappedSgLang
from simulator.schedulers.sglang.queue_order import ORDERS, WITH_PRIORITIES
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.schedulers.static import HfStatic
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import POLICIES, TrtLlm
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.schedulers.vllm_v0 import VllmV0
from simulator.workload.workload import Workload
from tests.support.engines import made

KINDS = {
    "orca": Orca,
    "sarathi": Sarathi,
    "fastgen": FastGen,
    "fcfs-v0": VllmV0,
    "tgi": Tgi,
    "sglang": SgLang,
    "sglang-overlap": OverlappedSgLang,
    "trtllm": TrtLlm,
    "hf-static": HfStatic,
}
LONGEST = 64  # max_model_len
SGLANG = {
    "order": ORDERS,
    "schedule_conservativeness": [0.0, 0.3, 1.0],
    "max_prefill_tokens": [5, 1000],
    "enable_mixed_chunk": [False, True],
    "prefill_max_requests": [None, None, 1],
    "prefill_decode_interval": [0, 0, 2],
    "min_free_slots_delay": [None, None, 2],
    "retraction_policy": ["length", "priority"],
    "radix_eviction_policy": [*EVICTION_POLICIES],
    "ignore_eos": [False, True],
    "retract_decode_steps": [20, 2],
    "new_token_ratio_decay_steps": [600, 5],
}


@st.composite
def other_engines(
    draw: st.DrawFn, seats: int, budget: int, size: int, num_blocks: int
) -> Callable[[], Scheduler]:
    """A maker of one of them, from little memory to plenty."""
    kind = KINDS[draw(st.sampled_from([*KINDS]))]
    options = {"max_num_seqs": seats, "max_model_len": LONGEST}
    if kind not in (Orca, HfStatic):
        options["max_num_batched_tokens"] = budget
    if issubclass(kind, Orca | Tgi | SgLang | TrtLlm):
        options["max_new_tokens"] = draw(st.sampled_from([None, "exact", "exact", 7, 40]))
    choices = {
        Sarathi: {"watermark": [0.0, 0.01, 0.2]},
        VllmV0: {
            "watermark": [0.0, 0.01, 0.2],
            "swap_blocks": [0, 0, 5, 1000],
            "scheduler_delay_factor": [0.0, 0.0, 0.5, 3.0],
        },
        Tgi: {
            "waiting_served_ratio": [0.0, 0.3, 1.2],
            "max_waiting_tokens": [0, 3, 20],
            "max_batch_total_tokens": [None, 100],
        },
        SgLang: SGLANG,
        OverlappedSgLang: SGLANG,
        TrtLlm: {"capacity_scheduler_policy": POLICIES, "enable_chunked_prefill": [True]},
        HfStatic: {"batch_size": [1, seats]},
    }.get(kind, {})
    for name, values in choices.items():
        options[name] = draw(st.sampled_from(values))
    if kind is TrtLlm and draw(st.booleans()):
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": LONGEST + budget}
    if issubclass(kind, SgLang):
        return draw(_sglang(kind, options, size, num_blocks))
    named = draw(st.booleans())
    caching = draw(st.booleans()) and kind.traits.caches_prefixes

    cache = draw(st.sampled_from([RadixCache, UnsharedPrefixCache, None])) if caching else None

    def make() -> Scheduler:
        if cache is not None:
            return made(kind, cache(num_blocks, size), **options)
        blocks = (
            BlockManager(num_blocks, size, caching)
            if named or caching
            else BlockCounter(num_blocks, size)
        )
        return made(kind, blocks, **options)

    return make


@st.composite
def _sglang(
    draw: st.DrawFn, kind: type[SgLang], options: dict[str, object], size: int, num_blocks: int
) -> Callable[[], Scheduler]:
    """SGLang's scheduler with what goes together."""
    if draw(st.booleans()):
        options["enable_priority_scheduling"] = True
        options["order"] = draw(st.sampled_from(WITH_PRIORITIES))
        options["disable_priority_preemption"] = draw(st.booleans())
        options["priority_scheduling_preemption_threshold"] = draw(st.sampled_from([0, 1]))
    if draw(st.sampled_from([False, False, True])):  # the first prompt of a step may be the longest
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(LONGEST, int(options["max_prefill_tokens"]))
    cache = RadixCache if draw(st.booleans()) else BlockCounter
    if cache is BlockCounter and options["order"] == "shortest-prefill-first":
        options["order"] = "lpm"
    if cache is BlockCounter and size > 1:
        options["ignore_eos"] = False  # who is retracted may wait for ever in SGLang
    options["max_num_batched_tokens"] = max(int(options["max_num_batched_tokens"]), size)
    host = draw(st.sampled_from([None, 5, 1000])) if cache is RadixCache else None
    policy, slow = draw(st.sampled_from([*WRITE_POLICIES])), draw(st.sampled_from([0.0, 0.1, 2.0]))
    if host is None:
        return lambda: made(kind, cache(num_blocks, size), **options)
    return lambda: made(
        kind,
        HierarchicalCache(num_blocks, size, host, policy, lambda blocks: blocks * slow),
        **options,
    )


def _requests(load: Workload, scheduler: SgLang) -> list[Request]:
    """Return requests as SGLang sees them."""
    most = allowed(load, 0)
    found = []
    for i in range(len(load)):
        request = Request(i, 0.0, int(load.prompt_tokens[i]), int(load.output_tokens[i]))
        request.max_tokens = int(most[i]) or None
        request.ignore_eos = scheduler.options.ignore_eos
        found.append(request)
    return found


def answers(load: Workload, scheduler: Scheduler) -> npt.NDArray[np.int64]:
    """Return the tokens that each request should get, if it is not rejected."""
    if isinstance(scheduler, SgLang):
        limits = [scheduler.output_limit(request) for request in _requests(load, scheduler)]
        return np.array(limits, np.int64)
    asked = np.minimum(load.output_tokens, LONGEST - load.prompt_tokens)
    most = getattr(scheduler, "max_new_tokens", None)
    return np.minimum(asked, allowed(load, most if isinstance(most, int) else LONGEST))


def allowed(load: Workload, otherwise: int) -> npt.NDArray[np.int64]:
    """Return the longest answer that each client allows; `otherwise` where it does not say."""
    if load.max_tokens is None:
        return np.full(len(load), otherwise)
    return np.where(load.max_tokens > 0, load.max_tokens, otherwise)


def rejections(load: Workload, scheduler: Scheduler) -> npt.NDArray[np.bool_]:
    """Say which requests could never fit into the blocks."""
    if isinstance(scheduler, SgLang):
        return np.array([not scheduler.fits(request) for request in _requests(load, scheduler)])
    usable = scheduler.blocks.usable
    longest = answers(load, scheduler)
    if isinstance(scheduler, ContinuousBatching) and scheduler.reserves:
        room, most = LONGEST - load.prompt_tokens, scheduler.max_new_tokens
        said = allowed(load, 0) if most == "exact" else allowed(load, most or LONGEST)
        longest = np.where(said > 0, np.minimum(room, said), longest)
    if isinstance(scheduler, Tgi):
        usable = scheduler.reservable
    return -(-(load.prompt_tokens + longest - 1) // scheduler.blocks.block_size) > usable
