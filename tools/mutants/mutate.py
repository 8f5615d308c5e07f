"""Draw faults for the bodies of functions: operators, constants, arms, arguments, statements."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SYMMETRIC = {"min", "max", "minimum", "maximum", "raise_if"}
"""Calls that do the same with their arguments in another order."""
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)


class MutantKey(NamedTuple):
    """What names a mutant where lines move."""

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One fault: the `place`-th that `_faults` finds in a file."""

    path: str  # from the root of the tree
    place: int
    line: int
    kind: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}\n    - {self.old}\n    + {self.new}"

    def key(self) -> MutantKey:
        """What names it where lines move."""
        return MutantKey(self.path, self.old, self.new)


def _faults(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.stmt, list[ast.stmt], int, ast.expr | None]]:
    """Walk through all places: kind, statement, the block it stands in, where, and expression."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    inner = {one for outer in functions for one in ast.walk(outer) if one is not outer}
    for function in functions:
        if function in inner:
            continue  # it stands in another, with which it is walked
        for node in ast.walk(function):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    for at, statement in enumerate(block):
                        yield from _of_statement(statement, block, at)


def _of_statement(
    statement: ast.stmt, block: list[ast.stmt], at: int
) -> Iterator[tuple[str, ast.stmt, list[ast.stmt], int, ast.expr | None]]:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if text or isinstance(statement, (*FUNCTION, ast.ClassDef, ast.Assert, ast.Raise)):
        return  # words for people
    if isinstance(statement, DROPPED):
        yield "dropped statement", statement, block, at, None
    if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
        yield "augmented operator", statement, block, at, None
    for node in _expressions(statement):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield "comparison", statement, block, at, node
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield "constant", statement, block, at, node
        elif isinstance(node, ast.Call) and _ordered(node):
            yield "swapped argument", statement, block, at, node
        elif isinstance(node, ast.BoolOp):
            yield "and/or", statement, block, at, node
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "dropped not", statement, block, at, node
        elif isinstance(node, ast.IfExp):
            yield "other arm", statement, block, at, node
        elif isinstance(node, ast.Subscript) and _place(node) is not None:
            yield "index", statement, block, at, node
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield "operator", statement, block, at, node


def _place(node: ast.Subscript) -> int | None:
    """Return the number by which an item is taken: -1 the last; None: it is a name, or a slice."""
    try:
        place = ast.literal_eval(node.slice)
    except (ValueError, TypeError):
        return None
    return place if type(place) is int else None


def _ordered(call: ast.Call) -> bool:
    """Say whether a call has two arguments whose order may matter."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name not in SYMMETRIC and len({ast.dump(one) for one in call.args[:2]}) == 2


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Walk through the expressions of a statement, not those of statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue  # nobody evaluates it
        if isinstance(child, ast.keyword) and child.arg in ("stacklevel", "strict"):
            continue  # where a warning comes from is not shown; `strict` is an assertion
        if isinstance(child, ast.expr):
            yield child
        if not isinstance(child, ast.stmt | ast.JoinedStr):
            yield from _expressions(child)


def _apply(fault: tuple[str, ast.stmt, list[ast.stmt], int, ast.expr | None]) -> None:
    kind, statement, block, at, node = fault
    if kind == "dropped statement":
        block[at] = ast.copy_location(ast.Pass(), statement)
    elif isinstance(statement, ast.AugAssign) and kind == "augmented operator":
        statement.op = OPERATORS[type(statement.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):
        node.operand = ast.copy_location(ast.UnaryOp(ast.Not(), node.operand), node)
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.Subscript):  # as far from the other end
        node.slice = ast.copy_location(ast.Constant(~(_place(node) or 0)), node)
    elif isinstance(node, ast.BinOp):
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant):
        value = node.value
        assert isinstance(value, int | float)
        node.value = not value if isinstance(value, bool) else value + 1
    elif isinstance(node, ast.Call):
        node.args[0], node.args[1] = node.args[1], node.args[0]


def _shown(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0]


def draw(
    root: Path, packages: list[str], reached: dict[str, set[int]], seed: int, count: int
) -> list[Mutant]:
    """Draw `count` mutants on lines of `packages`; `reached` are those that some test runs.

    Each draws its own lot, by what it changes: a change of other code leaves the sample as it is.
    """
    lots = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            name, seen = str(path.relative_to(root)), Counter[str]()
            for place, fault in enumerate(_faults(ast.parse(path.read_text("utf-8")))):
                text = f"{seed} {name} {fault[0]} {_shown(fault[1])}"
                seen[text] += 1
                if (fault[4] or fault[1]).lineno in reached.get(name, ()):
                    lot = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()
                    lots.append((lot, name, place))
    return [_mutant(root, name, place) for _, name, place in sorted(lots)[:count]]


def _mutant(root: Path, name: str, place: int) -> Mutant:
    fault = list(_faults(ast.parse((root / name).read_text("utf-8"))))[place]
    line, old = (fault[4] or fault[1]).lineno, _shown(fault[1])
    _apply(fault)
    new = _shown(fault[2][fault[3]])
    return Mutant(path=name, place=place, line=line, kind=fault[0], old=old, new=new)


def install(root: Path, mutant: Mutant, functions: list[FunctionType]) -> bool:
    """Put the mutant's code into the functions of this process; say whether any has it now."""
    tree = ast.parse((root / mutant.path).read_text("utf-8"))
    _apply(list(_faults(tree))[mutant.place])
    file = str(root / mutant.path)
    codes = {(c.co_qualname, c.co_firstlineno): c for c in _codes(compile(tree, file, "exec"))}
    done = False
    for function in functions:
        code = function.__code__
        other = codes.get((code.co_qualname, code.co_firstlineno))
        if code.co_filename == file and other is not None and other != code:
            try:
                function.__code__ = other
            except ValueError:  # it closes over other names now
                return False
            done = True
    return done


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
