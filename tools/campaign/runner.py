"""Carries out the parts of a campaign, each a process with a limit; writes down what came of it.

Nothing is kept for the end: the record is written before and after each part.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.util import find_spec
from pathlib import Path

from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic
from tools.campaign.plan import Part

IMPORT_SECONDS = 20.0  # seconds that a part takes to import torch on a machine just started
FIT_SECONDS = 15.0  # seconds that a part is left for what follows its measuring
GRACE_SECONDS = 15.0  # seconds that a part has to end once it is told to
RECORD = "campaign.json"
GRAPH_TOKENS = "graph-tokens.txt"  # as the timings leave it
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Outcome:
    """What became of a part."""

    name: str
    status: str  # ok, failed, timeout, skipped, not installed; running: nobody lived to tell
    seconds: float = 0.0
    note: str = ""
    command: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    """A folder that is filled, what is told of it, and what became of its parts so far."""

    folder: Path
    about: Mapping[str, object] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    with_retry: bool = False  # a part went well only with its `retry`: so will the next ones

    def run(self, parts: Sequence[Part], budget: float) -> list[Outcome]:
        """Run all parts one after the other within some seconds; give what became of each."""
        until = time.monotonic() + budget
        for part in parts:
            print(f"{part.name} ...", flush=True)
            self.outcomes.append(Outcome(part.name, "running"))
            self.keep()
            last = self.outcomes[-1] = self._twice(part, until)
            print(f"  {last.status}, {last.seconds:.0f} s {last.note}", flush=True)
            self.keep()
        return self.outcomes

    def _twice(self, part: Part, until: float) -> Outcome:
        """Run a part; once more, in its other way, where it failed and there is one."""
        first = run_part(part, self, until - time.monotonic(), retry=self.with_retry)
        if first.status != "failed" or not part.retry or self.with_retry:
            return first
        set_aside(self.folder, part.leaves)
        left = min(until - time.monotonic(), part.most - first.seconds)
        second = run_part(part, self, left, retry=True)
        second.seconds += first.seconds
        second.note = f"{' '.join(part.retry)}, since: {first.note}"
        self.with_retry = second.status == "ok"
        return second

    def keep(self) -> None:
        """Write the record; where it cannot be written that is told, and the campaign goes on."""
        record = {**self.about, "parts": [asdict(outcome) for outcome in self.outcomes]}
        try:
            write_atomic(self.folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())
        except HeadwayError as error:
            print(f"  {error}", flush=True)


def run_part(part: Part, campaign: Campaign, left: float, *, retry: bool = False) -> Outcome:
    """Run one part, for no more than `left` seconds; whatever happens is told, not raised."""
    folder = campaign.folder
    found = {pattern: _largest(folder, pattern) for pattern in (*part.needs, part.extra[0])}
    if why := _why_not(part, folder, left, found):
        return why
    limit = min(part.most, left)
    budget = f"{max(limit - IMPORT_SECONDS - FIT_SECONDS, limit / 4):.0f}"
    file = found[part.needs[0]] if part.needs else ""
    places = {"{budget}": budget, "{0}": file, "{graph_tokens}": _graph_tokens(folder)}
    command = [reduce(lambda text, at: text.replace(*at), places.items(), w) for w in part.command]
    if extra := found[part.extra[0]]:
        command += [word.replace("{0}", extra) for word in part.extra[1]]
    command += part.retry if retry else ()
    log = folder / f"{part.name}.log"
    begun = time.monotonic()
    try:
        code, ended = _wait(command, log, limit)
    except OSError as error:
        return Outcome(part.name, "failed", note=str(error), command=command)
    seconds = time.monotonic() - begun
    whole = ended and bool(part.result and any(folder.glob(part.result)))
    if code == 0 or whole:
        note = f"ended at its limit of {limit:.0f} s, with what it had" if ended else ""
        return Outcome(part.name, "ok", seconds, note, command)
    status = "timeout" if ended else "failed"
    return Outcome(part.name, status, seconds, _last_line(log), command)


def _why_not(part: Part, folder: Path, left: float, found: Mapping[str, str]) -> Outcome | None:
    """Tell why a part is not begun; nothing where it can be."""
    if part.unless and any(folder.glob(part.unless)):
        return Outcome(part.name, "ok", note=f"not needed: there is a {part.unless}")
    if part.module and find_spec(part.module) is None:
        return Outcome(part.name, "not installed", note=f"{part.module} is what it needs")
    if left < part.least:
        return Outcome(part.name, "skipped", note=f"{max(left, 0.0):.0f} s were left")
    if missing := [pattern for pattern in part.needs if not found[pattern]]:
        return Outcome(part.name, "skipped", note=f"there is no {', '.join(missing)}")
    return None


def _graph_tokens(folder: Path) -> str:
    """Read up to how many tokens steps with prompts are to be CUDA graphs, 0: nobody measured."""
    try:
        return str(int((folder / GRAPH_TOKENS).read_text()))
    except (OSError, ValueError):
        return "0"


def _largest(folder: Path, pattern: str) -> str:
    """Name the largest file of a pattern; nothing where there is none."""
    files = [*folder.glob(pattern)] if pattern else []
    return str(max(files, key=lambda file: file.stat().st_size).resolve()) if files else ""


def set_aside(folder: Path, name: str) -> None:
    """Rename what a part has left, since none writes over what another measured."""
    if name and (folder / name).exists():
        number = len([*folder.glob(f"{name}-before-*")]) + 1
        (folder / name).rename(folder / f"{name}-before-{number}")


def _wait(command: Sequence[str], log: Path, limit: float) -> tuple[int, bool]:
    """Run a command into a log; give its exit code, and whether it had to be ended."""
    this = os.getpid()
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prepare(this),  # noqa: PLW1509  # a campaign has one thread
        )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit), False
    for sign in (signal.SIGINT, signal.SIGKILL):  # the first lets it write down what it has
        os.killpg(process.pid, sign)
        try:
            process.wait(GRACE_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    return process.wait(), True


def _prepare(parent: int) -> None:
    """Let a part hear of Ctrl-C, which a campaign in a shell's background ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it does (Linux).

    A part that outlives its campaign would hold the GPU's memory.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was said
        os._exit(1)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:160] if lines else "no output"
