"""What an engine loads onto each GPU, part by part, as its log's `Model loading took` counts.

Beside a checkpoint's modules: rows that pad the vocabulary, angles of rotary embeddings,
towers, layers that draft, and what kernels add: Marlin pads the experts of mxfp4 (gpt-oss), latent
attention is unpacked in 16 bits.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from simulator.core.speculative_config import draft_method
from simulator.models.config_keys import MOST
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.engine_sizes import BFLOAT16, EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.load import load_model
from simulator.models.modules import FULL, Module, modules_of
from simulator.models.quantization import Quantization
from simulator.models.spec import ModelSpec, module_bytes
from simulator.models.vision import VisionEncoder
from simulator.util.errors import ScenarioError

VOCABULARY = 64  # rows that a GPU's part of a table is a multiple of (vLLM, SGLang)
CHIPS = {9.0: "Hopper's", 9.4: "AMD's", 9.5: "AMD's", 10.0: "Blackwell's", 10.3: "Blackwell's"}
"""By compute capability, as `memory_terms.csv` has them."""
SECTIONS = 4  # times as many angles where pictures have positions of their own (MRotaryEmbedding)
FUSED = re.compile(r"\b[qkv]_proj$|\b(gate|up)_proj$")
"""Parts of one tensor each: queries, keys and values; gate and up."""
CHUNKED, CHUNK = 10 << 20, 2 << 20
"""From 10 MiB on PyTorch takes multiples of 2 MiB of the GPU for a tensor (CUDACachingAllocator):
SGLang logs what is gone of the GPU, vLLM what its tensors have."""
EAGLE3_VOCABULARY = 32_000  # of the drafts, as the published heads have


FLOATS = {"float16", "bfloat16"}  # of a cache that may be of the model's dtype alone
LEAST_CAPABILITY = {"fp8": 7.5, "nvfp4": 7.5, "mxfp4": 8.0, "awq": 7.5, "compressed-tensors": 7.5}
LEAST_CAPABILITY |= {"fbgemm_fp8": 8.0, "quark fp8": 8.9, "bfloat16": BFLOAT16}
"""Compute capability that vLLM's methods need at least (get_min_capability; 0.33)."""


OF_ENCODERS = ("vision_tower.encoder.layers.0.self_attn.q_proj", "visual.blocks.0.attn.qkv")
"""How checkpoints name a module of an encoder; Qwen's and GLM's, where images have sections."""


class Loaded(NamedTuple):
    """Bytes on each GPU; `layers` and `rest` are the language model's."""

    layers: tuple[float, ...]  # of each, which pipeline stages share out
    embedding: float
    head: float  # 0: the embedding is it
    rest: float  # angles, the last norm, other tables
    tower: float
    drafts: float


def loaded(model: ModelSpec, gpu: Gpu, sizes: EngineSizes) -> Loaded:
    """Work out what each GPU has; ValueError where a checkpoint does not say its formats."""
    gpus, word = sizes.tensor_parallel_size, model.weight_dtype(sizes.weight_dtype)
    if sizes.fraction_of == "all" and sizes.dtype == "float16" and model.no_float16:
        why = f"vLLM refuses float16 for {model.name}: its numbers overflow there"
        raise ScenarioError("engine.dtype", why)
    dtype, cache = model.resolve_dtype(sizes.dtype), sizes.kv_cache_dtype
    if cache in FLOATS - {dtype} and sizes.term("cache of another float refused"):
        why = f"must be auto or of 8 bits (fp8), not {cache}: vLLM refuses it beside dtype {dtype}"
        raise ScenarioError("engine.kv_cache_dtype", why)
    method = model.checkpoint.method if model.checkpoint else ""
    asked = (word, method, f"{method} {word}", sizes.dtype)
    least, what = max((LEAST_CAPABILITY.get(one, 0.0), one) for one in asked)
    if sizes.fraction_of == "all" and 0 < gpu.compute_capability < least:
        why = f"vLLM runs {what} from compute capability {least} on; {gpu.name} has"
        raise ScenarioError("gpu", f"{why} {gpu.compute_capability}")
    unpacked = 0.0
    if (own := model.latent) is not None:  # vLLM's W_UK_T and W_UV, and SGLang's
        each = model.num_attention_heads * (own.qk_nope_head_dim + own.v_head_dim)
        unpacked = HALF * own.kv_lora_rank * each / gpus
    layers = [unpacked] * model.num_hidden_layers
    for name, size in _tensors(model, gpu, sizes, model.modules).items():
        layers[int(name.split(".")[1])] += size
    outer = _tensors(model, gpu, sizes, (_whole(one, gpus) for one in model.outer))
    embedding, head = outer.pop("embed_tokens"), outer.pop("lm_head", 0.0)
    rest = sum(outer.values()) + _angles(model, sizes)
    tower, vision = 0.0, model.vision
    if vision is not None and sizes.encodes(*vision.modalities):
        tower = _tower(model, vision, sizes) / (1 if vision.is_whole else gpus)
    if vision is not None and sizes.encodes("audio"):
        tower += HALF * vision.audio
    drafts = _drafting(model, gpu, sizes)
    return Loaded(tuple(layers), embedding, head, rest, tower=tower, drafts=drafts)


