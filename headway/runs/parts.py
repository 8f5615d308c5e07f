"""Tables in parts, `requests/part-N.parquet` and `steps/...`, read whole or by row group."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, one_line

if TYPE_CHECKING:
    import pandas as pd


def count_rows(folder: Path) -> int:
    """Count the rows of a table in parts; 0 where there is none."""
    return sum(file.metadata.num_rows for file in _files(folder)) if folder.is_dir() else 0


def join_parts(folder: Path, words: Sequence[str]) -> "pd.DataFrame":
    """Read a table in parts whole, in order of its rows; columns of `words` are texts."""
    import pandas as pd
    import pyarrow as pa

    pieces: dict[str, list[Any]] = {}
    for group in row_groups(folder):
        for name in group.column_names:
            column = group[name].combine_chunks()
            whole = column.cast("string") if name in words else column.to_numpy(False)
            pieces.setdefault(name, []).append(whole)
    if not pieces:
        raise HeadwayError(f"{folder}: damaged: a folder without parts of a table")
    columns = {}
    for name in [*pieces]:
        parts = pieces.pop(name)
        if name in words:
            columns[name] = pa.chunked_array(parts).dictionary_encode().to_pandas().array
        else:
            columns[name] = np.concatenate(parts)
    order = ("id",) if "id" in columns else ("start", "replica")
    rows = np.lexsort([columns[name] for name in order])
    return pd.DataFrame({name: columns.pop(name)[rows] for name in [*columns]}, copy=False)


def row_groups(folder: Path) -> Iterator[Any]:
    """Yield the row groups of a table's parts."""
    for file in _files(folder):
        for number in range(file.num_row_groups):
            try:
                yield file.read_row_group(number)
            except (OSError, ValueError) as error:
                raise HeadwayError(f"{folder}: damaged: {one_line(error)}") from None


def _files(folder: Path) -> Iterator[Any]:
    """Open the parts of a table one after the other."""
    need_package(str(folder), "parquet", "pyarrow")
    from pyarrow.parquet import ParquetFile

    for path in sorted(folder.glob("part-*.parquet")):
        try:
            with ParquetFile(path) as file:
                yield file
        except (OSError, ValueError) as error:
            raise HeadwayError(f"{path}: damaged: {one_line(error)}") from None
