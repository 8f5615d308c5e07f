"""What becomes of each field of an engine's configuration: `fields.csv`.

`effect` is the key of a scenario that has it; or `none`: neither time nor decisions depend on it;
`told`: steps would take another time, which is not simulated; `refused`: decisions or memory would
differ. Releases are those of vLLM from 0.10 on; fields of SGLang are those of 0.5.23,
of TensorRT-LLM those of `TorchLlmArgs` in its source of 2026.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from simulator.schedulers.vllm.rules import Release, write_release
from simulator.util.files import read_table

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
NOWHERE = ("none", "told", "refused")
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class EngineField(NamedTuple):
    """A row of the table."""

    engine: str
    config: str  # the class that has it
    field: str
    options: str  # of the command line, the long one first; "": none
    kind: str  # flag, whole, number, size, text, list, json or pairs; "": nobody sets it
    default: str  # JSON; "": none
    since: str
    until: str
    effect: str
    note: str

    def is_in(self, release: Release) -> bool:
        """Say whether a release of vLLM has it."""
        last = read_since(self.until) or release
        return read_since(self.since) <= release and release[: len(last)] <= last

    def why_not_in(self, release: Release) -> str:
        """Say that a release does not have it, and which do."""
        came = read_since(self.since) > release
        what = f"came with {self.since}" if came else f"went after {self.until}"
        return f"vLLM {write_release(release)} has no such option: it {what}"


def read_since(text: str) -> tuple[int, ...]:
    """Read a release as the tables have it; (): none."""
    return tuple(map(int, text.split("."))) if text else ()


@cache
def fields() -> list[EngineField]:
    """Return all rows."""
    return [EngineField(**row) for row in read_table(__file__, "fields.csv")]


@cache
def by_option(engine: str) -> dict[str, EngineField]:
    """Return the rows of an engine by each of their options."""
    rows = [row for row in fields() if row.engine == engine]
    return {option: row for row in rows for option in row.options.split()}


@cache
def of_config(engine: str, config: str) -> dict[str, EngineField]:
    """Return the rows of a class by the names of its fields."""
    return {row.field: row for row in fields() if (row.engine, row.config) == (engine, config)}


def option_of(engine: str, key: str) -> str:
    """Return the option of an engine's command that is a key of a scenario's engine; "": none."""
    rows = (row for row in fields() if row.engine == engine and row.options)
    named = (row.options.split()[0] for row in rows if row.effect == f"engine.{key}")
    return next(named, "")


def same_option(engine: str, name: str) -> str:
    """Return the option of an engine that is the same key as one of another's; "": none."""
    keys = (row.effect.removeprefix("engine.") for row in fields() if name in row.options.split())
    return next(filter(None, (option_of(engine, key) for key in keys)), "")


def why_unknown(field: str) -> str:
    """Say why an engine's option is no key of a scenario, or which key it is; "": neither."""
    row = next((row for row in fields() if row.field == field and row.options), None)
    if row is None:
        return ""
    what = f"{NAMES[row.engine]}'s name of {row.effect.removeprefix('engine.')}"
    if row.effect in NOWHERE:
        what = "has no effect" if row.effect == "none" else "is not simulated"
    return f"{what}: {row.note}".removesuffix(": ")


class _SuffixError(ValueError):
    """A number has a decimal before a suffix that is binary."""


def read_size(text: str) -> int:
    """Read a number as vLLM's `human_readable_int`: 1k is 1000, 1K is 1024; ValueError if not."""
    text = text.strip()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
        number, suffix = match.groups()
        if suffix in SUFFIXES:
            return int(float(number) * SUFFIXES[suffix])
        if "." in number:
            raise _SuffixError(f"has a decimal before {suffix}, which is binary: {suffix.lower()}?")
        return int(number) * BINARY[suffix]
    return int(text)


def read_value(row: EngineField, text: str) -> Any:
    """Read a value as the engine does; ValueError says what it must be."""
    if text in ("", "None") and row.engine == "vllm":
        return None
    if row.kind == "size or auto" and text.lower() in ("auto", "-1"):
        return "auto"
    read, what = READERS.get(row.kind.split()[0] if row.kind else "", (str, ""))
    try:
        return read(text)
    except _SuffixError:
        raise
    except ValueError:
        raise ValueError(f"must be {what}, not {text!r}") from None


def _read_json(text: str) -> Any:
    """Read JSON in which 80m, not in quotes, is a number."""
    plain = r'("(?:[^"\\]|\\.)*")|\b\d+(?:\.\d+)?[kKmMgGtT]\b'
    return json.loads(re.sub(plain, lambda found: found[1] or str(read_size(found[0])), text))


def _read_pairs(text: str) -> Any:
    """Read JSON, or vLLM's form before 0.10: image=4,video=0."""
    pairs = (pair.lower().split("=") for pair in text.split(","))
    return {key.strip(): int(n) for key, n in pairs} if "=" in text else _read_json(text)


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "whole": (int, "a whole number"),
    "number": (float, "a number"),
    "size": (read_size, "a number, as 4096, 64k or 1M"),
    "json": (_read_json, "JSON"),
    "pairs": (_read_pairs, 'JSON, as {"image": 4} (before vLLM 0.10 also image=4,video=0)'),
}
"""What reads each kind of value, and what it must be."""
