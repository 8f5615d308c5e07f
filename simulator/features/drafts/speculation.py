"""Which scheduler verifies the drafts of an engine, and what contradicts them.

A decode that verifies drafts is no decode of one token: a scheduler of its own decides such steps,
where other features are asked at each.
"""

from collections.abc import Iterator
from typing import Any

from simulator.core.engine_config import EngineConfig
from simulator.core.speculative_config import TYPICAL, VLLM_DRAFTS, DraftConfig, SpeculativeConfig
from simulator.costs.cost_model import CostModel
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.loaded import loaded
from simulator.models.spec import ModelSpec
from simulator.schedulers.feature import ORDERING, Conflict, Feature, Need
from simulator.schedulers.vllm.rules import write_release
from simulator.util.errors import ScenarioError

BESIDE_HOST_SINCE, BESIDE_OTHERS_SINCE = (0, 32, 0), (0, 33, 0)


class Speculation(Feature):
    """Drafts that each step verifies beside its tokens."""

    key = "speculative_config"
    live = "verifies no drafts"

    @classmethod
    def conflicts(cls, engine: EngineConfig) -> Iterator[Conflict]:
        drafts, tokens = engine.speculative_config, engine.max_num_batched_tokens
        k = drafts.num_speculative_tokens if drafts and engine.enable_lora else 0
        seqs = engine.max_num_seqs * (1 + k)
        if k and tokens < seqs:
            what = f"with k drafts needs max_num_batched_tokens >= max_num_seqs x (1 + k) ({seqs})"
            what += f", not {tokens}"
            yield Conflict("engine.enable_lora", "engine.max_num_batched_tokens", what)

    @classmethod
    def cost(cls, inner: CostModel, engine: EngineSizes, model: ModelSpec, gpu: Gpu) -> CostModel:
        """Put what drafting takes on a cost: what is said, else its share of the weights.

        EAGLE and MTP end with the target's lm_head. ValueError for a draft model that is not known.
        """
        from simulator.features.drafts.cost import DraftedCost

        drafts, method = engine.speculative_config, engine.draft_method
        assert drafts is not None
        draft = drafts.draft
        if draft is None:
            if method == "ngram":
                return inner
            if method == "draft_model" and engine.draft is None:
                what = "name a known `model`, or give {fraction: 0.1}"
                raise ScenarioError("engine.speculative_config.draft", what)
            parts = loaded(model, gpu, engine)
            head = parts.head or parts.embedding
            own = parts.drafts + head * (method in ("eagle", "mtp"))
            draft = DraftConfig(fraction=min(own / (sum(parts.layers) + head + parts.rest), 1.0))
        return DraftedCost(inner, drafts.num_speculative_tokens, draft)

    @classmethod
    def scheduler(cls, spec: Any, policy: str, need: Need) -> type[Any]:
        if policy == "sglang":
            return _with_eagle(spec, spec.engine.speculative_config, need)
        lacks = f"{policy} verifies no drafts; fcfs does, and {ORDERING}, boost, sglang"
        need(cls.key, "drafts ahead" if spec.engine.drafts_ahead else "drafts", lacks)
        return _with_drafts(spec, spec.engine.speculative_config)


def _with_eagle(spec: Any, drafts: SpeculativeConfig, need: Need) -> type[Any]:
    """Return what verifies drafts as SGLang does; ValueError for what that does not do."""
    from simulator.features.drafts.eagle import OverlappedSpeculativeSgLang, SpeculativeSgLang

    at = f"engine.{Speculation.key}"
    need(Speculation.key, "eagle")
    if spec.order is not None:
        raise ScenarioError(at, "needs an order of SGLang's own, not a policy of Headway's")
    if drafts.method not in TYPICAL:
        raise ScenarioError(f"{at}.method", f"must be {', '.join(TYPICAL)} for sglang")
    for key in VLLM_DRAFTS:
        if getattr(drafts, key):
            raise ScenarioError(f"{at}.{key}", "is vLLM's, and sglang has none")
    return OverlappedSpeculativeSgLang if spec.engine.async_scheduling else SpeculativeSgLang


def _with_drafts(spec: Any, drafts: SpeculativeConfig) -> type[Any]:
    """Return what verifies drafts: as sums, or with a prefix cache or a step ahead one by one."""
    engine = spec.engine
    if drafts.is_tree:
        what = "is SGLang's: vLLM's drafts are a chain"
        raise ScenarioError("engine.speculative_config.speculative_eagle_topk", what)
    if drafts.num_speculative_tokens_per_batch_size and engine.data_parallel_size > 1:
        what = "vLLM 0.28 and later ignore it with data_parallel_size: leave it out"
        raise ScenarioError(f"engine.speculative_config.{VLLM_DRAFTS[0]}", what)
    hashed = spec.rules.hashes_beyond and not drafts.disable_lookahead_block_hashes
    if spec.keeps_window and drafts.reads_next > hashed and engine.enable_prefix_caching:
        what = f"{drafts.method} with a window has a prefix cache from vLLM 0.33 on"
        raise ScenarioError("engine.enable_prefix_caching", f"must be false: {what}")
    if (own := _beside_others(spec)) is not None:
        return own
    if not engine.drafts_ahead:
        from simulator.features.drafts.as_sums import Speculative

        return Speculative
    from simulator.features.drafts import walk as kinds

    if engine.kv_offloading_size is None:
        return kinds.AsyncDraftWalk if engine.async_scheduling else kinds.DraftWalk
    _check_beside_host(spec, drafts)
    return kinds.AsyncHostDrafts if engine.async_scheduling else kinds.HostDrafts


def _beside_others(spec: Any) -> type[Any] | None:
    """Return what verifies drafts on pipeline stages, or beside a kv_role; None: there are none.

    ValueError says what either needs.
    """
    from simulator.features.drafts import roles, walk

    engine, role, stages = spec.engine, spec.role, spec.engine.pipeline_parallel_size > 1
    if not stages and role not in roles.KINDS:
        return None
    since = write_release(BESIDE_OTHERS_SINCE[:2])
    follows = engine.follows_vllm and spec.release >= BESIDE_OTHERS_SINCE
    for met, what in (
        (follows, f"the rules of vLLM {since} or later"),
        (
            engine.async_scheduling or not stages,
            "async_scheduling: true; vLLM stops without (52071)",
        ),
        (engine.drafts_ahead, "async_scheduling or enable_prefix_caching: true"),
    ):
        if not met:
            at = "pipeline_parallel_size" if stages else "kv_role"
            raise ScenarioError(f"engine.{at}", f"beside drafts needs {what}")
    if stages:
        return walk.PipelineDrafts
    return roles.KINDS[role][int(engine.async_scheduling)]


def _check_beside_host(spec: Any, drafts: SpeculativeConfig) -> None:
    """Raise ValueError where nobody has recorded what drafts beside a host tier come to."""
    engine = spec.engine
    recorded = engine.follows_vllm and spec.release >= BESIDE_HOST_SINCE
    for met, what in (
        (recorded, f"the rules of vLLM {write_release(BESIDE_HOST_SINCE[:2])} or later"),
        (engine.loads_beside, "hicache_write_policy: write_through, without secondary_tiers"),
        (not any(getattr(drafts, key) for key in VLLM_DRAFTS), f"no {', '.join(VLLM_DRAFTS)}"),
    ):
        if not met:
            raise ScenarioError("engine.kv_offloading_size", f"beside drafts needs {what}")
