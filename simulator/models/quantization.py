"""How a checkpoint's numbers lie in memory, module by module: `quantization_config`.

Also what `hf_quant_config.json` of ModelOpt says. The first of `Quantization.rules` that a module's
name matches decides; modules in `ignored`, and what no rule matches, stay in 16 bits. Names are
compared without the parts that wrap a language model (`model.`, `language_model.`), by whole parts
between dots: `gate` is the router, not `gate_proj`.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import cache
from math import ceil
from typing import Any, NamedTuple

from simulator.models.config_keys import wrong_kinds
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

    Raises ValueError, a line `key: what is wrong` for each fault.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config: must be a mapping, not {short_repr(config)}")
    if wrong := [*wrong_kinds(config)]:
        raise ValueError("\n".join(wrong))
    method = str(config.get("quant_method", "modelopt" if "quant_algo" in config else None))
    if (reader := READERS.get(method)) is None:
        raise ValueError(
            f"quantization_config: quant_method {method!r} is not known; there are "
            f"{', '.join(READERS)}. Without this key, engine.quantization says what the weights are"
        )
    found = reader(config)
    try:
        for names in (found.ignored, *(rule.names for rule in found.rules)):
            _patterns(names)
    except re.error as error:
        raise ValueError(
            f"quantization_config: {short_repr(error.pattern)} is no regular expression: {error}"
        ) from None
    return found


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return the names at the first of these keys that has some."""
    return tuple(next((config[key] for key in keys if config.get(key)), ()))


def _fp8_of(block: Sequence[int] | None) -> Format:
    """Return the format of 8 bits: by blocks of rows and columns, else by rows."""
    return Format("fp8", 8, 4, block[1], block[0]) if block else FORMATS["fp8"]


def _fp8(config: Mapping[str, Any]) -> Quantization:
    found = _fp8_of(config.get("weight_block_size"))
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", (Rule((), found),), ignored)


def _grouped(config: Mapping[str, Any]) -> Quantization:
    """Read AWQ's, GPTQ's and AutoRound's: scales in 16 bits, zero points as wide as the weights.

    `dynamic` and `extra_config` have other formats for modules of some names, or none.
    """
    usual = {"bits": config.get("w_bit"), "group_size": 128} | _given(config)
    found = _integers(usual["bits"], usual["group_size"], True)
    rules: list[Rule] = []
    for key in ("dynamic", "extra_config"):
        changes = config.get(key) or {}
        if not isinstance(changes, Mapping) or not all(map(_is_mapping, changes.values())):
            raise ValueError(f"{key}: must be a mapping of mappings, not {short_repr(changes)}")
        for name, change in changes.items():
            own = usual | _given(change)
            whole = name.startswith("-:") or own["bits"] == 16
            plain = name[2:] if name[:2] in ("-:", "+:") else name
            pattern = f"re:{plain}" if key == "dynamic" or "*" in name else plain
            own_format = None if whole else _integers(own["bits"], own["group_size"], True)
            rules.append(Rule((pattern,), own_format))
    head = (Rule(("lm_head",), found),) if config.get("lm_head") is True else ()
    ignored = _names(config, "modules_to_not_convert")
    return Quantization(found.word, (*rules, *head, Rule((), found)), ignored)


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bits", "group_size") if config.get(key) is not None}


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _integers(bits: object, group: int | None, zeros: bool) -> Format:
    if not isinstance(bits, int) or bits not in (4, 8):
        told = short_repr(bits)
        raise ValueError(f"quantization_config: weights of {told} bits are not supported")
    return Format(f"int{bits}", bits, 2 + zeros * bits / 8, max(group or 0, 0))


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
    dtype = "nvfp4" if "FP4" in str(cached) else "fp8" if cached else ""
    algorithm = str(config.get("quant_algo") or "")
    if algorithm == "MIXED_PRECISION":
        layers = config.get("quantized_layers") or {}
        formats = {name: _algorithm(layer) for name, layer in layers.items()}
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


ALGORITHMS = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", ""), FORMATS["fp8"]),
    **dict.fromkeys(("FP8_PB_WO", "FP8_PB_REAL"), Format("fp8", 8, 4, 128, 128)),
    **dict.fromkeys(("INT8_SQ", "W8A16", "INT8"), FORMATS["int8"]),
    "NVFP4": FORMATS["nvfp4"],
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ"), Format("int4", 4, 2, 128)),
    "MXFP8": Format("fp8", 8, 1, 32),
}
"""Of ModelOpt, `quant_algo`."""


def _algorithm(config: Mapping[str, Any]) -> Format:
    name, group = str(config.get("quant_algo") or ""), config.get("group_size")
    found = ALGORITHMS.get("NVFP4" if "FP4" in name else name)
    if found is None:
        raise ValueError(f"quantization_config: quant_algo {name!r} is not known")
    return found._replace(group=group) if group and found.bits == 4 else found


def _compressed(config: Mapping[str, Any]) -> Quantization:
    """Read compressed-tensors': groups of modules by class, name or pattern."""
    rules = []
    for group in (config.get("config_groups") or {}).values():
        if not isinstance(weights := group.get("weights"), Mapping):
            continue
        targets = _names(group, "targets")
        named = tuple(name for name in targets if name not in ("Linear", "RowParallelLinear"))
        rules.append(Rule(named if len(named) == len(targets) else (), _weights(weights)))
    if not rules:
        raise ValueError("quantization_config: weights of None bits are not supported")
    rules.sort(key=lambda rule: not rule.names)
    dtype = "fp8" if (config.get("kv_cache_scheme") or {}).get("type") == "float" else ""
    widest = rules[-1].format
    assert widest is not None
    return Quantization(widest.word, tuple(rules), _names(config, "ignore"), dtype)


def _weights(weights: Mapping[str, Any]) -> Format:
    bits, group = weights.get("num_bits", weights.get("bits")), weights.get("group_size") or 0
    if weights.get("type") == "float":
        if bits == 4:
            return FORMATS["mxfp4" if group == 32 else "nvfp4"]
        if bits == 8:
            return _fp8_of(weights.get("block_structure"))
    if bits == 8 and group <= 0:
        return FORMATS["int8"]
    return _integers(bits, group, weights.get("symmetric") is False)


QUARK = {"fp8_e4m3": "fp8", "fp4": "mxfp4", "int8": "int8", "int4": "int4", "uint4": "int4"}
"""Of AMD Quark, the `dtype` of weights."""


def _quark(config: Mapping[str, Any]) -> Quantization:
    """Read Quark's: one format, and others for modules of some names."""

    def format_of(block: Any) -> Format:
        weight = block.get("weight") if isinstance(block, Mapping) else None
        dtype = str(weight.get("dtype")) if isinstance(weight, Mapping) else "null"
        if dtype not in QUARK:
            raise ValueError(f"quantization_config: weights of Quark's {dtype!r} are not supported")
        return FORMATS[QUARK[dtype]]

    found = format_of(config.get("global_quant_config"))
    named = (config.get("layer_quant_config") or {}).items()
    rules = (*(Rule((name,), format_of(one)) for name, one in named), Rule((), found))
    cached = (config.get("export") or {}).get("kv_cache_group")
    return Quantization(found.word, rules, _names(config, "exclude"), "fp8" if cached else "")


READERS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8"), _fp8),
    "compressed-tensors": _compressed,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt),
    **dict.fromkeys(("awq", "gptq", "auto-round"), _grouped),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), _mxfp4),
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
}
"""Readers of each `quant_method`."""
