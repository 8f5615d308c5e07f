"""How a checkpoint's numbers lie in memory, module by module: `quantization_config`.

Also what `hf_quant_config.json` of ModelOpt says. The first of `Quantization.rules` that a module's
name matches decides; modules in `ignored`, and what no rule matches, stay in 16 bits. Names are
compared without the parts that wrap a language model (`model.`, `language_model.`), by whole parts
between dots: `gate` is the router, not `gate_proj`.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import cache
from math import ceil
from typing import Any, NamedTuple

from simulator.util.from_mapping import short_repr

WRAPPERS = re.compile(r"^(?:(?:model|language_model|text_model|backbone)\.)+")
HEADS = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
SPELLINGS = (
    (r"\b[qkv]_proj$", "qkv_proj"),
    (r"\b(gate|up)_proj$", "gate_up_proj"),
    (r"\bmlp\b", "block_sparse_moe"),
    (r"\bmlp\b", "feed_forward"),
    (r"\b(mlp|self_attn)\b", "mixer"),
    (r"\bshared_experts\b", "shared_expert"),
)
"""What some files call a module of ours: kinds that they name together, or another family's."""


class Format(NamedTuple):
    """Numbers of some bits with scales: one for `rows` x `group` numbers (0: for a whole row)."""

    word: str  # for kernels: fp8, int8, int4, nvfp4, mxfp4; "": 16 bits
    bits: float
    scale: float = 0.0  # bytes, with the zero point
    group: int = 0
    rows: int = 1

    def bytes_of(self, outputs: float, inputs: float) -> float:
        """Bytes of a matrix of so many rows and columns."""
        groups = ceil(inputs / self.group) if self.group else 1
        return outputs * inputs * self.bits / 8 + ceil(outputs / self.rows) * groups * self.scale


FORMATS = {
    "fp8": Format("fp8", 8, 4, 0),
    "int8": Format("int8", 8, 4, 0),
    "int4": Format("int4", 4, 2.5, 128),
    "nvfp4": Format("nvfp4", 4, 1, 16),
    "mxfp4": Format("mxfp4", 4, 1, 32),
}
"""Of each of Headway's words, where no file says more: scales of outputs in 32 bits; groups of 128
with a scale in 16 bits and a zero point in 4; blocks of 16 and 32 with a scale in 8 bits."""


class Rule(NamedTuple):
    """What modules of some names lie in; no names: all. `format` None: in 16 bits."""

    names: tuple[str, ...]
    format: Format | None


class Quantization(NamedTuple):
    """A checkpoint's formats."""

    word: str  # what most of its matrices are, or its experts alone (mxfp4)
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()
    cache: str = ""  # dtype of the KV cache where --kv-cache-dtype is auto; "": that of the rest
    unsaid: str = ""  # what the file does not tell

    def of(self, name: str, expert: bool = False) -> Format | None:
        """Find the format of the module of a checkpoint's name; None: 16 bits."""
        if _matches(self.ignored, name):
            return None
        if not self.rules:
            alone = self.word == "mxfp4" and not expert
            return None if alone or name == "lm_head" else FORMATS[self.word]
        for names, found in self.rules:
            if not names or _matches(names, name):
                return found if names or name != "lm_head" else None
        return None


@cache
def _patterns(names: tuple[str, ...]) -> tuple[frozenset[str], "re.Pattern[str] | None"]:
    """Sort names into plain ones and a pattern of all that have regular expressions or stars."""
    plain: set[str] = set()
    patterns: list[str] = []
    for one in names:
        if one.startswith("re:"):
            patterns.append(one[3:])
        elif "*" in one:
            patterns += [translate(one), translate(WRAPPERS.sub("", one))]
        else:
            plain.add(WRAPPERS.sub("", one).strip("."))
    together = re.compile("|".join(f"(?:{one})" for one in patterns)) if patterns else None
    return frozenset(plain), together


