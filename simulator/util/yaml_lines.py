"""YAML with the line of every key, so that a mistake can be told by its place.

On top of YAML's own rules: a key given twice is an error, and so are anchors (a line would no
longer say where a value comes from), and what YAML 1.1 reads in a way that few expect: `yes` as
true, `010` as 8, `1:30` as 90. `1e-3` and `inf` are numbers, which YAML 1.1 takes for words.

Why not ruamel.yaml, which keeps positions: it reads the shipped scenarios in 2.7 times the time,
stops at the first key that is given twice, gives wrapped values, and takes anchors and `inf` as
YAML does, so that most of this file would stay.
"""

import re
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from simulator.util.errors import FieldError, HeadwayError, Key
from simulator.util.files import check_regular

_MISREAD = {
    "bool": re.compile(r"^(?!true$|false$)", re.IGNORECASE),
    "int": re.compile(r"^[-+]?(0[0-7_]+|.*:.*)$"),
    "float": re.compile(r".*:"),
}
"""What of each type PyYAML reads by the rules of YAML 1.1, which YAML 1.2 has dropped."""
_BARE_NUMBER = re.compile(r"^(?:[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+|[-+]?inf)$")


Block = dict[str, Any]
"""Keys and values as a file holds them, before they are checked."""


def block_in(raw: object, *names: str) -> Block:
    """Return the block at a key of what a file holds; {} where there is none."""
    for name in names:
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


class SourceMap:
    """Where each value of a file comes from, in the words of an error message."""

    def __init__(self, file: str, lines: dict[Key, int]) -> None:
        self.file = file
        self._locations = {key: (f"{file}:{line}", float(line)) for key, line in lines.items()}

    def override(self, key: Key, place: str) -> None:
        """Note that a value, and all below it, comes from elsewhere."""
        kept = {k: known for k, known in self._locations.items() if k[: len(key)] != key}
        self._locations = kept | {key: (place, inf)}

    def says(self, key: Key) -> bool:
        """Say whether a key is in the file or was put over it."""
        return key in self._locations

    def _nearest(self, key: Key) -> tuple[str, float]:
        """Return the place and the line of a key, or of the nearest one above it."""
        while key and key not in self._locations:
            key = key[:-1]
        return self._locations.get(key, (self.file, 0.0))

    def location(self, key: Key) -> str:
        """Return the place of a key, or that of the nearest one above it."""
        return self._nearest(key)[0]

    def line(self, key: Key) -> float:
        """Return the line of a key to sort by; infinite for what is not from the file."""
        return self._nearest(key)[1]

    def message(self, fault: FieldError) -> str:
        """Say what is wrong in one line: `file:line: key: what`."""
        key = fault.key
        return ": ".join([self.location(key), *([".".join(key)] if key else []), fault.what])


class _Composer(Composer):
    """Makes nodes of events, but for anchors."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]
        if getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases (&, *) are not supported", event.start_mark
            )
        node: Node | None = super().compose_node(parent, index)
        return node


class _Resolver(yaml.resolver.Resolver):
    """Takes numbers for such as everybody else writes them."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(found) for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Resolver.add_implicit_resolver("!number", _BARE_NUMBER, list("-+0123456789i"))


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Quotes words that would be read as those numbers."""


_Dumper.add_implicit_resolver("!number", _BARE_NUMBER, list("-+0123456789i"))


def dump_yaml(value: object) -> str:
    """Write plain values as YAML that this module reads as the same."""
    # libyaml, four times as fast, folds long texts elsewhere than PyYAML: let neither fold any.
    wide = 1_000_000
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=wide))


class _Constructor(yaml.constructor.SafeConstructor):
    """Makes YAML's plain types, and those numbers."""


def _bare_number(loader: _Constructor, node: ScalarNode) -> float:
    """Read `2e3` as the whole number that it is, `1e-3` and `inf` as floats."""
    number = float(node.value)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


_Constructor.add_constructor("!number", _bare_number)  # type: ignore[type-var]


