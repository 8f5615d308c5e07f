"""Where chunks of a prompt end under `mamba_cache_mode: align`, so that states can be cached.

As `_mamba_block_aligned_split` in vLLM 0.33. A state is written at the end of a chunk. So chunks
end at boundaries of blocks, at the last one of the prompt, and where others share it no further; a
kernel that exports the state at the last boundary needs no chunk of its own for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Request, Step
from simulator.kv_cache.state_manager import StateManager, prefill_end
from simulator.models.spec import ModelSpec
from simulator.schedulers.feature import Conflict, Feature
from simulator.schedulers.vllm.rules import STATES_SINCE


class States(Feature):
    """What ends the chunks of prompts."""

    key = "mamba_cache_mode"
    lacking = "ends chunks anywhere", "end them where states are cached"
    since = STATES_SINCE
    live = "keeps no states"

    @classmethod
    def wanted(cls, engine: EngineConfig) -> bool:
        return engine.mamba_cache_mode == "align"

    @classmethod
    def conflicts(cls, engine: EngineConfig) -> Iterator[Conflict]:
        if engine.mamba_cache_mode == "align" and not engine.enable_prefix_caching:
            what = "align needs enable_prefix_caching: true"
            yield Conflict("engine.mamba_cache_mode", "engine.enable_prefix_caching", what)
        if engine.mamba_cache_mode == "align" and not engine.enable_chunked_prefill:
            what = "must be true: states are cached at the ends of chunks"
            yield Conflict("engine.enable_chunked_prefill", "engine.mamba_cache_mode", what)

    @classmethod
    def of(cls, engine: EngineConfig, model: ModelSpec) -> Self:
        return cls()

    def attach(self, scheduler: Any) -> None:
        assert isinstance(scheduler.blocks, StateManager)
        self._blocks = scheduler.blocks
        self._blocks.rests_states = scheduler.rules.rests_states
        self._keeps_last = scheduler.rules.keeps_last_state
        threshold = scheduler.long_prefill_token_threshold
        most = scheduler.max_num_scheduled_tokens
        self._longest = min(most, threshold) if threshold else most

    def walks(self, partial: Sequence[Request]) -> bool:
        return bool(partial)

    def tokens(self, request: Request, start: int, tokens: int) -> int:
        last_token = prefill_end(request)
        if start >= last_token:
            return tokens
        blocks, size, end = self._blocks, self._blocks.block_size, start + tokens
        known = request.known - request.unknown
        exports = end >= last_token and blocks.exports(start, end, last_token)
        if end < last_token:
            whole = end // size * size
            if whole > start or size <= self._longest:
                end = whole
        stops = [] if exports else [(known - self._keeps_last) // size * size]
        if not exports and stops[0] < (last := blocks.last_boundary(request.prompt_tokens)):
            stops.append(last)
        if start % size and not exports:
            stops.append((start // size + 1) * size)
        junction = blocks.junction(request)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def annotate(self, step: Step) -> None:
        self._blocks.end_step()
