"""The modules that a compiled wheel has as C: what mypyc takes for something else, or refuses.

`make test-compiled` runs the tests on such a wheel.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HOOK = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
COMPILED = [name.removeprefix("/") for name in HOOK["include"]]
AS_WRITTEN = {"Enum", "NamedTuple", "Protocol"}  # bases of classes that stay what they are


def compiled_classes(name: str) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
        if isinstance(node, ast.ClassDef) and not AS_WRITTEN & {ast.unparse(b) for b in node.bases}:
            yield node


def test_nothing_is_compiled_unless_it_is_asked_for() -> None:
    assert HOOK["enable-by-default"] is False
    assert len(COMPILED) > 10


@pytest.mark.parametrize("name", COMPILED)
def test_values_of_a_compiled_class_are_said_to_be_its_own(name: str) -> None:
    """Without ClassVar each is a field of the object, which a subclass' value does not change."""
    for node in compiled_classes(name):
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        for line in node.body:
            if isinstance(line, ast.Assign):
                assert ast.unparse(line.targets[0]) == "__slots__", (
                    f"{node.name}: {ast.unparse(line)}"
                )
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                assert "ClassVar" in ast.unparse(line.annotation), (
                    f"{node.name}: {ast.unparse(line)}"
                )


@pytest.mark.parametrize("name", COMPILED)
def test_options_are_not_handed_on_to_super(name: str) -> None:
    """mypyc 2.4 hands `**options` on as one more argument."""
    for node in compiled_classes(name):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and "super()" in ast.unparse(call.func):
                assert all(keyword.arg for keyword in call.keywords), ast.unparse(call)


@cache
def extended_elsewhere() -> set[str]:
    """Return the bases of classes in modules that are not compiled."""
    return {
        ast.unparse(base).rsplit(".", 1)[-1]
        for path in (ROOT / "simulator").rglob("*.py")
        if str(path.relative_to(ROOT)) not in COMPILED
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_classes_that_others_extend_allow_it(name: str) -> None:
    """In modules that are not compiled, and in users' own."""
    for node in compiled_classes(name):
        if node.name in extended_elsewhere():
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            assert "allow_interpreted_subclasses=True" in decorators, node.name
