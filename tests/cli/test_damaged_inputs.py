"""Damaged inputs: each is told in lines on stderr, exit code 2, nothing written, or is accepted.

`damaged_inputs.jsonl` has a case in each line: what is `run`, the `damage` done before (see
`tests/support/damaged_inputs.py`), and either `at`, a place that a message names, or `accepted`,
why the command does its work all the same.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.damaged_inputs import GOOD, Told, damage, make_inputs, tell

CORPUS = Path(__file__).parent / "damaged_inputs.jsonl"
CASES = [json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()]
ERROR = "headway: error: "


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with good inputs of every kind, and of runs."""
    folder = tmp_path_factory.mktemp("good")
    before = Path.cwd()
    os.chdir(folder)
    make_inputs(folder)
    os.chdir(before)
    return folder


def is_refused(told: Told) -> bool:
    """Tell whether a command refused its input as it should."""
    lines = told.lines
    return (
        told.code == 2
        and not told.out
        and not told.changed
        and bool(lines)
        and all(line.startswith(ERROR) and line.isprintable() for line in lines)
    )


def test_there_are_500():
    """Of every kind of input, and no case twice."""
    assert len({json.dumps(case) for case in CASES}) == len(CASES) >= 500
    assert {case["run"][0] for case in CASES} >= {"run", "compare", "sweep", "plan", "trace"}
    assert sum("accepted" in case for case in CASES) < 100


@pytest.mark.many
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_damaged_input(good, folder, case):
    """No traceback, no half-written file; a message names the place."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    for edit in case.get("damage", ()):
        damage(folder, edit)
    told = tell(case["run"])
    if "accepted" in case:
        summary = Path("o/summary.json")
        served = not re.search(r"all [\d,]+ requests were rejected", told.err) and (
            not summary.exists() or json.loads(summary.read_text("utf-8"))["completed"] > 0
        )
        assert told.code == (0 if served else 1), told.err
        assert all(line.startswith("headway: ") for line in told.err.splitlines())
        return
    assert is_refused(told), told
    assert any(line.startswith(ERROR + case["at"]) for line in told.lines), told.err


COMMANDS = (
    ["run", "s.yaml", "--out", "o", "--quiet"],
    ["run", "s.yaml", "--out", "o", "--quiet", "--set", "cost={profile: p.yaml}"],
    ["run", "s.yaml", "--out", "o", "--quiet", "--set", "model=config.json"],
    ["report", "run", "--out", "r.html"],
    ["explain", "run", "2"],
    ["sweep", "s.yaml", "--vary", "engine.max_num_seqs=4,8", "--out", "swept", "--jobs", "1"],
    *(["trace", "describe", name] for name in GOOD if "." in name and name[0] in "ablmt"),
)
FILES = sorted(
    [*GOOD, "swept/points.jsonl"]
    + [f"run/{name}" for name in ("summary.json", "requests.csv", "steps.csv", "scenario.yaml")]
)
TOKENS = st.sampled_from(
    (
        *("null", "{}", "[]", "-1", "0", ".nan", "NaN", "1e400", "1e-320", "x", '"', "'", ":"),
        *(",", "}", "true", "\t", "\x00", "\ufeff", "é", "\n", "- ", "&a", "*a", "!!", "|", "#"),
        *("99", "[1, 2]"),
    )
)


class Damages(RuleBasedStateMachine):
    """Any damages, one after the other, of any file, and commands in between."""

    @initialize()
    def copy(self):
        self.files = {name: (Path(name)).read_bytes() for name in FILES}
        self.told = None

    @rule(name=st.sampled_from(FILES), at=st.floats(0, 1))
    def cut(self, name, at):
        self._write(name, lambda data: data[: int(at * len(data))])

    @rule(name=st.sampled_from(FILES), at=st.floats(0, 1), count=st.integers(1, 8))
    def take_out(self, name, at, count):
        place = lambda data: int(at * len(data))  # noqa: E731
        self._write(name, lambda data: data[: place(data)] + data[place(data) + count :])

    @rule(name=st.sampled_from(FILES), at=st.floats(0, 1), token=TOKENS, count=st.integers(0, 3))
    def put_in(self, name, at, token, count):
        place = lambda data: int(at * len(data))  # noqa: E731
        new = token.encode()
        self._write(name, lambda data: data[: place(data)] + new + data[place(data) + count :])

    @rule(name=st.sampled_from(FILES))
    def mend(self, name):
        Path(name).write_bytes(self.files[name])

    @rule(command=st.sampled_from(COMMANDS))
    def run_command(self, command):
        self.told = tell(command)

    @invariant()
    def is_told(self):
        told, self.told = getattr(self, "told", None), None
        if told is None:
            return
        assert "Traceback" not in told.err
        if told.code == 2:
            assert is_refused(told), told
        else:
            lost = re.search(r"all [\d,]+ requests were rejected", told.err)
            failed = lost or "swept/results.csv" in told.changed
            assert told.code == 0 or (told.code == 1 and failed), told

    def _write(self, name, change):
        path = Path(name)
        path.write_bytes(change(path.read_bytes()))

    def teardown(self):
        for name, data in getattr(self, "files", {}).items():
            Path(name).write_bytes(data)
        shutil.rmtree("o", ignore_errors=True)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_damage(good, monkeypatch):
    """Whatever is broken, in whatever order: a line, exit code 2 and nothing written, or done."""
    monkeypatch.chdir(good)
    Damages.TestCase.settings = settings(
        max_examples=int(os.environ.get("HEADWAY_CHECKS", "60")),
        stateful_step_count=8,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    Damages.TestCase().runTest()
