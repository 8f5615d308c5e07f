"""Any scheduler of another engine with any options, for the laws that hold for all."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.kv_cache.radix_cache import RadixCache
from simulator.kv_cache.unshared_prefix_cache import UnsharedPrefixCache
from simulator.schedulers.continuous_batching import Orca, Sarathi
from simulator.schedulers.fastgen import FastGen
from simulator.schedulers.sglang import ORDERS, SgLang
from simulator.schedulers.static import HfStatic
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import POLICIES, TrtLlm
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.schedulers.vllm_v0 import VllmV0
from simulator.workload.workload import Workload

KINDS = {
    "orca": Orca,
    "sarathi": Sarathi,
    "fastgen": FastGen,
    "fcfs-v0": VllmV0,
    "tgi": Tgi,
    "sglang": SgLang,
    "trtllm": TrtLlm,
    "hf-static": HfStatic,
}
LONGEST = 64  # max_model_len


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
        SgLang: {
            "order": ORDERS,
            "schedule_conservativeness": [0.0, 0.3, 1.0],
            "max_prefill_tokens": [5, 1000],
        },
        TrtLlm: {"capacity_scheduler_policy": POLICIES, "enable_chunked_prefill": [True]},
        HfStatic: {"batch_size": [1, seats]},
    }.get(kind, {})
    for name, values in choices.items():
        options[name] = draw(st.sampled_from(values))
    if kind is TrtLlm and draw(st.booleans()):
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": LONGEST + budget}
    named = draw(st.booleans())
    caching = draw(st.booleans()) and kind.caches_prefixes

    cache = draw(st.sampled_from([RadixCache, UnsharedPrefixCache, None])) if caching else None

    def make() -> Scheduler:
        if cache is not None:
            return kind(cache(num_blocks, size), **options)
        blocks = (
            BlockManager(num_blocks, size, caching)
            if named or caching
            else BlockCounter(num_blocks, size)
        )
        return kind(blocks, **options)

    return make


def answers(load: Workload, scheduler: Scheduler) -> npt.NDArray[np.int64]:
    """Give the tokens that each request should get, if it is not rejected."""
    asked = np.minimum(load.output_tokens, LONGEST - load.prompt_tokens)
    most = getattr(scheduler, "max_new_tokens", None)
    return np.minimum(asked, allowed(load, most if isinstance(most, int) else LONGEST))


def allowed(load: Workload, otherwise: int) -> npt.NDArray[np.int64]:
    """Give the longest answer that each client allows; `otherwise` where it does not say."""
    if load.max_tokens is None:
        return np.full(len(load), otherwise)
    return np.where(load.max_tokens > 0, load.max_tokens, otherwise)


def rejections(load: Workload, scheduler: Scheduler) -> npt.NDArray[np.bool_]:
    """Say which requests could never fit into the blocks."""
    usable = scheduler.blocks.usable
    longest = answers(load, scheduler)
    if scheduler.reserves:
        room, most = LONGEST - load.prompt_tokens, scheduler.max_new_tokens
        said = allowed(load, 0) if most == "exact" else allowed(load, most or LONGEST)
        longest = np.where(said > 0, np.minimum(room, said), longest)
    if isinstance(scheduler, Tgi):
        usable = scheduler.reservable
    return -(-(load.prompt_tokens + longest - 1) // scheduler.blocks.block_size) > usable
