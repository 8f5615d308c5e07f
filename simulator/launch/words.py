"""Find the one command that starts a server: in a text, a script, a manifest, or JSON."""

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from simulator.util.errors import HeadwayError, one_line
from simulator.util.yaml_lines import Block, read_text

PROGRAMS = {
    ("vllm", "serve"): "vllm",
    ("vllm.entrypoints.cli.main", "serve"): "vllm",
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
IMAGE = r"([\w-]+/[\w-]+?)(?:-rocm|-cpu)?(?::v?([\w.-]+))?(?:@sha256:\w+)?$"
ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^}]*)|\[[@*]\])?\}|\$\((\w+)\)|\$(\w+)")
"""As a shell, a Compose file and Kubernetes write it, the first two with a default."""
DEFAULTS = re.compile(r"\$\{(\w+):?=([^}]*)\}")
ARRAY = re.compile(r"\b(\w+)(\+?)=\(([^()]*)\)")
CALLS = {"LLM": "vllm", "Engine": "sglang"}
"""What Python calls in the place of a server."""
CALLED = re.compile(rf"(?:^|[\s=.])(?:{'|'.join(CALLS)})\(")
KNOWN = "vllm serve, sglang serve, python -m sglang.launch_server, trtllm-serve"
ENDS = re.compile(r"[;&|]+|\d?>>?.*|\d?>&\d")
"""Words of a shell that end a command."""


class Command(NamedTuple):
    """A command that starts a server."""

    engine: str
    words: list[str]  # what follows the program
    environment: dict[str, str]
    release: str | None = None  # by its container's tag
    offline: bool = False  # an `LLM(...)` or `Engine(...)` in the place of a server
    replicas: int = 1  # of a manifest


