"""Read a Hugging Face config.json.

`config_keys.csv` tells what kind of value each key has, and which field of ModelSpec it is,
`FAMILIES` what the files of a `model_type` leave unsaid because its code in transformers says it.
Files of models that read images, too, hold the language model in a block of their own; of the rest
`vision.py` reads the encoder's sizes. What is wrong in a file is told by line and key.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.models.config_keys import REQUIRED, keys_of, size_of, wrong_kinds
from simulator.models.config_parts import (
    TABLE,
    read_kinds,
    read_latent,
    read_linear,
    read_rope,
    read_rotary,
    read_window,
)
from simulator.models.dtypes import BYTES
from simulator.models.quantization import BLOCK, read_quantization
from simulator.models.spec import ModelSpec
from simulator.models.vision import read_vision
from simulator.util.errors import HeadwayError, MappingError, ScenarioError, did_you_mean
from simulator.util.from_mapping import short_repr
from simulator.util.json_text import parse_json
from simulator.util.yaml_lines import read_text

SIZES, FLAGS = keys_of("whole", "size", "layers"), keys_of("flag", "number")
SHARED: list[str] = TABLE["shared"].split()
"""Keys of the width of what all tokens meet beside the experts."""

TEXT = ("text_config", "llm_config")  # a block with the language model
TOWERS = ("vision_config", "audio_config")
FORMATS = ("quantization_config", "compression_config", "quantization")
"""Keys of the weights' formats, of which the first counts: of older compressed-tensors, MLX's."""
BESIDE: dict[str, str] = TABLE["beside"]
"""Files beside a config.json that may have the formats, and whose they are by themselves."""
OUTER = ("dtype", "torch_dtype", "tie_word_embeddings", *FORMATS)
"""Keys that a file with such a block may have beside it."""

POOLING = re.compile(TABLE["pooling"])
"""Architectures that vLLM's _SUFFIX_TO_DEFAULTS (0.11) does not let write tokens."""

FAMILIES: dict[str, dict[str, Any]] = {}
for names, keys in TABLE["families"].items():
    for name in names.split():
        FAMILIES[name] = FAMILIES.get(name, {}) | keys
"""Values of `model_type` whose architecture is the one that `ModelSpec` counts, and keys that count
where their files have none (some of these no file has)."""

FOREIGN: dict[str, str] = TABLE["foreign"]
"""What files of other kinds are, by name or suffix."""

SINCE: dict[str, str] = TABLE["since"]
"""The first release of vLLM that has a family, of those since 0.10."""


def read_config(path: Path) -> ModelSpec:
    """Read a Hugging Face config.json; HeadwayError names the file and every bad key.

    Where it says no formats, a file of `BESIDE` may.
    """
    text = read_text(path)
    whole = _object(path, text)
    for name, method in BESIDE.items():
        if (beside := path.with_name(name)).is_file() and not _says_formats(whole):
            whole["quantization_config"] = _read_beside(beside, method)
    try:
        return spec_of(path.resolve().parent.name, whole)
    except MappingError as error:
        raise HeadwayError(
            f"{path}{_line(text, key)}: {key}: {what}" for (key,), what, _ in error.faults
        ) from None


def spec_of(name: str, whole: Mapping[str, Any]) -> ModelSpec:
    """Make the ModelSpec of a config.json; MappingError has each wrong key."""
    raw = _language_model(whole)
    kinds = dict(wrong_kinds(whole))
    if wrong := {**kinds, **_wrong(raw), **kinds}:
        raise MappingError.of(wrong)
    # As derive_max_model_len_and_key (vLLM 0.33): the least, but model_max_length before all.
    least = min(raw[key] for key in SIZES["max_position_embeddings"] if key in raw)
    most = raw.get("model_max_length") or least
    spec = _spec(name, raw | {"max_position_embeddings": most})
    vision = read_vision(whole, spec.hidden_size)
    others = TOWERS[0 if vision is None else 1 + vision.is_whole :]
    unread = [key for key in others if isinstance(whole.get(key), dict)]
    if spec.single_blocks and spec.num_experts and not spec.num_shared_experts:
        unread.append(f"{SHARED[1]} is missing: no shared expert is counted")
    names = (one.name for one in (*spec.outer, *spec.modules) if one.quantizes)
    if (own := spec.checkpoint) and own.word and not any(map(own.of, names)):
        unread.append("quantization_config, whose names no module has: all count in 16 bits")
    pools = POOLING.search((whole.get("architectures") or [""])[0]) is not None
    told = ", ".join(unread)
    return replace(spec, pools=pools, vision=vision, unread=told, config=whole)


