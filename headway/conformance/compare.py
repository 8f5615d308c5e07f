"""Step for step against a recorded schedule: does Headway decide what vLLM or SGLang decided?

Every row that `headway.conformance.replay` yields must be the recorded one. Rows of equal text
are equal; only where the text differs are the fields looked at.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headway.conformance.case_model import Case, SglangCase
from headway.conformance.cases import parse_line, read_cases, read_lines, write_lines
from headway.conformance.live import LiveReplay, is_live, live_case
from headway.conformance.replay import Replay
from headway.conformance.sglang_replay import SglangReplay
from headway.vllm.engine_fields import unknown_fields
from simulator.schedulers.vllm.rules import (
    CannotFollowError,
    Release,
    families,
    family_of,
    read_release,
    write_release,
)
from simulator.util.errors import HeadwayError

Row = dict[str, Any]
_TYPE = re.compile(r'\s*\{\s*"type"\s*:\s*"(\w+)"')
_NOT_WHOLE = ("type", "mode", "ratio", "reason")  # what need not be whole numbers, or lists of them
_SHOWN = 3  # differences that a report shows in full
_WIDTH = 60  # of a value side by side


@dataclass(slots=True)
class Golden:
    """The recorded schedule of one case: numbered lines."""

    path: Path
    header: Row
    first: int  # line of the header
    lines: list[tuple[int, str]]

    def of(self, case: Case) -> Case:
        """Fill in what a case leaves open as it was recorded."""
        return case.with_retention(self._config.get("prefix_cache_retention_interval"))

    def leaves_open(self, case: Case) -> bool:
        """Say whether neither case nor recording names the retention interval of windows."""
        named = "prefix_cache_retention_interval" in self._config
        return not named and case.with_retention(None) is not case

    @property
    def _config(self) -> Row:
        config = self.header.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def release(self) -> Release | None:
        """The vLLM that it was recorded from; None: it does not say."""
        return read_release(self.header.get("vllm") or "")


@dataclass(slots=True)
class Difference:
    """Where Headway and the recording part."""

    case: str
    place: str  # file and line of the recording
    recorded: Row
    headway: Row
    fields: list[str]
    states: list[str] = field(default_factory=list)  # of the requests involved, at that moment

    def __str__(self) -> str:
        rows = []
        for name in dict.fromkeys([*self.headway, *self.recorded]):
            mark = "*" if name in self.fields else " "
            rows.append((f"{mark} {name}", *_pair(self.recorded.get(name), self.headway.get(name))))
        widths = [max(len(row[k]) for row in [("", "recorded", ""), *rows]) for k in range(2)]
        lines = [
            f"{self.case}: {_title(self.headway or self.recorded)} differs in "
            f"{', '.join(self.fields)} ({self.place})",
            f"{'':{widths[0]}}  {'recorded':{widths[1]}}  Headway",
        ]
        lines += [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join([*lines, *self.states])


@dataclass(slots=True)
class Outcome:
    """What came of one case."""

    case: str
    steps: int  # that agree
    difference: Difference | None
    family: str = ""  # of versions whose rules were followed; "": the recording names none
    refused: str = ""  # why these rules could not be followed any further

    @property
    def agrees(self) -> bool:
        """Whether every row is as recorded."""
        return self.difference is None and not self.refused


def conform(
    path: Path, golden: Path | None = None, *, leap: bool = False, write: Path | None = None
) -> list[Outcome]:
    """Play each case of a file and compare it with its recording.

    `golden` is by default `../golden/NAME.jsonl.gz`. The rules are those of the vLLM that its
    header names, else of the newest known. `leap` takes equal steps at once, as a simulation does.
    `write` is a file for Headway's own log, of all cases, in the same format; it cannot be one that
    is read. Where no recording is named and none is there, nothing is compared. Raises HeadwayError
    where a file is missing or damaged; the log is written all the same if it is the recording that
    is at fault.
    """
    default = default_golden(path)
    for source in (path, golden or default):
        if write is not None and write.exists() and source.exists() and write.samefile(source):
            raise HeadwayError(f"--write: {write} is read here: give another name")
    if is_live(path):
        return [_conform_live(path, golden, write)]
    cases = read_cases(path)
    goldens: list[Golden] | None = None
    filled = cases
    try:
        if write is None or golden is not None or default.exists():
            goldens = read_goldens(golden or default, cases)
            filled = [one.of(case) for case, one in zip(cases, goldens, strict=True)]
    finally:
        if write is not None:
            releases = [one.release for one in goldens] if goldens else [None] * len(cases)
            replays = (
                _replay(case, leap, release) for case, release in zip(filled, releases, strict=True)
            )
            write_lines(write, (row for replay in replays for row in replay.log()))
    if goldens is None:
        return []
    return [
        _conform_case(case, one, one.release, leap)
        for case, one in zip(cases, goldens, strict=True)
    ]


def _conform_case(case: Case, golden: Golden, release: Release | None, leap: bool) -> Outcome:
    """Play one case by the rules of a release, and compare it with its recording.

    Where neither names `prefix_cache_retention_interval`, it is null, as in recordings from before
    the option, or else the release's default: one of them has to agree.
    """
    outcome = _compare(_replay(golden.of(case), leap, release), golden)
    if outcome.agrees or not golden.leaves_open(case):
        return outcome
    by_default = _compare(_replay(case, leap, release), golden)
    return by_default if by_default.agrees else outcome


def _conform_live(path: Path, golden: Path | None, write: Path | None) -> Outcome:
    """Play a live server's record, which is case and recording in one."""
    if golden is not None:
        raise HeadwayError(f"--golden: {path} is a live server's record: it is its own recording")
    live = live_case(path)
    if write is not None:
        write_lines(write, LiveReplay(live).log())
    recording = Golden(path, {"vllm": write_release(live.release)}, 1, live.rows)
    return _compare(LiveReplay(live), recording)


