"""Read the options of a command as the engine's own parser does."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from simulator.launch.fields import EngineField, by_option, read_size, read_value, same_option
from simulator.launch.words import Command, option_words
from simulator.schedulers.vllm.rules import Release
from simulator.util.errors import HeadwayError, did_you_mean, one_line
from simulator.util.yaml_lines import Block, read_text

SPEC = {
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
"""Options of vLLM that are keys of --speculative-config."""
PAIRS = {"--enable": "--disable", "--disable": "--enable"}
PAIRED_SINCE = "0.33"
"""From then on vLLM takes `--disable-x` for `--no-enable-x`, and the other way round."""
NESTED = ("kv_cache_config", "scheduler_config")
"""Blocks of TensorRT-LLM's YAML."""


class Option(NamedTuple):
    """An option that is given."""

    row: EngineField
    text: str  # as it was written
    value: Any

    @property
    def written(self) -> EngineField:
        """The row of the option as it was written, which may be a key of another's value."""
        return by_option(self.row.engine).get(self.text.split()[0], self.row)

    def is_in(self, release: Release) -> bool:
        """Say whether a release of vLLM has it as it was written."""
        row = self.row if self.row.since == PAIRED_SINCE else self.written
        return row.is_in(release) or self.written.is_in(release)

    @property
    def is_default(self) -> bool:
        """Whether it says what holds without it."""
        return bool(self.value == json.loads(self.row.default or "null"))


def read_options(command: Command) -> tuple[list[str], list[Option]]:
    """Return the models that a command names, and its options: of one given twice the last.

    HeadwayError has all that is wrong.
    """
    words = _with_files(command)
    models: list[str] = []
    found: dict[tuple[str, str], Option] = {}
    wrong: list[str] = []
    at = 0
    while at < len(words):
        if not words[at].startswith("-"):
            models.append(words[at])
            at += 1
            continue
        try:
            option, at = _read_option(command, words, at, found)
            found[option.row.config, option.row.field] = option
        except ValueError as error:
            wrong.append(f"--command: {error}")
            at += 1 + _count_values(words, at + 1, 1)
    if wrong:
        raise HeadwayError(wrong)
    return models, [*found.values()]


def _read_option(
    command: Command, words: list[str], at: int, found: dict[tuple[str, str], Option]
) -> tuple[Option, int]:
    """Read the option at a place, and say where the next one is; ValueError if it is wrong."""
    given, equals, text = words[at].partition("=")
    name, keys = _spelled(command.engine, given)
    row, negated = _find(command, name)
    if row.kind == "flag" and not keys:
        if equals:
            raise ValueError(f"{given}: is a flag without a value, not {text!r}")
        return Option(row, given, not negated), at + 1
    count = 0 if equals else _count_values(words, at + 1, 99 if row.kind == "list" else 1)
    if not equals and not count and row.kind != "text or none":
        raise ValueError(f"{given}: has no value")
    text = text if equals else " ".join(words[at + 1 : at + 1 + count])
    try:
        if keys:
            known = found.get((row.config, row.field))
            value = dict(known.value) if known is not None and known.value else {}
            _put(value, keys, text)
        elif command.offline and row.kind.startswith("size") and text[-1:].isalpha():
            raise ValueError(f"must be a whole number in Python, such as 8192, not {text!r}")
        else:
            value = read_value(row, text)
    except TypeError:
        raise ValueError(f"{given}: is a key of what is no mapping") from None
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    return Option(row, f"{given} {text}", value), at + 1 + count