def _int(loader: _Constructor, node: ScalarNode) -> int:
    """Read a whole number; Python reads none of some thousand digits."""
    try:
        return int(loader.construct_yaml_int(node))
    except ValueError:
        what = f"a number of {len(node.value)} digits" if len(node.value) > 999 else "no number"
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None


_Constructor.add_constructor("tag:yaml.org,2002:int", _int)  # type: ignore[type-var]


class _Loader(_Composer, _Constructor, _Resolver, yaml.SafeLoader):
    """YAML's plain types without anchors."""


_FAST: list[type[_Loader]] = []
"""The same on libyaml, 40 times as fast on long lines, where PyYAML has it; it takes anchors."""
if yaml.__with_libyaml__:
    from yaml._yaml import CParser  # private by its name alone: `yaml.cyaml` builds on it

    class _FastLoader(CParser, _Constructor, _Resolver):
        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            _Constructor.__init__(self)
            _Resolver.__init__(self)

    _FAST.append(cast("type[_Loader]", _FastLoader))


def read_text(path: Path) -> str:
    """Read a text file; HeadwayError names what stands in the way."""
    check_regular(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise HeadwayError(f"{path}:{line}: is not UTF-8 text") from None


def read_own(path: Path) -> Any:
    """Read a table that comes with the package."""
    return parse(path.read_text("utf-8"), str(path))[0]


def parse(text: str, source: str) -> tuple[object, dict[Key, int]]:
    """Read one YAML document and the line, from 1 on, of every key in it.

    Raises HeadwayError, with all duplicate keys at once; `source` is what messages call the text.
    """
    for fast in () if re.search(r"&\S", text) else _FAST:
        with suppress(yaml.YAMLError, ValueError):
            return _parse(fast, text, source)
    try:  # the messages are those of the parser that everybody has
        return _parse(_Loader, text, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise HeadwayError(f"{source}:{line}: not YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise HeadwayError(f"{source}:{line}: not YAML: {error.reason}") from None
    except HeadwayError:
        raise
    except ValueError as error:  # 2024-13-01
        raise HeadwayError(f"{source}: not YAML: {error}") from None


def _parse(kind: type[_Loader], text: str, source: str) -> tuple[object, dict[Key, int]]:
    lines: dict[Key, int] = {}
    try:
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        if problems := _collect_lines(node, (), lines):
            raise HeadwayError(f"{source}:{line}: {what}" for line, what in problems)
        return loader.construct_document(node), lines
    except RecursionError:  # a hundred nested brackets or more
        raise HeadwayError(f"{source}: not YAML: nested too deeply") from None


def _collect_lines(node: Node, at: Key, lines: dict[Key, int]) -> list[tuple[int, str]]:
    """Note the lines below a node; return the bad keys and their lines."""
    problems = []
    if isinstance(node, ScalarNode) and not node.style:
        kind = node.tag.rpartition(":")[2]
        if kind in _MISREAD and _MISREAD[kind].match(node.value):
            where = ".".join(at) + ": " if at else ""
            problems.append((node.start_mark.line + 1, where + _misread(kind, node)))
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            lines[*at, str(index)] = item.start_mark.line + 1
            problems += _collect_lines(item, (*at, str(index)), lines)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or not key.tag.endswith(":str"):
                where = ".".join(at) + ": " if at else ""
                problems.append((line, f"{where}a key must be a word"))
                continue
            here = (*at, key.value)
            if here in lines:
                first = lines[here]
                problems.append((line, f"{'.'.join(here)}: given before, on line {first}"))
            lines[here] = line
            problems += _collect_lines(value, here, lines)
    return problems


def _misread(kind: str, node: ScalarNode) -> str:
    """Say how YAML 1.1 reads a word or number, and what to write for what may be meant."""
    value = _Constructor().construct_object(node)
    meant = str(value).lower()
    other = f'"{node.value}" in quotes for the text'
    if ":" in node.value:
        return (
            f"YAML 1.1 reads {node.value} as {meant}; write {other} (a ratio, a time), or {meant}"
        )
    if kind == "int":
        other = f"{int(node.value)} for the decimal number"
    return f"YAML 1.1 reads {node.value} as {meant}; write {meant}, or {other}"