def find_command(given: str) -> Command:
    """Find the command in a text or in the file that it names; HeadwayError unless it is one."""
    text = given.strip()
    if not text:
        raise HeadwayError("--command: is empty")
    if isfile(text):  # also of what is too long for a name
        text = read_text(Path(text)).strip()
    elif re.fullmatch(r"\S+\.(?:sh|bash|ya?ml|json|py|txt)", text):
        raise HeadwayError(f"--command: {text}: no such file")
    if text.startswith("{"):
        return _of_keywords(_read_json(text))
    if CALLED.search(text):
        return _of_call(text)
    if text.startswith("["):
        words = _read_json(text)
        text = shlex.join(map(str, words))
    manifest = re.search(r"^\s*(apiVersion|services|containers|args|- name):", text, re.MULTILINE)
    found = [*(_of_manifest(text) if manifest else _of_shell(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise HeadwayError(f"--command: has {len(found)} commands of servers: give one of them")
    if manifest:
        what = f"no container of the manifest has a command of {KNOWN}: give the command itself"
        raise HeadwayError(f"--command: {what}, as 'vllm serve Qwen/Qwen3-8B -tp 2'")
    head = " ".join(text.replace(" -m ", " -m=").split()[:2]).replace("-m=", "-m ")
    raise HeadwayError(f"--command: {head}: is no command that starts a server: {KNOWN}")


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise HeadwayError(f"--command: is no JSON: {one_line(error)}") from None


def _of_keywords(keywords: Mapping[str, Any]) -> Command:
    """Read the keywords of `LLM(...)`, or of SGLang's `Engine(...)`, which are options, too."""
    engine = "sglang" if "model_path" in keywords else "vllm"
    words = [*option_words(keywords, engine)]
    return Command(engine, words, {}, offline=True)


def _of_call(text: str) -> Command:
    """Read the one call of `LLM` or `Engine` in a text of Python; names may have literals."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        raise HeadwayError(f"--command: is no Python: {one_line(error)}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node)]
    if len(calls) != 1:
        raise HeadwayError(f"--command: has {len(calls)} calls of LLM or Engine: give one of them")
    if "tensorrt_llm" in text:
        raise HeadwayError("--command: LLM(...) of tensorrt_llm is not read: give trtllm-serve")
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    (call,), keywords = calls, {}
    given: list[tuple[str | None, ast.expr]] = [("model", value) for value in call.args[:1]]
    given += [(keyword.arg, keyword.value) for keyword in call.keywords]
    for name, value in given:
        literal = known.get(value.id, value) if isinstance(value, ast.Name) else value
        try:
            keywords[str(name)] = ast.literal_eval(literal)
        except ValueError:
            what = f"{name or '**'}={ast.unparse(value)}"
            raise HeadwayError(f"--command: {_called(call)}: {what}: is no literal") from None
    return _of_keywords(keywords)


def _called(call: ast.Call) -> str:
    """Return the name of what starts an engine, where a call is one."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name if name in CALLS else ""


def option_words(options: Mapping[str, Any], engine: str) -> Iterator[str]:
    """Write options with values, as JSON and YAML have them, as words of a command."""
    for name, value in options.items():
        if value is False and engine == "sglang":  # whose flags have no negative
            continue
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
    for block, replicas in _containers(documents):
        words: list[str] = []
        for key in ("entrypoint", "command", "args"):
            value = block.get(key) or []
            words += shlex.split(value) if isinstance(value, str) else map(str, value)
        listed = block.get("env", block.get("environment")) or []
        pairs = listed.items() if isinstance(listed, dict) else map(_variable, listed)
        variables = {name: f"{value}" for name, value in pairs if value is not None}
        words = [_expand(word, variables).replace("$$", "$") for word in words]
        assigned = [f"{name}={value}" for name, value in variables.items()]
        for found in _scan([*assigned, str(block.get("image", "")), *words]):
            yield found._replace(replicas=replicas)


def _variable(entry: object) -> tuple[str, str | None]:
    """Return a variable's name and value, of Kubernetes and of Compose; None: it is elsewhere."""
    if isinstance(entry, dict):
        value = None if "valueFrom" in entry else f"{entry.get('value', '')}".replace("$$", "$")
        return str(entry.get("name")), value
    name, equals, value = str(entry).partition("=")
    return name, value if equals else None


def _containers(node: object, replicas: int = 1) -> Iterator[tuple[Block, int]]:
    """Yield the containers below a node, and how many replicas of each there are."""
    if isinstance(node, dict):
        deployed = node.get("deploy")  # Compose's
        given = (deployed if isinstance(deployed, dict) else node).get("replicas")
        replicas = given if type(given) is int else replicas
        if any(isinstance(node.get(key), str | list) for key in ("args", "command")):
            yield node, replicas
        for value in node.values():
            yield from _containers(value, replicas)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value, replicas)


def _of_shell(text: str) -> Iterator[Command]:
    """Yield the commands of a script, with the variables that it assigns."""
    try:
        return _inner([], text, {})
    except ValueError as error:
        what = one_line(error)
        raise HeadwayError(f"--command: {what[0].lower()}{what[1:]}") from None


def _joined(script: str) -> str:
    """Return a script without comments, and its lines joined where it joins them.

    Another end of a line ends a command, unless an option follows.
    """
    quoted = r"('[^']*'|\"(?:\\.|[^\"\\])*\")"
    plain = re.sub(rf"{quoted}|(?<!\S)#[^\n]*", lambda found: found[1] or "", script)
    plain = re.sub(r"\\\s*\n", " ", plain)
    plain = ARRAY.sub(_as_variable, plain)
    plain = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", plain)
    return re.sub(rf"{quoted}|;|\n(?!\s*-)", lambda found: found[1] or " ; ", plain)


def _as_variable(array: re.Match[str]) -> str:
    """Write an array of a shell as a variable with its words."""
    before = f"${{{array[1]}}} " if array[2] else ""
    return f"{array[1]}={shlex.quote(before + array[3])}"


def _assigned(words: list[str]) -> dict[str, str]:
    """Return the variables that words of a shell assign."""
    variables = dict(DEFAULTS.findall(" ".join(words)))
    for word in words:
        if pair := ASSIGNED.fullmatch(word):
            variables[pair[1]] = _expand(pair[2], variables)
    return variables


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Put the values of variables, or their defaults, in their places; others are kept."""

    def value(found: re.Match[str]) -> str:
        default = found[2] if found[2] is not None else found[0]
        return variables.get(found[1] or found[3] or found[4], default)

    return VARIABLE.sub(value, text)


def _scan(words: list[str], first: int = 0) -> Iterator[Command]:
    """Yield each command that starts a server among the words of a script.

    An image before the word `first` runs a shell in the place of its entry point.
    """
    variables = _assigned(words)
    for at, word in enumerate(words[:-2]):
        if Path(word).name in ("sh", "bash") and re.fullmatch(r"-\w*c", words[at + 1]):
            yield from _inner(words[:at], words[at + 2], variables)
            return
    images = [(at, image) for at, word in enumerate(words) if (image := re.search(IMAGE, word))]
    images = [(at, image) for at, image in images if image[1] in PUBLISHED]
    if images:
        at = images[0][0]
        words = [*words[: at + 1], *_entry_point(words[:at]), *words[at + 1 :]]
    starts = [(at, p) for at in range(len(words)) if (p := _program(words[at:])) is not None]
    serves = images and images[0][0] >= first and PUBLISHED[images[0][1][1]] == "vllm"
    if not starts and serves:  # by its entry point
        starts = [(images[0][0], ())]
    for at, program in starts:
        engine = PROGRAMS.get(program, "vllm")
        rest = words[at + max(len(program), 1) :]
        end = next((i for i, word in enumerate(rest) if ENDS.fullmatch(word)), len(rest))
        tags = [f"{engine}=={image[2]}" for _, image in images if PUBLISHED[image[1]] == engine]
        pinned = re.search(rf"{engine}(\[\S*\])?==([0-9]+(\.[0-9]+)+)", " ".join([*tags, *words]))
        yield Command(engine, rest[:end], variables, pinned and pinned[2])


def _inner(before: list[str], script: str, variables: Mapping[str, str]) -> Iterator[Command]:
    """Yield the commands of a script, or of what `sh -c` runs."""
    plain = _joined(script)
    known = {**variables, **_assigned(shlex.split(plain))}
    return _scan([*before, *shlex.split(_expand(plain, known))], len(before))


def _entry_point(words: list[str]) -> list[str]:
    """Return the program that `docker run --entrypoint` puts before the words of a container."""
    joined = next((word for word in words if word.startswith("--entrypoint=")), "")
    if not joined and "--entrypoint" in words[:-1]:
        joined = f"={words[words.index('--entrypoint') + 1]}"
    return joined.partition("=")[2].split()


def _program(words: list[str]) -> tuple[str, ...] | None:
    """Return the program that words begin with."""
    first = [Path(words[0]).name, *words[1:2]]
    return next((program for program in PROGRAMS if tuple(first[: len(program)]) == program), None)