def _find(command: Command, name: str) -> tuple[EngineField, bool]:
    """Find an option's row, and whether it is written with --no-; ValueError if there is none."""
    engine, known = command.engine, by_option(command.engine)
    head = name[: name.find("-", 2)]
    other = name.replace(head, PAIRS.get(head, ""))
    paired = engine == "vllm" and not command.offline and other in known
    paired = paired and known[other].kind == "flag"
    if name in known and not (paired and known[name].until):
        return known[name], False
    if paired:
        return known[other]._replace(since=PAIRED_SINCE), True
    positive = re.sub("^--no[-_]", "--", name)
    if engine != "sglang" and positive in known and known[positive].kind == "flag":
        return known[positive], True
    shortened = name.startswith("--") and not command.offline and engine != "tensorrt-llm"
    if shortened:  # argparse takes what begins one option alone
        longer = {known[option]: option for option in known if option.startswith(name)}
        if len(longer) == 1:
            return next(iter(longer)), False
        if longer:
            raise ValueError(f"{name}: may be {' or '.join(sorted(longer.values()))}")
    short = re.fullmatch(r"(-[a-z]+)(\d+)", name)
    if short and short[1] in known:
        raise ValueError(f"{name}: {engine} takes it with a space: {short[1]} {short[2]}")
    own = same_option(engine, name)
    hint = f"; did you mean {own}?" if own else did_you_mean(name, known)
    raise ValueError(f"{name}: is no option of {engine}{hint}")


def _count_values(words: list[str], at: int, most: int) -> int:
    """Count the words that are values of the option before them: a negative number is one."""
    count = 0
    for word in words[at : at + most]:
        if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word):
            break
        count += 1
    return count


def _spelled(engine: str, word: str) -> tuple[str, list[str]]:
    """Return an option by its spelling in the table, and the keys below it, given with dots."""
    if engine == "tensorrt-llm":
        return word[:2] + word[2:].replace("-", "_"), []
    if engine == "vllm" and word == "-O":
        return "--optimization-level", []
    if engine == "vllm" and word.replace("_", "-") in SPEC:
        return "--speculative-config", [SPEC[word.replace("_", "-")]]
    head, *keys = word.split(".") if engine == "vllm" else [word]
    if head == "-O":
        head = "--compilation-config"
    return (f"--{head[2:].replace('_', '-')}" if head.startswith("--") else head), keys


def _put(block: Block, keys: list[str], text: str) -> None:
    """Put a value at keys below an option; a key that ends in + has a list."""
    *above, last = keys
    for key in above:
        block = block.setdefault(key, {})
    if last.endswith("+"):
        block[last[:-1]] = text.split(",")
        return
    block[last] = text
    for read in (read_size, json.loads):
        with suppress(ValueError):
            block[last] = read(text)


def _with_files(command: Command) -> list[str]:
    """Return the words, with the options of a YAML file in the place of the one that names it."""
    words: list[str] = []
    for word in command.words:
        level = re.fullmatch(r"-O=?(\d)", word) if command.engine == "vllm" else None
        file = re.fullmatch(r"(--config|--extra_llm_api_options)=(.+)", word)
        match = level or file
        words += [word] if match is None else ["-O", match[1]] if level else [*match.groups()]
    asked = ("--config", "--extra_llm_api_options")
    at = next((i for i, word in enumerate(words[:-1]) if word in asked), None)
    if at is None:
        return words
    options = _read_file(Path(words[at + 1]))
    before, after = words[:at], words[at + 2 :]
    if command.engine != "tensorrt-llm":
        model = [str(options.pop("model"))] if "model" in options else []
        own = option_words(options, command.engine)
        return [*model, *before, *own, *after] if model else [*own, *before, *after]
    flat: Block = {}
    for key, value in options.items():
        nested = key in NESTED and isinstance(value, dict)
        flat |= {f"{key}.{name}": one for name, one in value.items()} if nested else {key: value}
    return [*before, *after, *option_words(flat, command.engine)]


def _read_file(path: Path) -> Block:
    try:
        read = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise HeadwayError(f"--command: {path}: is no YAML: {one_line(error)}") from None
    if not isinstance(read, dict):
        raise HeadwayError(f"--command: {path}: must be a mapping of options")
    return read
