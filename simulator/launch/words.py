"""Find the one command that starts a server: in a text, a script, a manifest, or JSON."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from simulator.util.errors import HeadwayError, one_line
from simulator.util.yaml_lines import read_text

PROGRAMS = {
    ("vllm", "serve"): "vllm",
    ("vllm.entrypoints.openai.api_server",): "vllm",
    ("vllm.entrypoints.api_server",): "vllm",
    ("sglang", "serve"): "sglang",
    ("sglang.launch_server",): "sglang",
    ("trtllm-serve", "serve"): "tensorrt-llm",
    ("trtllm-serve",): "tensorrt-llm",
}
"""How a server is started, and the engine's name in a scenario."""
PUBLISHED = {"vllm/vllm-openai": "vllm", "lmsysorg/sglang": "sglang"}
"""Containers that are published, whose tag is the release; vLLM's entry point starts a server."""
TAG = r"([\w-]+/[\w-]+):v?([\w.]+)$"
KNOWN = "vllm serve, sglang serve, python -m sglang.launch_server, trtllm-serve"
ENDS = re.compile(r"[;&|]+|\d?>>?.*|\d?>&\d")
"""Words of a shell that end a command."""


class Command(NamedTuple):
    """A command that starts a server."""

    engine: str
    words: list[str]  # what follows the program
    environment: dict[str, str]
    release: str | None = None  # by its container's tag
    offline: bool = False  # an `LLM(...)` in place of a server


def find_command(given: str) -> Command:
    """Find the command in a text or in the file that it names; HeadwayError unless it is one."""
    text = given.strip()
    if not text:
        raise HeadwayError("--command: is empty")
    if len(text) < 4096 and not re.search(r"\s", text) and Path(text).is_file():
        text = read_text(Path(text)).strip()
    if text.startswith("{"):
        return _of_keywords(text)
    manifest = re.search(r"^\s*(apiVersion|services|containers|args|- name):", text, re.MULTILINE)
    found = [*(_of_manifest(text) if manifest else _of_shell(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise HeadwayError(f"--command: has {len(found)} commands of servers: give one of them")
    if manifest:
        raise HeadwayError(f"--command: no container of the manifest has a command of {KNOWN}")
    head = " ".join(text.split()[:2])
    raise HeadwayError(f"--command: {head}: is no command that starts a server: {KNOWN}")


def _of_keywords(text: str) -> Command:
    """Read the keywords of `LLM(...)`, or of SGLang's `Engine(...)`, which are options, too."""
    try:
        keywords = json.loads(text)
    except ValueError as error:
        raise HeadwayError(f"--command: is no JSON: {one_line(error)}") from None
    words = [*option_words(keywords)]
    engine = "sglang" if "model_path" in keywords else "vllm"
    return Command(engine, words, {}, offline=engine == "vllm")


def option_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Write options with values, as JSON and YAML have them, as words of a command."""
    for name, value in options.items():
        option = f"--{str(name).replace('_', '-')}"
        if isinstance(value, bool):
            yield option if value else option.replace("--", "--no-", 1)
        elif isinstance(value, list) and not any(isinstance(one, dict) for one in value):
            yield option
            yield from map(str, value)
        elif value is not None:
            yield option
            yield json.dumps(value) if isinstance(value, dict | list) else str(value)


def _of_manifest(text: str) -> Iterator[Command]:
    """Yield the commands of a Kubernetes manifest's containers, or of a Compose file's services."""
    try:
        documents = [*yaml.safe_load_all(text)]
    except yaml.YAMLError as error:
        raise HeadwayError(f"--command: is no YAML: {one_line(error)}") from None
    for block in _containers(documents):
        words: list[str] = []
        for key in ("entrypoint", "command", "args"):
            value = block.get(key) or []
            words += shlex.split(value) if isinstance(value, str) else map(str, value)
        words = [word.replace("$$", "$") for word in words]
        listed = block.get("env", block.get("environment")) or []
        pairs = listed.items() if isinstance(listed, dict) else map(_variable, listed)
        variables = [f"{name}={value}" for name, value in pairs]
        tags = [v for v in block.values() if isinstance(v, str) and re.search(TAG, v)]
        yield from _scan([*variables, *tags, *words])


def _variable(entry: object) -> tuple[str, str]:
    """Return a variable's name and value, of Kubernetes and of Compose."""
    if isinstance(entry, dict):
        return str(entry.get("name")), str(entry.get("value", "")).replace("$$", "$")
    name, _, value = str(entry).partition("=")
    return name, value


def _containers(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if any(isinstance(node.get(key), str | list) for key in ("args", "command")):
            yield node
        for value in node.values():
            yield from _containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value)


def _of_shell(text: str) -> Iterator[Command]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise HeadwayError(
            f"--command: {one_line(error)[0].lower()}{one_line(error)[1:]}"
        ) from None
    return _scan(words)


def _scan(words: list[str]) -> Iterator[Command]:
    """Yield each command that starts a server among the words of a script."""
    for at, word in enumerate(words[:-2]):
        if Path(word).name in ("sh", "bash") and re.fullmatch(r"-\w*c", words[at + 1]):
            yield from _scan([*words[:at], *shlex.split(words[at + 2])])
            return
    pairs = [re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL) for word in words]
    variables = {pair[1]: pair[2] for pair in pairs if pair is not None}
    tags = [re.search(TAG, word) for word in words]
    found = [(at, tag) for at, tag in enumerate(tags) if tag and tag[1] in PUBLISHED]
    starts = [(at, p) for at in range(len(words)) if (p := _program(words[at:])) is not None]
    if not starts and found and PUBLISHED[found[0][1][1]] == "vllm":  # by its entry point
        starts = [(found[0][0], ())]
    for at, program in starts:
        engine = PROGRAMS.get(program, "vllm")
        rest = words[at + max(len(program), 1) :]
        end = next((i for i, word in enumerate(rest) if ENDS.fullmatch(word)), len(rest))
        releases = [tag[2] for _, tag in found if PUBLISHED[tag[1]] == engine]
        release = next(filter(re.compile(r"\d+\.\d+").match, releases), None)
        yield Command(engine, rest[:end], variables, release)


def _program(words: list[str]) -> tuple[str, ...] | None:
    """Return the program that words begin with."""
    first = [Path(words[0]).name, *words[1:2]]
    return next((program for program in PROGRAMS if tuple(first[: len(program)]) == program), None)