def _replay(case: Case, leap: bool, release: Release | None) -> Replay:
    """Make the replay of a case, by its engine; `release` is that of vLLM."""
    if isinstance(case, SglangCase):
        return SglangReplay(case, leap=leap)
    return Replay(case, leap=leap, release=release)


def conform_families(
    path: Path, golden: Path | None = None, *, leap: bool = False
) -> dict[str, list[Outcome]]:
    """Compare the cases of a file with their recordings by the rules of every family of versions.

    Raises HeadwayError where a file is missing or damaged.
    """
    cases = read_cases(path)
    if any(isinstance(case, SglangCase) for case in cases):
        raise HeadwayError(f"--families: {path}: versions of SGLang are one family")
    pairs = list(zip(cases, read_goldens(golden or default_golden(path), cases), strict=True))
    return {
        name: [_conform_case(case, one, release, leap) for case, one in pairs]
        for name, release in families().items()
    }


def default_golden(path: Path) -> Path:
    """Say where the recording of a case file is: in the folder `golden` beside the case's."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    folder = path.absolute().parent.parent / "golden"
    plain = folder / f"{name}.jsonl"
    return plain if plain.exists() else folder / f"{name}.jsonl.gz"


def report(outcomes: list[Outcome]) -> str:
    """Tell in words what agrees and what does not."""
    wrong = [outcome.difference for outcome in outcomes if outcome.difference is not None]
    parts = [str(difference) for difference in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        parts.append(f"and {', '.join(one.case for one in wrong[_SHOWN:])}")
    parts += dict.fromkeys(
        f"{outcome.case}: {outcome.refused}" for outcome in outcomes if outcome.refused
    )
    steps = sum(outcome.steps for outcome in outcomes)
    rules = "; ".join(sorted({f"vLLM {outcome.family}" for outcome in outcomes if outcome.family}))
    by = f" (rules of {rules})" if rules else ""
    if len(outcomes) == 1:
        cut = ", then not" if wrong else ", then stop" if outcomes[0].refused else ""
        parts.append(f"{outcomes[0].case}: {steps:,} steps agree{cut}{by}")
    else:
        agree = sum(outcome.agrees for outcome in outcomes)
        parts.append(f"{agree} of {len(outcomes)} cases agree, {steps:,} steps{by}")
    return "\n\n".join(parts)


def report_families(found: dict[str, list[Outcome]]) -> str:
    """Return which families of versions agree, as a table."""
    lines = []
    width = max(map(len, found), default=0) + 7
    for name, outcomes in found.items():
        agree, refused = sum(o.agrees for o in outcomes), sum(bool(o.refused) for o in outcomes)
        words = f"{agree} of {len(outcomes)} cases agree"
        words += f", {refused} cannot be simulated" if refused else ""
        lines.append(f"{'*' if agree == len(outcomes) else ' '} {f'vLLM {name}':<{width}}{words}")
    return "\n".join(lines)


def read_goldens(path: Path, cases: list[Case]) -> list[Golden]:
    """Read the recordings of these cases, one after the other in a file."""
    found: list[Golden] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line or line.isspace():
            continue
        kind = _kind(path, number, line)
        if kind == "case":
            found.append(Golden(path, parse_line(path, number, line), number, []))
        elif not found:
            raise HeadwayError(f"{path}:{number}: type: must begin with a record of type case")
        else:
            found[-1].lines.append((number, line))
    if len(found) != len(cases):
        raise HeadwayError(f"{path}: has {len(found)} recordings for {len(cases)} cases")
    problems = [problem for case, golden in zip(cases, found, strict=True)
                for problem in _check(case, golden)]  # fmt: skip
    if problems:
        raise HeadwayError(problems)
    return found


def _kind(path: Path, number: int, line: str) -> object:
    """Return the type of a record; only where that does not come first is the line parsed."""
    match = _TYPE.match(line)
    if match:
        return match[1]
    record = parse_line(path, number, line)
    if not isinstance(record, dict):
        raise HeadwayError(f"{path}:{number}: not a JSON object")
    return record.get("type")


def _says_less(recorded: object, own: object) -> bool:
    """Say whether a recorded block only lacks keys, which its time did not have."""
    both = isinstance(recorded, dict) and isinstance(own, dict)
    return both and own | recorded == own  # type: ignore[operator]


def _check(case: Case, golden: Golden) -> Iterator[str]:
    """See that a recording is whole, and of this case."""
    header, place = golden.header, f"{golden.path}:{golden.first}"
    yield from unknown_fields(place, header)
    if header.get("schema") != 1:
        yield f"{place}: schema: must be 1, not {header.get('schema')!r}"
    if header.get("name") != case.name:
        yield f"{place}: name: is of case {header.get('name')!r}, not of {case.name!r}"
    if header.get("requests", len(case.requests)) != len(case.requests):
        yield f"{place}: requests: {header['requests']}, but the case has {len(case.requests)}"
    for block in ("config", "step_time"):
        mine, theirs = getattr(golden.of(case), block).model_dump(), header.get(block, {})
        for key in theirs if isinstance(theirs, dict) else ():
            if key not in mine:
                yield f"{place}: {block}.{key}: an option that Headway does not know"
            elif theirs[key] != mine[key] and not _says_less(theirs[key], mine[key]):
                yield f"{place}: {block}.{key}: recorded with {theirs[key]!r}, not {mine[key]!r}"
    if (told := header.get("vllm")) is not None and not (
        isinstance(told, str) and read_release(told)
    ):
        yield f"{place}: vllm: must be a version such as 0.25.1, not {told!r}"
    number, last = golden.lines[-1] if golden.lines else (golden.first, "{}")
    if _kind(golden.path, number, last) != "end":
        yield f"{golden.path}:{number}: the recording breaks off: no record of type end"


def _compare(replay: Replay, golden: Golden) -> Outcome:
    """Play one case next to its recording, to the first difference."""
    outcome = Outcome(replay.case.name, 0, None)
    if golden.release is not None:
        outcome.family = family_of(replay.release)
    try:
        for mine, numbered in zip_longest(replay.rows(), golden.lines, fillvalue=None):
            number, theirs = numbered or (golden.lines[-1][0], "")
            if mine != theirs:
                outcome.difference = _differ(replay, golden, mine or "", number, theirs)
                if outcome.difference is not None:
                    return outcome
            outcome.steps += mine is not None and mine.startswith('{"type":"step"')
    except CannotFollowError as error:
        outcome.refused = str(error)
    return outcome


def _differ(
    replay: Replay, golden: Golden, mine: str, number: int, theirs: str
) -> Difference | None:
    """Compare two rows field by field."""
    place = f"{golden.path}:{number}"
    recorded = parse_line(golden.path, number, theirs) if theirs else {}
    headway = json.loads(mine) if mine else {}
    if not isinstance(recorded, dict):
        raise HeadwayError(f"{place}: not a JSON object")
    if recorded.get("type") != headway.get("type"):
        fields = ["type"]
    else:
        for name in headway:
            if name not in recorded:
                raise HeadwayError(f"{place}: {name}: missing")
            if isinstance(recorded[name], str | float | dict) and name not in _NOT_WHOLE:
                raise HeadwayError(f"{place}: {name}: cannot be {recorded[name]!r}")
        for name in recorded:
            if name not in headway:
                raise HeadwayError(f"{place}: {name}: a field that Headway does not know")
        fields = [name for name in headway if headway[name] != recorded[name]]
    if not fields:
        return None
    involved = sorted(_involved(recorded, headway, fields))
    states = replay.states(id for id in involved[:12] if 0 <= id < len(replay.requests))
    return Difference(replay.case.name, place, recorded, headway, fields=fields, states=states)


def _involved(recorded: Row, headway: Row, fields: list[str]) -> set[int]:
    """Find the requests that a difference is about, or else all that the step is about."""
    ids: set[int] = set()
    for name in fields:
        pair = [row.get(name) for row in (recorded, headway)]
        if name in {"head", "id"}:
            ids.update(id for id in pair if isinstance(id, int))
        elif all(isinstance(value, list) for value in pair):
            one, two = ({json.dumps(item) for item in value or ()} for value in pair)
            ids.update(_id(json.loads(item)) for item in one ^ two)
    if not ids:
        for name in ("id", "sched", "preempted", "finished"):
            value = headway.get(name, [])
            ids.update(map(_id, value) if isinstance(value, list) else [value])
    return ids


def _id(item: Any) -> int:
    first = item[0] if isinstance(item, list) and item else item
    return first if isinstance(first, int) else -1


def _title(row: Row) -> str:
    numbers = {"step": "step", "request": "id"}
    kind = row.get("type", "row")
    return f"{kind} {row[numbers[kind]]}" if kind in numbers else str(kind)


def _pair(recorded: Any, headway: Any) -> tuple[str, str]:
    """Show two values; of long lists what differs."""
    texts = [json.dumps(value, separators=(",", ":")) for value in (recorded, headway)]
    if max(map(len, texts)) > _WIDTH and isinstance(recorded, list) and isinstance(headway, list):
        same = sum(item in headway for item in recorded)
        texts = [
            _but([item for item in recorded if item not in headway], same),
            _but([item for item in headway if item not in recorded], same),
        ]
    return _short(texts[0]), _short(texts[1])


def _but(items: Iterable[Any], same: int) -> str:
    rest = ",".join(json.dumps(item, separators=(",", ":")) for item in items)
    return f"{same} the same{', ' if rest else ''}{rest}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