def overlaid(model: ModelSpec, keys: Mapping[str, Any] | None, state: str | None) -> ModelSpec:
    """Lay keys over a model's config.json, as vLLM's hf_overrides; ScenarioError if one is wrong.

    What they do not change is left as the model's name has it. Of dtype `state` are its states,
    where one is asked for (mamba_ssm_cache_dtype; "auto": none is).
    """
    if keys:
        try:
            files = (model.config, _laid_over(model.config, keys))
            own, found = (vars(spec_of(model.name, file)) for file in files)
        except ValueError as error:
            raise ScenarioError("engine.hf_overrides", str(error).replace("\n", "; ")) from None
        model = replace(model, **{key: one for key, one in found.items() if own[key] != one})
    if state is None or state == "auto" or model.linear is None:
        return model
    return replace(model, linear=model.linear._replace(state_dtype=state))


def _laid_over(whole: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put keys in the place of others, in blocks one by one (vLLM's _apply_dict_overrides)."""
    if chosen := {"architectures", "model_type"} & overrides.keys():
        raise MappingError(min(chosen), "is not simulated: give a config.json of its own as model")
    keys = {**whole}
    for key, value in overrides.items():
        is_block = key in (*TEXT, *TOWERS) and isinstance(value, Mapping)
        if is_block and isinstance(whole.get(key), Mapping):
            keys[key] = _laid_over(whole[key], value)
        elif is_block and key in TEXT:  # a shipped file may have the keys of this block alone
            keys = _laid_over(keys, value)
        else:
            keys[key] = value
    if "rope_scaling" in overrides:  # whose newer name counts first
        keys["rope_parameters"] = overrides.get("rope_parameters")
    return keys


def _language_model(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model, with those that its family leaves out."""
    inner = next((whole[key] for key in TEXT if isinstance(whole.get(key), Mapping)), None)
    outer = {key: whole[key] for key in OUTER if whole.get(key) is not None}
    raw = whole if inner is None else {**outer, **inner}
    kind = _kind(raw, whole)
    unsaid = TABLE["within"].get(kind, {}) if inner is not None else {}
    keys = {**unsaid, **FAMILIES.get(kind, {}), **raw, "model_type": kind}
    return {key: value for key, value in keys.items() if value is not None}


def _read_beside(path: Path, method: str) -> object:
    """Return what a file of `BESIDE` says of the formats, if it can be understood."""
    found = {"quant_method": method} | _object(path, read_text(path))
    try:
        read_quantization(found)
    except MappingError as error:
        told = (what if key == (BLOCK,) else f"{key[0]}: {what}" for key, what, _ in error.faults)
        raise HeadwayError(f"{path}: {one}" for one in told) from None
    return found


def _object(path: Path, text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        raw = parse_json(text)
    except json.JSONDecodeError as error:
        told = error.msg.removesuffix(" at")
        if not text.strip():
            told = "the file is empty"
        elif text.lstrip().startswith("{") and not text.rstrip().endswith("}"):
            told += "; the file is cut off"
        raise HeadwayError(f"{path}:{error.lineno}: not JSON: {told}") from None
    if not isinstance(raw, dict):
        raise HeadwayError(f"{path}:1: must be a JSON object, not {type(raw).__name__}")
    return raw


def _says_formats(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says of each module what it is in, or that none is quantized."""
    config = _formats(raw)
    mixed = isinstance(config, dict) and config.get("quant_algo") == "MIXED_PRECISION"
    return config is not None and not (mixed and not config.get("quantized_layers"))


def _formats(raw: Mapping[str, Any]) -> Any:
    return next((raw[key] for key in FORMATS if raw.get(key) is not None), None)


def _kind(raw: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the family of a file: its `model_type`, or its architecture where it has none."""
    kinds = [one["model_type"] for one in (raw, whole) if one.get("model_type") is not None]
    if not kinds and isinstance(names := whole.get("architectures"), list) and names:
        word = str(names[0]).partition("For")[0].replace("_", "").lower()
        plain = {name.replace("_", ""): name for name in FAMILIES}
        kinds = [plain.get(word) or plain.get(f"{word}text") or names[0]]
    kind = str(kinds[0]) if kinds else "llama"
    return kind if kind in FAMILIES else kind.removesuffix("_text")


def _line(text: str, key: str) -> str:
    """Find the line of a key."""
    word = f'"{key}"'
    return next((f":{k}" for k, line in enumerate(text.splitlines(), 1) if word in line), "")


def _wrong(raw: Mapping[str, Any]) -> dict[str, str]:
    """Tell what a config lacks and what it has that a ModelSpec does not count."""
    for key, name in TABLE["foreign keys"].items():
        if key in raw:
            return {key: f"the file {FOREIGN[name]}"}
    kind, dtype = raw["model_type"], _dtype(raw)
    if kind not in FAMILIES:
        why = next((why for names, why in TABLE["refused"].items() if kind in names.split()), "")
        there = did_you_mean(kind, FAMILIES) or f"; there is {', '.join(FAMILIES)}"
        what = f"{short_repr(kind)} is not supported{': ' + why if why else there}"
        return {"model_type": what}
    wrong = {
        key: "is missing"
        for key in REQUIRED
        if not any(one in raw for one in SIZES[key])
        and (key != "intermediate_size" or "moe_intermediate_size" not in raw)
    }
    if len(wrong) == len(REQUIRED):
        others = ", ".join(REQUIRED[1:])
        return {REQUIRED[0]: f"is missing, as are {others}: give a model's config.json"}
    experts = any(map(raw.get, SIZES["num_experts"]))
    if not experts and ("moe_intermediate_size" in raw or raw.get("mixture")):
        wrong["num_experts"] = "is missing"
    own = "n_routed_experts" in raw or kind.startswith(("qwen", "gemma"))
    if experts and own and "moe_intermediate_size" not in raw:
        wrong["moe_intermediate_size"] = "is missing"
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        wrong["mlp_only_layers"] = "every layer must have experts, or none"
    if raw.get("word_embed_proj_dim", raw.get("hidden_size")) != raw.get("hidden_size"):
        wrong["word_embed_proj_dim"] = "must be hidden_size"
    if dtype not in BYTES:
        wrong["torch_dtype"] = f"{short_repr(dtype)} is none of {', '.join(BYTES)}"
    return wrong


def _dtype(raw: Mapping[str, Any]) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def _spec(name: str, raw: Mapping[str, Any]) -> ModelSpec:
    """Make the ModelSpec of a config whose keys have values of the right kind."""
    sizes: dict[str, int] = {
        size: next((raw[key] for key in keys if key in raw), 0) for size, keys in SIZES.items()
    }
    sizes["intermediate_size"] = sizes["intermediate_size"] or sizes["expert_intermediate_size"]
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    if not sizes["head_dim"]:
        sizes["head_dim"], over = divmod(sizes["hidden_size"], max(heads, 1))
        if over and "latent_attention" not in raw:
            what = f"{sizes['hidden_size']} is no multiple of {heads} heads"
            raise MappingError("hidden_size", what)
    sizes["rotary_dim"] = sizes["rotary_dim"] or read_rotary(raw, sizes["head_dim"])
    _set_experts(raw, sizes)
    kinds = read_kinds(raw, layers)
    window = read_window(raw, kinds)
    rope_theta, rope_scaling = read_rope(raw)
    shares = raw.get("attention_k_eq_v") and "num_global_key_value_heads" in raw
    return ModelSpec(
        name,
        **sizes,  # type: ignore[arg-type]
        **{name: raw[keys[0]] for name, keys in FLAGS.items() if keys[0] in raw},
        sliding_window=window,
        chunked=window > 0 and "attention_chunk_size" in raw,
        latent=read_latent(raw),
        linear=read_linear(raw, kinds),
        kinds=kinds,
        has_mtp=bool(raw.get("num_nextn_predict_layers")),
        family=raw["model_type"],
        full_kv_heads=size_of(raw, "num_global_key_value_heads") if shares else 0,
        dtype=_dtype(raw),
        checkpoint=read_quantization(_formats(raw)),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )


def _set_experts(raw: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """Put sizes of experts, and of the layers without, under the names of ModelSpec.

    Llama 4's files name the size of an expert `intermediate_size` and count every
    `interleave_moe_layer_step`-th layer; those of Qwen3-Next give the width of what is shared.
    """
    inner, expert_size = sizes["intermediate_size"], sizes.pop("expert_intermediate_size")
    if not sizes["num_experts"]:
        others = ("num_experts_per_tok", "num_shared_experts", "dense_layers")
        sizes.update(dict.fromkeys((*others, "dense_intermediate_size"), 0))
        return
    sizes["intermediate_size"] = expert_size or inner
    key = next((key for key in SHARED if raw.get(key)), None)
    if key is None and raw.get("enable_moe_block"):  # an MLP beside the experts (Gemma 4)
        key = "intermediate_size"
    if key is not None:
        sizes["num_shared_experts"], over = divmod(
            size_of(raw, key), sizes["intermediate_size"] or 1
        )
        if over:
            raise MappingError(key, f"{raw[key]} is no multiple of moe_intermediate_size")
    elif raw.get("shared_expert_gate") or raw["model_type"].endswith(("shared", "hybrid")):
        raise MappingError(SHARED[0], "is missing")
    if "interleave_moe_layer_step" in raw:
        layers = sizes["num_hidden_layers"]
        sizes["dense_layers"] = layers - layers // size_of(raw, "interleave_moe_layer_step")
    given = sizes["dense_intermediate_size"]
    sizes["dense_intermediate_size"] = (given or inner) if sizes["dense_layers"] else 0
