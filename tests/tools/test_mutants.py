"""Which faults are drawn for the tests to find."""

import ast
import signal
import time
from pathlib import Path

from tools.mutants.equivalent import EQUIVALENT
from tools.mutants.mutate import Mutant, draw
from tools.mutants.session import WORDS, forked

CODE = """
def least(one, two):
    \"\"\"Nothing is done to words for people.\"\"\"
    assert one > 0
    found = min(one, two)
    return found if found < 7 else f(one, two)
"""
OPERATORS = """
def count(one, two):
    kept: int | None = one[0] * two if not one or two[-2] else two[one]
    kept -= 2
    return kept
"""
ROOT = Path(__file__).parents[2]


def drawn(root: Path, code: str, count: int, seed: int = 0) -> list[Mutant]:
    (root / "some").mkdir(exist_ok=True)
    (root / "some" / "file.py").write_text(code)
    lines = set(range(1, code.count("\n") + 1))
    return draw(root, ["some"], {"some/file.py": lines}, seed, count)


def test_comparisons_constants_statements_and_arguments_are_changed(tmp_path: Path) -> None:
    """Not what people read, nor the order of what `min` takes."""
    assert {mutant.new for mutant in drawn(tmp_path, CODE, 99)} == {
        "pass",
        "return found if found <= 7 else f(one, two)",
        "return found if found < 8 else f(one, two)",
        "return found if found < 7 else f(two, one)",
        "return f(one, two) if found < 7 else found",
    }


def test_operators_branches_and_places_are_changed(tmp_path: Path) -> None:
    """Not what an annotation says, nor what is looked up by a name."""
    mutants = [one for one in drawn(tmp_path, OPERATORS, 99) if one.new != "pass"]
    assert {one.new.removeprefix("kept: int | None = ") for one in mutants} == {
        "one[0] / two if not one or two[-2] else two[one]",
        "one[-1] * two if not one or two[-2] else two[one]",
        "one[1] * two if not one or two[-2] else two[one]",
        "one[0] * two if not one and two[-2] else two[one]",
        "one[0] * two if not not one or two[-2] else two[one]",
        "one[0] * two if not one or two[1] else two[one]",
        "one[0] * two if not one or two[-3] else two[one]",
        "two[one] if not one or two[-2] else one[0] * two",
        "kept += 2",
        "kept -= 3",
    }


def test_a_sample_stays_what_it_is_where_other_code_changes(tmp_path: Path) -> None:
    """More faults to draw from put some in the place of others, and leave the rest alone."""
    before = {mutant.key() for mutant in drawn(tmp_path, CODE, 3)}
    more = "def g(x):\n    return x + 1\n\n\ndef h(x):\n    return x < 2\n"
    after = {mutant.key() for mutant in drawn(tmp_path, more + CODE, 3)}
    assert len(before) == len(after) == 3
    assert {key for key in after if "return x" not in key[1]} <= before
    assert {mutant.key() for mutant in drawn(tmp_path, CODE, 3, seed=1)} != before


def test_what_is_called_equivalent_is_code_that_is_there() -> None:
    """An entry whose line has gone goes, too."""
    for path, old, _ in EQUIVALENT:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert old in {ast.unparse(one).splitlines()[0] for one in statements}, (path, old)


def test_a_fork_is_endless_by_its_own_time_and_late_by_the_clock() -> None:
    def spins() -> int:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, 0.02)
        while True:
            pass

    def sleeps() -> int:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        time.sleep(60)
        return 0

    ended = forked([spins, sleeps, lambda: 0, lambda: 1 // 0], [60, 0.05, 60, 60])
    assert {at: WORDS[status] for at, status in ended} == {
        0: "endless",
        1: "late",
        2: "survived",
        3: "killed",
    }
