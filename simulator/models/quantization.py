"""How a checkpoint's numbers lie in memory, module by module: `quantization_config`.

Also what files beside config.json say (ModelOpt's, old AutoGPTQ's and AutoAWQ's). The first of
`Quantization.rules` that a module's name matches decides; what no rule matches stays in 16 bits,
and `lm_head` where none names it. Names are compared without the parts that wrap a language model
(`model.`, `language_model.`), by whole parts between dots: `gate` is the router, not `gate_proj`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from simulator.models.config_keys import keys_of, wrong_kinds
from simulator.util.errors import MappingError
from simulator.util.from_mapping import short_repr

WRAPPERS = re.compile(r"^(?:(?:model|language_model|text_model|backbone)\.)+")
HEADS = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
# Keys of the modules left in 16 bits, by method; the first that has some counts.
IGNORED = keys_of("names")["ignored"]


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


BLOCK = "quantization_config"
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("formats.json").read_text("utf-8"))
FORMATS = {name: Format(**row) for name, row in TABLE["formats"].items()}
DEFAULTS = ("fp8", "int8", "int4", "nvfp4", "mxfp4", "bitsandbytes")
"""Of Headway's words, where no file says more."""


WHOLE = ("fp8", "fbgemm_fp8")
"""Methods whose ignored names vLLM 0.32 compares whole (is_layer_skipped)."""


class Rule(NamedTuple):
    """What modules of some names lie in; no names: all others. `format` None: in 16 bits."""

    names: tuple[str, ...]
    format: Format | None
    whole: bool = False  # the names are modules', not also those of what has modules


class Quantization(NamedTuple):
    """A checkpoint's formats; the last rule is that of most matrices, or of the experts (mxfp4)."""

    rules: tuple[Rule, ...]
    cache: str = ""  # dtype of the KV cache where --kv-cache-dtype is auto; "": that of the rest
    method: str = ""  # quant_method

    @property
    def word(self) -> str:
        """What most of its matrices are; "": the file does not say which modules are quantized."""
        most = self.rules[-1].format if self.rules else None
        return most.word if most else ""

    def of(self, name: str) -> Format | None:
        """Find the format of the module of a checkpoint's name; None: 16 bits."""
        for names, found, whole in self.rules:
            if _matches(names, name, whole) if names else name != "lm_head":
                return found
        return None


@cache
def in_one_format(word: str) -> Quantization:
    """Return the formats of a checkpoint that is wholly in one of `FORMATS`; mxfp4: the experts."""
    return Quantization((Rule(("experts",) if word == "mxfp4" else (), FORMATS[word]),))


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


@cache
def _spellings(name: str) -> tuple[str, ...]:
    """Return the names that checkpoints give to a module."""
    others = (re.sub(ours, to, name) for ours, to in TABLE["spellings"])
    return tuple(dict.fromkeys([name, *others]))


def _matches(names: tuple[str, ...], name: str, whole: bool) -> bool:
    """Whether one of the names in a file means the module: all of it or what it is part of.

    Where names are `whole`, a module of experts is meant with all of them alone.
    """
    plain, pattern = _patterns(names)
    for one in _spellings(name):
        parts, some = one.split("."), {one, one.partition(".experts.")[0] + ".experts"}
        if not whole:
            ends = range(1, len(parts) + 1)
            some = {".".join(parts[a:b]) for b in ends for a in range(b)}
        if some & plain or (pattern and any(pattern.match(head + one) for head in HEADS)):
            return True
    return False


