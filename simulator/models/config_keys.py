"""What kind of value each key of a config.json has, at whatever depth it is read."""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from simulator.util.from_mapping import short_repr

MOST, MOST_LAYERS = 10**8, 10_000  # of whole numbers; of layers, each of which is read by itself
LAYERS = "num_hidden_layers depth"
WHOLE = """
    hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size
    max_position_embeddings rotary_dim sliding_window attention_chunk_size max_window_layers
    num_experts num_local_experts n_routed_experts num_experts_per_tok top_k_experts
    moe_intermediate_size intermediate_size_mlp n_shared_experts num_shared_experts
    shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
    first_k_dense_replace interleave_moe_layer_step decoder_sparse_step moe_latent_size
    kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads
    index_head_dim global_head_dim num_global_key_value_heads num_kv_shared_layers
    hidden_size_per_layer_input full_attention_interval linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim n_groups mamba_num_heads
    ssm_state_size mamba_head_dim conv_kernel mamba_n_groups mamba_n_heads mamba_d_state
    mamba_d_conv spatial_merge_size pooling_kernel_size mm_tokens_per_image out_hidden_size
    embed_dim window_size
"""
SIGNED = "group_size bits w_bit num_bits"
NUMBERS = """rms_norm_eps rope_theta factor low_freq_factor high_freq_factor
    original_max_position_embeddings"""
FLAGS = """tie_word_embeddings attention_bias use_qk_norm use_sliding_window enable_moe_block
    attention_k_eq_v use_double_wide_mlp load_in_4bit load_in_8bit"""
TEXTS = "hidden_act hybrid_override_pattern"
NAMES = """modules_to_not_convert ignored_layers ignore exclude_modules llm_int8_skip_modules
    targets layer_types architectures exclude"""
BLOCKS = """text_config llm_config vision_config audio_config rope_scaling rope_parameters
    quantization_config kv_cache_scheme global_quant_config export weights weight"""
OF_BLOCKS = "config_groups quantized_layers extra_config layer_quant_config"
PAIRS = "weight_block_size block_structure"


def _whole(value: object, most: int = MOST, least: int = 0) -> bool:
    return type(value) is int and least <= value <= most


def _list(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


def _block(value: object) -> bool:
    return isinstance(value, Mapping)


def _blocks(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_block, value.values()))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    key: (fits, what)
    for keys, fits, what in (
        (LAYERS, lambda n: _whole(n, MOST_LAYERS), f"a whole number up to {MOST_LAYERS:,}"),
        (WHOLE, _whole, f"a whole number up to {MOST:,}"),
        (SIGNED, lambda n: _whole(n, MOST, -1), "a whole number"),
        (NUMBERS, lambda n: type(n) in (int, float) and 0 < n < inf, "a positive number"),
        (FLAGS, lambda flag: isinstance(flag, bool), "true or false"),
        (TEXTS, _text, "a text"),
        ("sliding_window_pattern", lambda n: _whole(n) or _text(n), "a whole number"),
        (NAMES, lambda names: _list(names, _text), "a list of names"),
        ("fullatt_block_indexes mlp_only_layers", lambda n: _list(n, _whole), "a list of numbers"),
        (BLOCKS, _block, "a mapping"),
        (OF_BLOCKS, _blocks, "a mapping of mappings"),
        ("dynamic", lambda one: isinstance(one, bool) or _blocks(one), "a mapping of mappings"),
        (
            PAIRS,
            lambda pair: _list(pair, lambda n: _whole(n, MOST, 1)) and len(pair) == 2,
            "two positive whole numbers",
        ),
    )
    for key in keys.split()
}


def wrong_kinds(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is of the wrong kind in a block and in those within it; null is always right."""
    for key, value in block.items():
        fits, what = KINDS.get(key, (None, ""))
        if value is not None and fits is not None and not fits(value):
            yield f"{key}: must be {what}, not {short_repr(value)}"
        elif isinstance(value, Mapping):
            yield from wrong_kinds(value)


def size_of(raw: Mapping[str, object], key: str) -> int:
    """Return a positive whole number that must be there."""
    value = raw.get(key)
    if not _whole(value, MOST, 1):
        raise ValueError(f"{key}: must be a positive whole number, not {short_repr(value)}")
    assert isinstance(value, int)
    return value
