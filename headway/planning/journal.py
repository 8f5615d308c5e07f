"""What many runs have measured, written down as each gets done: a line for each in a file.

So a command that was stopped goes on where it was. A run is known by the whole of its scenario.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular, lock_folder, write_atomic
from simulator.util.json_text import parse_json
from simulator.util.version import __version__

Row = dict[str, Any]
"""A run's numbers by name, or {"error": what was wrong}."""


class Journal:
    """A file of rows, and what it holds by key (`known`)."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it is there; its folder must be."""
        self.path = path
        self.known = read_journal(path)
        self._folder = path.parent.stat()
        self._number: int | None = None  # of the open file

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Write a row down; HeadwayError if the folder has vanished or the disk refuses."""
        self.check()
        line = json.dumps({"point": key, "row": row}).encode() + b"\n"
        try:
            if self._number is None:
                self._number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            while line:
                line = line[os.write(self._number, line) :]
        except OSError as error:
            raise HeadwayError(f"{self.path}: cannot write: {error.strerror}") from error
        self.known[key] = dict(row)

    def check(self) -> None:
        """See that what was written is still there under its name, else raise HeadwayError."""
        try:
            there = os.path.samestat(self._folder, self.path.parent.stat())
            if there and self._number is not None:
                there = os.path.samestat(os.fstat(self._number), self.path.stat())
        except FileNotFoundError:
            there = False
        except OSError as error:
            raise HeadwayError(f"{self.path}: cannot write: {error.strerror}") from error
        if not there:
            raise HeadwayError(
                f"{self.path}: was taken away or replaced while runs were written down there; "
                "stopped"
            )

    def close(self) -> None:
        """Close the file."""
        if self._number is not None:
            os.close(self._number)
            self._number = None


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Open a journal, alone: its folder is made, and locked against others of our commands.

    HeadwayError if another has it, or a line of it is damaged. The file appears with its first
    row; a folder made here that stays empty is taken away again.
    """
    with lock_folder(path.parent), closing(Journal(path)) as journal:
        yield journal


def scenario_key(scenario: Scenario, *more: object) -> str:
    """Return whether two runs are the same: by version, whole scenario and what is given."""
    return run_key([str(scenario.folder.resolve()), scenario.resolved(), *more])


def run_key(what: object) -> str:
    """Return a short name to whatever JSON can hold, and the version."""
    text = json.dumps([__version__, what], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_journal(path: Path) -> dict[str, Row]:
    """Read the rows by key; a last line that a kill cut short is taken out of the file."""
    check_regular(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HeadwayError(f"{path}: cannot read: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    rows: dict[str, Row] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry = parse_json(line)
            rows[entry["point"]] = dict(entry["row"])
        except (ValueError, KeyError, TypeError):
            raise HeadwayError(
                f"{path}:{number}: is no line of a sweep or plan; take it out, or the whole file"
            ) from None
    if len(whole) < len(data):
        write_atomic(path, whole)
    return rows