def read_quantization(config: object) -> Quantization | None:
    """Read a `quantization_config`, or the `quantization` of ModelOpt's file; None: there is none.

    Raises MappingError, by the keys that are wrong.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise MappingError(BLOCK, f"must be a mapping, not {short_repr(config)}")
    if wrong := dict(wrong_kinds(config)):
        raise MappingError.of(wrong)
    if isinstance(own := config.get("quantization"), Mapping):  # ModelOpt's file, as it is
        config = {"quant_method": "modelopt", **own}
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else "")
    method = str(method).lower().replace("compressed_", "compressed-")  # as vLLM
    if (reader := READERS.get(method)) is None:
        what = f"quant_method {method!r} is not known; there are {', '.join(READERS)}. Without "
        raise MappingError(BLOCK, f"{what}this key, engine.quantization says what the weights are")
    rules = tuple(reader(config))
    if rules and (ignored := next((config[key] for key in IGNORED if config.get(key)), ())):
        rules = (Rule(tuple(ignored), None, method in WHOLE), *rules)
    try:
        for rule in rules:
            _patterns(rule.names)
    except re.error as error:
        raise MappingError(
            BLOCK, f"{short_repr(error.pattern)} is no regular expression: {error}"
        ) from None
    return Quantization(rules, _cache(config), method)


def _cache(config: Mapping[str, Any]) -> str:
    """Return the dtype that a checkpoint has scales of its KV cache for; "": none."""
    groups = (config.get("export") or {}).get("kv_cache_group")  # Quark's
    algorithm = str(config.get("kv_cache_quant_algo")).upper()  # ModelOpt's; NONE is one
    scheme = config.get("kv_cache_scheme")  # AutoFP8's: a word
    if "FP4" in algorithm:
        return "nvfp4"
    floats = isinstance(scheme, Mapping) and scheme and scheme.get("type", "float") == "float"
    return "fp8" if groups or floats or "FP8" in algorithm else ""


def _fp8_of(block: Sequence[int] | None) -> Format:
    """Return the format of 8 bits: by blocks of rows and columns, else by rows."""
    return Format("fp8", 8, 4, block[1], block[0]) if block else FORMATS["fp8"]


def _grouped(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Read AWQ's, GPTQ's and AutoRound's: scales in 16 bits, zero points as wide as the weights.

    `dynamic` and `extra_config` have other formats for modules of some names, or none; where keys
    of `ONLY` name some, no others are quantized.
    """
    keys = ("bits", "group_size", "data_type")
    usual: dict[str, Any] = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
    usual |= {key: config[key] for key in keys if config.get(key) is not None}
    if usual["group_size"] is None:  # vLLM: "Cannot find any of ['q_group_size', 'group_size']"
        raise MappingError(BLOCK, "group_size is missing")
    found = _rounded(**usual)
    for key in ("dynamic", "extra_config"):
        changes = config.get(key)
        for name, change in changes.items() if isinstance(changes, Mapping) else ():
            own = usual | {one: change[one] for one in keys if change.get(one) is not None}
            whole = name.startswith("-:") or own["bits"] == 16
            plain = name[2:] if name[:2] in ("-:", "+:") else name
            pattern = f"re:{plain}" if key == "dynamic" or "*" in name else plain
            yield Rule((pattern,), None if whole else _rounded(**own))
    if config.get("lm_head") is True:
        yield Rule(("lm_head",), found)
    told = [(how, re.findall(r"[\w.]+", str(config.get(key) or ""))) for key, how in ONLY.items()]
    yield Rule(tuple(how + name for how, names in told for name in names), found)


ONLY = {"block_name_to_quantize": "re:", "to_quant_block_names": "re:"}  # beginnings of names
ONLY |= {"modules_in_block_to_quantize": ""}


def _rounded(bits: Any, group_size: int, data_type: object = "int") -> Format:
    """Return the format of a `data_type` of AutoRound's, of which AWQ and GPTQ have integers."""
    if data_type == "int":
        return _integers(bits, group_size, True)
    word = TABLE["mx_fp"].get(str(bits)) if "mx_fp" in str(data_type) else None
    if word is None:
        raise MappingError(BLOCK, f"{data_type} of {bits} bits is not supported")
    return FORMATS[word]


def _integers(bits: object, group: int | None, zeros: bool) -> Format:
    if not isinstance(bits, int) or bits not in (4, 8):
        raise MappingError(BLOCK, f"weights of {short_repr(bits)} bits are not supported")
    return Format(f"int{bits}", bits, 2 + zeros * bits / 8, max(group or 0, 0))