def _matches(names: tuple[str, ...], name: str) -> bool:
    """Whether one of the names in a file means the module: all of it or what it is part of."""
    plain, pattern = _patterns(names)
    spellings = [name, *(re.sub(ours, theirs, name) for ours, theirs in SPELLINGS)]
    for one in dict.fromkeys(spellings):
        parts = one.split(".")
        runs = (
            ".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1)
        )
        if plain and not plain.isdisjoint(runs):
            return True
        if pattern and any(pattern.match(head + one) for head in HEADS):
            return True
    return False


def read_quantization(config: object) -> Quantization | None:
    """Read a `quantization_config`, or the `quantization` of ModelOpt's file; None: there is none.

    Raises ValueError, `quantization_config: what is wrong`, for a method that is not known.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config: must be a mapping, not {config!r}")
    method = str(config.get("quant_method", "modelopt" if "quant_algo" in config else None))
    method = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt"}.get(method, method)
    if method not in READERS:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not known; there are "
            f"{', '.join(READERS)}. Without this key, engine.quantization says what the weights are"
        )
    found = READERS[method](config)
    try:
        for names in (found.ignored, *(rule.names for rule in found.rules)):
            _patterns(names)
    except re.error as error:
        raise ValueError(
            f"quantization_config: {short_repr(error.pattern)} is no regular expression: {error}"
        ) from None
    return found


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    found = next((config[key] for key in keys if config.get(key)), ())
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ValueError(f"quantization_config: {keys[0]} must be a list, not {short_repr(found)}")
    return tuple(map(str, found))


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"quantization_config: {key} must be a mapping, not {short_repr(found)}")
    return found


def _whole(config: Mapping[str, Any], key: str, default: int) -> int:
    found = default if config.get(key) is None else config[key]
    if isinstance(found, bool) or not isinstance(found, int):
        what = f"must be a whole number, not {short_repr(found)}"
        raise ValueError(f"quantization_config: {key} {what}")
    return found


def _fp8_of(config: Mapping[str, Any], key: str) -> Format:
    """Return the format of 8 bits: by blocks of the rows and columns at a key, else by rows."""
    block = config.get(key)
    if block is None:
        return FORMATS["fp8"]
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Format("fp8", 8, 4, columns, rows)
    what = f"must be two positive whole numbers, not {short_repr(block)}"
    raise ValueError(f"quantization_config: {key} {what}")


def _fp8(config: Mapping[str, Any]) -> Quantization:
    found = _fp8_of(config, "weight_block_size")
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", (Rule((), found),), ignored)


def _grouped(config: Mapping[str, Any]) -> Quantization:
    """Read AWQ's and GPTQ's: scales in 16 bits, zero points as wide as the weights."""
    bits, size = config.get("bits", config.get("w_bit")), _whole(config, "group_size", 128)
    found = _integers(bits, size, True)
    rules: list[Rule] = []
    dynamic = _mapping(config, "dynamic")
    for name in dynamic:
        own = None
        if not name.startswith("-:"):
            change = _mapping(dynamic, name)
            own = _integers(change.get("bits", bits), _whole(change, "group_size", size), True)
        rules.append(Rule((f"re:{name[2:] if name[:2] in ('-:', '+:') else name}",), own))
    head = (Rule(("lm_head",), found),) if config.get("lm_head") else ()
    ignored = _names(config, "modules_to_not_convert")
    return Quantization(found.word, (*rules, *head, Rule((), found)), ignored)


def _integers(bits: object, group: int, zeros: bool) -> Format:
    if not isinstance(bits, int) or bits not in (4, 8):
        told = short_repr(bits)
        raise ValueError(f"quantization_config: weights of {told} bits are not supported")
    return Format(f"int{bits}", bits, 2 + zeros * bits / 8, max(group, 0))


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", (), _names(config, "modules_to_not_convert"))


def _bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    """Read bitsandbytes': 4 bits with a scale of 32 bits for 64, which vLLM keeps unpacked."""
    eight = config.get("load_in_8bit") and not config.get("load_in_4bit")
    found = FORMATS["int8"] if eight else Format("int4", 4, 4, 64)
    return Quantization(found.word, (Rule((), found),), _names(config, "llm_int8_skip_modules"))


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    """Read ModelOpt's, as config.json or hf_quant_config.json has it."""
    ignored = _names(config, "exclude_modules", "ignore")
    cached = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    dtype = "fp8" if cached else ""
    algorithm = str(config.get("quant_algo", ""))
    if algorithm == "MIXED_PRECISION":
        layers = _mapping(config, "quantized_layers")
        formats = {name: _algorithm(_mapping(layers, name)) for name in layers}
        rules = tuple(
            Rule(tuple(name for name, own in formats.items() if own == found), found)
            for found in dict.fromkeys(formats.values())
        )
        most = max(rules, key=lambda rule: len(rule.names), default=None)
        if most is None or most.format is None:
            unsaid = "quantized_layers is empty: which of its modules are quantized is not said"
            return Quantization("", (), (), dtype, unsaid)
        return Quantization(most.format.word, rules, ignored, dtype)
    if not algorithm and config.get("config_groups"):
        return _compressed(config)._replace(cache=dtype)
    found = _algorithm(config)
    return Quantization(found.word, (Rule((), found),), ignored, dtype)


