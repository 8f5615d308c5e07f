"""Requests and steps as Parquet, written as they end: a row group for each part of a run.

One file of each table a process, `requests/part-N.parquet` and `steps/part-N.parquet`: a reader of
Parquet takes the folder for one table. Where each request's time went is not told, as that needs
steps that are forgotten.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.results.frames import columns_of, step_columns
from simulator.results.record import PartialRecord
from simulator.results.request_table import Ints, gather_requests
from simulator.util.csv_text import Signed, Words
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, one_line
from simulator.util.files import make_folders

if TYPE_CHECKING:
    from pyarrow import Table

TABLES = ("requests", "steps")


class TableParts:
    """Writes the files of one process; they get their names when they are whole."""

    def __init__(self, folder: Path, number: int, replicas: Sequence[int]) -> None:
        """Begin files of that number; `replicas` are the numbers of those that run here."""
        need_package("--tables-in", "parquet", "pyarrow")
        self._replicas = np.array(replicas)
        self._paths = {name: folder / name / f"part-{number:05d}.parquet" for name in TABLES}
        self._drafts = {
            name: path.with_name(f".{path.name}.{os.getpid()}.tmp")
            for name, path in self._paths.items()
        }
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def add(self, part: PartialRecord, ids: Ints) -> None:
        """Write a part of the run, whose requests have these numbers."""
        if len(ids):
            self._write("requests", _requests(part, ids, self._replicas))
        steps = [
            {"replica": np.full(len(log.steps), number), **step_columns(log)}
            for number, log in zip(self._replicas.tolist(), part.logs, strict=True)
            if len(log.steps)
        ]
        if steps:
            together = {name: np.concatenate([s[name] for s in steps]) for name in steps[0]}
            self._write("steps", together)

    def close(self) -> None:
        """Give the files their names."""
        try:
            self._open.close()
            for name in self._files:
                self._drafts[name].replace(self._paths[name])
        except OSError as error:
            self.drop()
            raise _unwritten(self._paths["requests"], error) from error

    def drop(self) -> None:
        """Take back what was written of files that are not whole."""
        with suppress(OSError):  # the disk is full; what it has is taken away
            self._open.close()
        for draft in self._drafts.values():
            draft.unlink(missing_ok=True)

    def _write(self, name: str, columns: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        try:
            table: Table = pa.table({key: _plain(column) for key, column in columns.items()})
            if name not in self._files:
                make_folders(self._paths[name].parent)
                writer = ParquetWriter(self._drafts[name], table.schema)
                self._files[name] = self._open.enter_context(writer)
            self._files[name].write_table(table)
        except (OSError, ValueError) as error:
            self.drop()
            raise _unwritten(self._paths[name], error) from error


def _unwritten(path: Path, error: Exception) -> HeadwayError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    return HeadwayError(f"{path}: cannot write: {why}")


def _plain(column: Any) -> Any:
    """Return a column as an array that pyarrow takes; words as texts, null where there is none."""
    import pyarrow as pa

    if isinstance(column, Words):
        return pa.array(np.array([*column.names, None], object)[column.codes], pa.string())
    return column.values if isinstance(column, Signed) else column


def check_parts(folder: Path) -> None:
    """Raise HeadwayError where a folder has such files: of two runs they would be one table."""
    if any(True for name in TABLES for _ in (folder / name).glob("*.parquet")):
        raise HeadwayError(f"--tables-in {folder}: has tables of another run; give another folder")


def _requests(part: PartialRecord, ids: Ints, replicas: Ints) -> dict[str, Any]:
    """Return the columns of requests, by the names of requests.csv."""
    table = gather_requests(part.workload, part.sent, part.logs, part.tries)
    columns = columns_of(table, ids)
    return columns | {"replica": np.where(table.replica < 0, -1, replicas[table.replica])}
