"""The budget of code lines of each package, which CONTRIBUTING.md has: what grows, shows."""

import ast
import io
import re
import tokenize
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.support.file_index import ABOVE

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"(?m)^\| `([\w/]+)/` \| ([\d,]+) \|$")
BLANK = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
SLACK = 0.1  # of a budget that may be unused: a package that shrinks gives the rest back


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of all docstrings."""
    found: set[int] = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
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


def counted() -> dict[str, Counter[str]]:
    """Count the code of each file of the simulator's wings and of the packages beside it."""
    wings = [f"simulator/{path.name}" for path in (ROOT / "simulator").iterdir() if path.is_dir()]
    return {
        name: Counter(
            {
                str(path.relative_to(ROOT)): code_lines(path.read_text("utf-8"))
                for path in (ROOT / name).rglob("*.py")
            }
        )
        for name in (*wings, *ABOVE)
    }


LONG_FILE, LONG_FUNCTION = 450, 80  # lines
LONG_FUNCTIONS = {"simulator/cli/plan.py plan"}
"""Half of its lines are options."""


def test_long_files_say_why_they_are_one() -> None:
    """And no function is long without being listed here, with its reason."""
    silent, functions = [], set()
    for path in chain.from_iterable((ROOT / name).rglob("*.py") for name in ("simulator", *ABOVE)):
        name, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
        tree = ast.parse(text)
        why = re.search("one\\s+file|longer than|is long since", ast.get_docstring(tree) or "")
        if len(text.splitlines()) > LONG_FILE and why is None:
            silent.append(name)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION:
                functions.add(f"{name} {node.name}")
    assert not silent
    assert functions == LONG_FUNCTIONS


def test_what_counts() -> None:
    text = (
        '"""What."""\n\nx = [\n    1,  # one\n]\n# why\n\ndef f():\n    """Do."""\n    return x\n'
    )
    assert code_lines(text) == 5


@pytest.mark.medium
def test_every_package_keeps_its_budget() -> None:
    """The ten largest packages and files are printed where one does not."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    budgets = {name: int(limit.replace(",", "")) for name, limit in ROW.findall(page)}
    packages = counted()
    lines = {name: count for name, files in packages.items() if (count := files.total())}
    files = sum(packages.values(), Counter())
    for table in (lines, files):
        print(*(f"{count:7,} {name}" for name, count in Counter(table).most_common(10)), sep="\n")
    assert budgets.keys() == lines.keys()
    over = {name: count for name, count in lines.items() if count > budgets[name]}
    assert not over, "what does this replace? CONTRIBUTING.md has the rule"
    unused = {name for name, count in lines.items() if count < (1 - SLACK) * budgets[name] - 20}
    assert not unused, "give the rest of these budgets back, in CONTRIBUTING.md"
