"""Start the scheduler of the vLLM that is installed: no GPU and no weights are touched."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulator.kv_cache.block_manager import BlockCounter
from simulator.util.errors import HeadwayError

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 1 << 30,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""A model of full attention in every layer; its sizes play no part in scheduling."""


def start_vllm(
    options: dict[str, Any], blocks: BlockCounter, enable_prefix_caching: bool
) -> tuple[Any, Callable[..., Any]]:
    """Start vLLM's scheduler; return it and what makes a request for it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        raise HeadwayError(
            f"engine.scheduler: the installed vLLM cannot be imported: {error}"
        ) from error
    model = _model(options["max_model_len"])
    cache = CacheConfig(block_size=blocks.block_size, enable_prefix_caching=enable_prefix_caching)
    cache.num_gpu_blocks = blocks.usable + 1
    config = VllmConfig(
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, **options),
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=_kv_cache(blocks, model.dtype),
        structured_output_manager=StructuredOutputManager(config),
        block_size=blocks.block_size,
        log_stats=False,
    )
    return scheduler, _request_maker(blocks.block_size, enable_prefix_caching)


def _model(max_model_len: int) -> Any:
    from vllm.config import ModelConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        return ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            dtype="float16",
            seed=0,
        )


def _kv_cache(blocks: BlockCounter, dtype: object) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=blocks.block_size, num_kv_heads=1, head_size=1, dtype=dtype)
    return KVCacheConfig(
        num_blocks=blocks.usable + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )


def _request_maker(block_size: int, caching: bool) -> Callable[..., Any]:
    """Return a function that makes vLLM's request from id, tokens, output, arrival, priority."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request as VllmRequest

    hasher = None
    if caching:
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        hasher = get_request_block_hasher(block_size, function)

    def make(name: str, tokens: list[int], output: int, arrival: float, priority: int) -> Any:
        return VllmRequest(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival,
            priority=priority,
            block_hasher=hasher,
        )

    return make
