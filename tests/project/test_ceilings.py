"""Ceilings that may only fall: code, keys of a scenario, the reach of a feature, forms refused."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from operator import le
from pathlib import Path

import pytest

from headway.cli.json_schema import json_schema
from tests.support.file_index import ABOVE

ROOT = Path(__file__).parents[2]
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT} | {
    tokenize.ENDMARKER
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

LINES, WHEEL, KEYS, REACH = 33_877, 65_961, 247, 145
"""Code lines of `simulator/` and of the wheel, keys of a scenario, files that name a feature."""
GRANTS: dict[str, tuple[int, int, int, int]] = {}
"""What a piece of work may add to each: it goes once that has landed, and the ceilings fall."""
FEATURES = {
    "LoRA": "lora|adapter",
    "images": "image|multimodal|encoder",
    "swap": "swap",
    "drafts": "specul|draft",
}
"""How files name a feature, in code or prose; its folder in `simulator/features` does not count."""
REFUSED = (
    "calls with more than five positional arguments",
    "functions with more than five positional arguments",
    "tuple literals unpacked where they are written",
    "public functions that return a bare tuple of three or more",
    "files of more than 500 lines",
)
"""Forms that no package may have."""
LONG_FUNCTION = 80  # lines
LONG_FUNCTIONS = {"headway/cli/plan.py plan"}
"""Half of its lines are options."""


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def code_lines(text: str) -> int:
    """Count the lines that hold code: no comments, docstrings or blank ones."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


@cache
def sources() -> dict[str, str]:
    """Read every file of the simulator and of the packages above it."""
    paths = (path for name in ("simulator", *ABOVE) for path in (ROOT / name).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def in_simulator() -> dict[str, str]:
    """Return the files of the simulator alone."""
    return {name: text for name, text in sources().items() if name.startswith("simulator/")}


def ceilings() -> list[int]:
    """Return what is allowed with all grants, in the order of the ceilings."""
    own = (LINES, WHEEL, KEYS, REACH)
    return [sum(column) for column in zip(own, *GRANTS.values(), strict=True)]


def too_many_positional(node: ast.Call | FUNCTIONS) -> bool:
    """Return whether a call gives, or a function takes, more than five arguments by place.

    A Triton kernel has a pointer for each tensor, and Triton's compiler knows no keyword-only ones.
    """
    if isinstance(node, ast.Call):
        return len(node.args) > 5
    if "triton.jit" in map(ast.unparse, node.decorator_list):
        return False
    args = [*node.args.posonlyargs, *node.args.args]
    return len(args) - bool(args and args[0].arg in {"self", "cls"}) > 5


def is_long_tuple(kind: ast.expr | None) -> bool:
    """Return whether an annotation is, or may be, `tuple[A, B, C]` or longer, or yields one."""
    if isinstance(kind, ast.BinOp):
        return is_long_tuple(kind.left) or is_long_tuple(kind.right)
    if not isinstance(kind, ast.Subscript):
        return False
    parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    name = ast.unparse(kind.value)
    if name == "tuple":
        return len(parts) > 2
    return name in {"Iterator", "Generator"} and any(map(is_long_tuple, parts))


def refused(text: str) -> Iterator[str]:
    """Yield the forms of `REFUSED` that a file has, one by one."""
    calls, functions, unpacked, tuples, files = REFUSED
    if text.count("\n") > 500:
        yield files
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield unpacked
        elif isinstance(node, ast.Call) and too_many_positional(node):
            yield calls
        elif isinstance(node, FUNCTIONS):
            if too_many_positional(node):
                yield functions
            if not node.name.startswith("_") and is_long_tuple(node.returns):
                yield tuples


def test_what_counts() -> None:
    text = (
        '"""What."""\n\nx = [\n    1,  # one\n]\n# why\n\ndef f():\n    """Do."""\n    return x\n'
    )
    assert code_lines(text) == 5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("f(1, 2, 3, 4, 5)", []),
        ("f(1, 2, 3, 4, 5, 6)", [0]),
        ("def f(a, b, c, d, e, *, g): ...", []),
        ("def f(a, b, c, d, e, g): ...", [1]),
        ("class A:\n    def f(self, a, b, c, d, e): ...", []),
        ("@triton.jit\ndef f(a, b, c, d, e, g): ...", []),
        ("@cache\ndef f(a, b, c, d, e, g): ...", [1]),
        ("x = [*(1, 2), *rest]", [2]),
        ("def f() -> tuple[int, str] | tuple[int, ...]: ...", []),
        ("def f() -> Iterator[tuple[int, str, int]] | None: ...", [3]),
        ("def _f() -> tuple[int, str, int]: ...", []),
        ("x = 1\n" * 501, [4]),
    ],
)
def test_what_is_refused(text: str, found: list[int]) -> None:
    assert list(refused(text)) == [REFUSED[place] for place in found]


@pytest.mark.medium
def test_code_of_the_simulator_and_of_the_wheel() -> None:
    """The ten largest packages and files are printed where there is too much."""
    wheel = Counter(
        {name: code_lines(text) for name, text in sources().items() if name[:6] != "tools/"}
    )
    files = Counter({name: count for name, count in wheel.items() if name.startswith("simulator/")})
    packages: Counter[str] = Counter()
    for name, count in files.items():
        packages[name.rsplit("/", 1)[0]] += count
    for table in (packages, files):
        print(*(f"{count:7,} {name}" for name, count in table.most_common(10)), sep="\n")
    found = [files.total(), wheel.total()]
    assert all(map(le, found, ceilings())), "what does this replace? CONTRIBUTING.md has the rule"


def test_keys_of_a_scenario() -> None:
    schema = json_schema()
    blocks = [schema, *schema["$defs"].values()]
    assert sum(len(block["properties"]) for block in blocks) <= ceilings()[2]


def test_files_that_name_a_feature() -> None:
    reach = {
        feature: sum(
            bool(re.search(words, text, re.I))
            for name, text in in_simulator().items()
            if not name.startswith(f"simulator/features/{feature.lower()}/")
        )
        for feature, words in FEATURES.items()
    }
    assert sum(reach.values()) <= ceilings()[3], reach


@pytest.mark.medium
def test_forms_that_are_refused() -> None:
    found = {name: Counter(refused(text)) for name, text in sources().items()}
    for form in REFUSED:
        assert not [name for name, count in found.items() if count[form]], form


@pytest.mark.medium
def test_no_function_is_long() -> None:
    long = {
        f"{name} {node.name}"
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION
    }
    assert long == LONG_FUNCTIONS