def _tower(model: ModelSpec, vision: VisionEncoder, sizes: EngineSizes) -> float:
    """Bytes of an encoder: in the formats of the file, or of `--quantization fp8`.

    As vLLM 0.32: by ModelOpt those of Qwen and GLM alone (is_layer_excluded), never Gemma 4's.
    AWQ's and GPTQ's tools leave encoders in 16 bits, as vLLM sees in the files of weights
    (maybe_update_config; before, _maybe_ignore_quant_config).
    """
    formats, inputs, narrow = model.formats(sizes.weight_dtype), vision.hidden_size, False
    if formats is not None and (formats.method or formats.word == "fp8"):
        of_texts = formats.method.startswith(("awq", "gptq"))
        by_modelopt = formats.method.startswith("modelopt")
        narrow = not (vision.is_whole or of_texts) and (vision.has_sections or not by_modelopt)
    matrices = Module(OF_ENCODERS[vision.has_sections], vision.quantizes // inputs, inputs)
    rest = vision.parameters + vision.beside - matrices.numbers
    return module_bytes(matrices, formats if narrow else None, HALF) + HALF * rest


def _whole(table: Module, gpus: int) -> Module:
    """Pad the rows of a table that has one for each token."""
    if table.name not in ("embed_tokens", "lm_head"):
        return table
    multiple = VOCABULARY * gpus
    return table._replace(outputs=ceil(table.outputs / multiple) * multiple)


def _tensors(
    model: ModelSpec, gpu: Gpu, sizes: EngineSizes, modules: Iterable[Module]
) -> dict[str, float]:
    """Bytes of the tensors of modules on each GPU."""
    formats, width = model.formats(sizes.weight_dtype), model.wide(sizes.dtype)
    gpus, ranks = sizes.tensor_parallel_size, sizes.data_parallel_size
    whole = sizes.enable_expert_parallel or ranks > 1  # experts, of which each GPU has some
    least = sizes.term("least block of fp8") or MOST
    within, spread = (1, gpus * ranks) if whole else (gpus, 1)
    tensors: dict[str, float] = {}
    for one in modules:
        among = within if "experts." in one.name else gpus
        if formats is not None and among > 1 and one.quantizes and sizes.fraction_of != "free":
            _check_blocks(one, formats, among, model.num_key_value_heads, least)
        if not one.is_expert:
            size = module_bytes(one, formats, width, gpus, model.num_key_value_heads)
        else:
            pads = formats is not None and formats.word == "mxfp4"
            expert = _padded(one, within, gpu, sizes) if pads else one
            size = module_bytes(expert, formats, width, within) / min(spread, model.num_experts)
        tensor = FUSED.sub("", one.name)
        tensors[tensor] = tensors.get(tensor, 0.0) + size
    if sizes.fraction_of == "static":
        tensors |= {k: ceil(n / CHUNK) * CHUNK for k, n in tensors.items() if n >= CHUNKED}
    return tensors


SHARED = re.compile(r"\b(self_attn|mlp)\.")
OF_EXPERTS = ("output_size of gate's and up's", "input_size of down's")
OF_LAYERS = ("output_partition_size", "input_size_per_partition")


def _check_blocks(
    module: Module, formats: Quantization, gpus: int, kv_heads: int, least_block: int
) -> None:
    """Raise ValueError, in the engine's words, where GPUs would share a block of weights.

    It names the least change after which they do not: whole experts, or fewer GPUs.

    As validate_fp8_block_shape and Fp8MoEMethod (vLLM, SGLang) for blocks, AWQLinearMethod and
    GPTQLinearMethod for groups. Kernels of experts in int4 take narrower groups, those in fp8
    smaller blocks (refine_fp8_moe_block_shape); bitsandbytes, which has scales of 4 bytes, any.
    """
    found = formats.of(module.name)
    if found is None or module.split == "whole" or not SHARED.search(module.name):
        return
    at = int(module.split == "inputs")
    size, block = module.share(gpus, kv_heads)[at], (found.rows, found.group)[at]
    by_blocks = found.rows > 1
    if module.is_expert and formats.method == "fp8":
        block = min(block, least_block)
    by_groups = found.word.startswith("int") and found.scale < 4 and not module.is_expert
    if not block or size % block == 0 or not (by_blocks or by_groups):
        return
    why = "The input size is not aligned with the quantized weight shape"
    if by_blocks:
        whose = f"The {OF_EXPERTS[at]} weight" if module.is_expert else f"Weight {OF_LAYERS[at]}"
        why = f"{whose} = {size} is not divisible by weight quantization block_{'nk'[at]} = {block}"
    fewer = (n for n in range(gpus, 0, -1) if gpus % n == 0)
    fits = next((n for n in fewer if module.share(n, kv_heads)[at] % block == 0), 1)
    least = "enable_expert_parallel=true" if module.is_expert else f"tensor_parallel_size={fits}"
    what = f"{gpus} is refused: {why} ({module.name}); it loads with engine.{least}"
    raise ScenarioError("engine.tensor_parallel_size", what, "model")


def _padded(module: Module, gpus: int, gpu: Gpu, sizes: EngineSizes) -> Module:
    """Pad an expert's matrix as the kernels do; its biases are left as they are."""
    if not module.quantizes:
        return module
    kind = CHIPS.get(gpu.compute_capability, "other chip's")
    hidden, inner = sizes.term(f"{kind} hidden size"), sizes.term(f"{kind} expert") * gpus
    rows, columns = (inner, hidden) if module.split == "outputs" else (hidden, inner)
    return module._replace(
        outputs=ceil(module.outputs / rows) * rows, inputs=ceil(module.inputs / columns) * columns
    )


def _angles(model: ModelSpec, sizes: EngineSizes) -> float:
    """Bytes of the tables of rotary embeddings, one for each kind of layer that has its own.

    Linear scaling lengthens that of layers with full attention (LinearScalingRotaryEmbedding).
    """
    plain = sizes.term("classes of transformers") and model.no_angles
    mamba = model.linear is not None and model.linear.is_mamba
    if model.learned_positions or plain or mamba:
        return 0.0
    scaling = model.rope_scaling
    longer = scaling.factor if scaling is not None and scaling.rope_type == "linear" else 1.0
    turned = model.latent.qk_rope_head_dim if model.latent else model.rotary_dim
    own = model.keeps_window and model.qk_norm  # Llama 4 has one table, for chunks alone
    numbers = sum(
        (turned or model.head_size(kind)) * (longer if kind == FULL else 1.0)
        for kind in (model.cached_layers if own else [FULL])
    )
    once = sizes.term("angles once") and model.family.startswith("qwen3")
    sections = model.vision is not None and model.vision.has_sections and not once
    width = bytes_of("float32") if model.expert_bias else HALF  # gpt-oss
    return width * (SECTIONS if sections else 1) * model.max_position_embeddings * numbers


def _drafting(model: ModelSpec, gpu: Gpu, sizes: EngineSizes) -> float:
    """Bytes of what drafts: a layer of MTP, EAGLE's layer and `fc`, EAGLE-3's, or a model."""
    method, draft, more = sizes.draft_method, sizes.draft, {"target": model.hidden_size}
    alone = EngineSizes(tensor_parallel_size=sizes.tensor_parallel_size)
    if draft is not None and method == "draft_model":
        own = loaded(draft, gpu, alone)
        return sum(own.layers) + sum(own[1:]) - own.tower
    if method == "mtp":
        if not model.has_mtp:
            raise ScenarioError("engine.speculative_config", f"mtp: {model.name} has no MTP layers")
        at = 0 if model.dense_drafts else model.num_hidden_layers - 1
        last = (one for one in model.modules if one.name.startswith(f"layers.{at}."))
        drafting, modules = model, [one._replace(name="mtp." + one.name) for one in last]
    elif method in ("eagle", "eagle3"):
        drafting = draft or replace(
            model,
            num_hidden_layers=1,
            kinds=(),
            num_experts=0,
            latent=None,
            linear=None,
            checkpoint=None,
            intermediate_size=model.dense_intermediate_size or model.intermediate_size,
        )
        modules, sizes, vocabulary = [*drafting.modules], alone, drafting.vocab_size
        shares = drafting.hidden_size == model.hidden_size  # the target's table of tokens
        heads = drafting.draft_vocab_size or (vocabulary if draft else EAGLE3_VOCABULARY)
        more["tables"] = heads + (0 if shares else vocabulary)
    else:
        return 0.0
    modules += modules_of([method], vars(drafting) | more)
    return sum(_tensors(drafting, gpu, sizes, modules).values())


def draft_method_of(block: Mapping[str, Any], base: Path | None = None) -> str:
    """Return how a block's drafts are made: as vLLM, by the model's name, then by its family."""
    method, named = draft_method(block), block.get("model")
    if method == "draft_model" and not block.get("method") and isinstance(named, str):
        with suppress(ValueError):  # what is wrong with the model is said where it counts
            method = "mtp" if load_model(named, base).has_mtp else method
    return method