def _modelopt(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Read ModelOpt's, as config.json or hf_quant_config.json has it."""
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        names: dict[Format | None, list[str]] = {}
        for name, layer in (config.get("quantized_layers") or {}).items():
            names.setdefault(_algorithm(layer), []).append(name)
        for found in sorted(names, key=lambda one: len(names[one])):
            yield Rule(tuple(names[found]), found)
    elif not algorithm and config.get("config_groups"):
        yield from _compressed(config)
    else:
        yield Rule((), _algorithm(config))


def _algorithm(config: Mapping[str, Any]) -> Format | None:
    """Return the format of an algorithm's weights; None: they are in 16 bits, the cache is not."""
    name, group = str(config.get("quant_algo") or "").upper(), config.get("group_size")
    if not name and config.get("kv_cache_quant_algo"):
        return None
    word = TABLE["modelopt"].get(re.sub(".*((NV|MX)FP4).*", r"\1", name))
    if word is None:
        raise MappingError(BLOCK, f"quant_algo {name!r} is not known")
    found = FORMATS[word]
    return found._replace(group=max(group, 0)) if group and found.bits == 4 else found


def _compressed(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Read compressed-tensors': groups of modules by name or pattern, then those by class."""
    if "2:4" in str(config.get("sparsity_config")) or config.get("format") == "marlin-24":
        raise MappingError(BLOCK, "weights of which 2 of 4 are 0 are not supported")
    rules = []
    for group in (config.get("config_groups") or {}).values():
        targets = group.get("targets") or ()
        names = () if CLASSES.intersection(targets) else tuple(targets)
        if weights := group.get("weights"):
            rules.append(Rule(names, _weights(weights)))
    if not rules and not config.get("kv_cache_scheme"):
        raise MappingError(BLOCK, "weights of None bits are not supported")
    yield from sorted(rules or [Rule((), None)], key=lambda rule: not rule.names)


CLASSES = {"Linear", "RowParallelLinear"}


def _weights(weights: Mapping[str, Any]) -> Format:
    bits, group = weights.get("num_bits", weights.get("bits")), weights.get("group_size") or 0
    if weights.get("type") == "float":
        if bits == 4:
            return FORMATS["mxfp4" if group == 32 else "nvfp4"]
        if bits == 8:
            return FORMATS["mxfp8"] if group == 32 else _fp8_of(weights.get("block_structure"))
    if bits == 8 and group <= 0:
        return FORMATS["int8"]
    return _integers(bits, group, weights.get("symmetric") is False)


def _quark(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Read Quark's: one format, and others for modules of some names."""
    named = [((name,), one) for name, one in (config.get("layer_quant_config") or {}).items()]
    for names, block in [*named, ((), config.get("global_quant_config") or {})]:
        dtype = str((block.get("weight") or {}).get("dtype", "null"))
        if dtype not in TABLE["quark"]:
            raise MappingError(BLOCK, f"weights of Quark's {dtype!r} are not supported")
        yield Rule(names, FORMATS[TABLE["quark"][dtype]])


def _bitsandbytes(config: Mapping[str, Any]) -> Iterable[Rule]:
    """Read 8 bits, or 4 with a scale of 32 bits for 64, which vLLM keeps unpacked.

    As BitsAndBytesConfig (vLLM 0.11): where no key is there, 4 bits; 8 before 4.
    """
    eight = config.get("load_in_8bit")
    if not eight and config.get("load_in_4bit") is False:
        raise MappingError(BLOCK, "one of load_in_4bit and load_in_8bit must be true")
    return in_one_format("int8" if eight else "bitsandbytes").rules


# Readers of the rules of each `quant_method`, the one of most modules last.
READERS: dict[str, Callable[[Mapping[str, Any]], Iterable[Rule]]] = {
    **dict.fromkeys(
        ("fp8", "fbgemm_fp8"), lambda one: (Rule((), _fp8_of(one.get("weight_block_size"))),)
    ),
    "compressed-tensors": _compressed,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), _modelopt),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), _grouped),
    **dict.fromkeys(("auto-round", "intel/auto-round"), _grouped),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), lambda _: in_one_format("mxfp4").rules),
    "bitsandbytes": _bitsandbytes,
    "quark": _quark,
}