def _algorithm(config: Mapping[str, Any]) -> Format:
    name = str(config.get("quant_algo") or "")
    if "FP4" in name:
        return Format("nvfp4", 4, 1, _whole(config, "group_size", 16))
    if name in ("W4A16_AWQ", "W4A8_AWQ"):
        return Format("int4", 4, 2, _whole(config, "group_size", 128))
    if name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", ""):
        return FORMATS["fp8"]
    if name in ("FP8_PB_WO", "FP8_PB_REAL"):
        return Format("fp8", 8, 4, 128, 128)
    if name in ("INT8_SQ", "W8A16", "INT8"):
        return FORMATS["int8"]
    raise ValueError(f"quantization_config: quant_algo {name!r} is not known")


def _compressed(config: Mapping[str, Any]) -> Quantization:
    """Read compressed-tensors': groups of modules by class, name or pattern."""
    groups = _mapping(config, "config_groups")
    rules = []
    for key in groups:
        group = _mapping(groups, key)
        if not (weights := _mapping(group, "weights")):
            continue
        targets = _names(group, "targets")
        named = tuple(name for name in targets if name not in ("Linear", "RowParallelLinear"))
        rules.append(Rule(named if len(named) == len(targets) else (), _weights(weights)))
    if not rules:
        raise ValueError("quantization_config: weights of None bits are not supported")
    rules.sort(key=lambda rule: not rule.names)
    cached = config.get("kv_cache_scheme")
    dtype = "fp8" if isinstance(cached, Mapping) and cached.get("type") == "float" else ""
    widest = rules[-1].format
    assert widest is not None
    return Quantization(widest.word, tuple(rules), _names(config, "ignore"), dtype)


def _weights(weights: Mapping[str, Any]) -> Format:
    bits, group = weights.get("num_bits", weights.get("bits")), _whole(weights, "group_size", 0)
    if weights.get("type") == "float":
        if bits == 4:
            return FORMATS["mxfp4" if group == 32 else "nvfp4"]
        if bits == 8:
            return _fp8_of(weights, "block_structure")
    if bits == 8 and group <= 0:
        return FORMATS["int8"]
    return _integers(bits, group, weights.get("symmetric") is False)


READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _grouped,
    "gptq": _grouped,
    "mxfp4": _mxfp4,
    "gpt_oss_mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
"""Readers of each `quant_method`; modelopt_fp4 and modelopt_mixed are modelopt's."""
