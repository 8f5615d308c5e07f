"""Requests and steps as Parquet, written as they end: a row group for each part of a run.

One file of each table a process, `requests/part-N.parquet` and `steps/part-N.parquet`: a reader of
Parquet takes the folder for one table. Steps are kept for as long as requests that saw them are to
be written, to tell where the time of these went.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import DRAFT, STEP, SWAP, Log
from simulator.results.breakdown import break_down
from simulator.results.frames import columns_of, seat_columns, step_columns, tier_columns
from simulator.results.record import PartialRecord
from simulator.results.request_table import RETRY, Floats, Ints, gather_requests
from simulator.util.csv_text import Signed, Words
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, one_line
from simulator.util.files import make_folders

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetWriter

TABLES = ("requests", "steps")
SPANS = {"step_rows": STEP, "swap_rows": SWAP, "draft_rows": DRAFT}
"""Rows of a log that tell of requests of several parts."""


class TableParts:
    """Writes the files of one process; they get their names when they are whole."""

    def __init__(
        self,
        folder: Path,
        number: int,
        replicas: Sequence[int],
        cores: Sequence[EngineSpec],
        *,
        retries: bool = False,
    ) -> None:
        """Begin files of that number; `replicas` are the numbers of those that run here."""
        need_package("--tables-in", "parquet", "pyarrow")
        self._replicas, self._retries = np.array(replicas), retries
        self._costs, self._engines = [c.cost for c in cores], [c.engine for c in cores]
        self._held = [dict.fromkeys(SPANS, b"") for _ in cores]
        self._paths = {name: folder / name / f"part-{number:05d}.parquet" for name in TABLES}
        self._drafts = {
            name: path.with_name(f".{path.name}.{os.getpid()}.tmp")
            for name, path in self._paths.items()
        }
        self._files: dict[str, ParquetWriter] = {}
        self._open = ExitStack()

    def add(self, part: PartialRecord, ids: Ints, rest: Sequence[Log], before: float) -> None:
        """Write a part of the run, whose requests have these numbers.

        `rest` are the logs that go on; no request that is to come was sent before the time
        `before`, s.
        """
        logs = [self._whole(number, log, before) for number, log in enumerate(part.logs)]
        if len(ids):
            for log, later in zip(logs, rest, strict=True):
                log.step_rows += later.step_rows  # the last of its requests' steps may be there
            self._write("requests", self._requests(part, ids, logs))
        steps = [
            {"replica": np.full(len(log.steps), number), **step_columns(log)}
            for number, log in zip(self._replicas.tolist(), part.logs, strict=True)
            if len(log.steps)
        ]
        if steps:
            together = {name: np.concatenate([s[name] for s in steps]) for name in steps[0]}
            self._write("steps", together)

    def _whole(self, number: int, log: Log, before: float) -> Log:
        """Return a part's log with earlier steps, and keep what later parts ask for."""
        held = self._held[number]
        rows = {name: bytearray(held[name] + getattr(log, name)) for name in SPANS}
        steps = np.frombuffer(bytes(rows["step_rows"]), STEP)
        begin = float(np.min(steps["start"], initial=before, where=steps["end"] >= before))
        for name, kind in SPANS.items():
            found = np.frombuffer(bytes(rows[name]), kind)
            held[name] = found[found["start"] >= begin].tobytes()
        changes: dict[str, Any] = rows
        return replace(log, **changes)

    def _requests(self, part: PartialRecord, ids: Ints, logs: Sequence[Log]) -> dict[str, Any]:
        """Return the columns of requests, by the names of requests.csv."""
        table = gather_requests(part.workload, part.sent, part.logs, part.tries)
        times: dict[str, Floats] = {RETRY: table.retry_time} if self._retries else {}
        plain = gather_requests(part.workload, part.sent, logs)
        times |= break_down(plain, logs, self._costs)
        parts = {**times, **seat_columns(logs, len(ids))}
        tiers = tier_columns(self._engines, part.logs, len(ids))
        columns = columns_of(table, ids, parts=parts, producers=tiers)
        there = table.replica >= 0
        return columns | {"replica": np.where(there, self._replicas[table.replica], -1)}

    def close(self) -> None:
        """Rename the drafts to their final names."""
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
                for left in self._paths[name].parent.glob(f".{self._paths[name].name}.*.tmp"):
                    left.unlink(missing_ok=True)  # of a worker that was killed
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
