"""Tables in Parquet, read by pyarrow: the same columns as in a CSV."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, one_line

MAGIC = b"PAR1"


def parquet_names(path: Path) -> tuple[str, ...]:
    """Give the columns of a Parquet file; none of any other file."""
    if not path.is_file():  # to open a pipe waits for who writes
        return ()
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                return ()
    except OSError:
        return ()  # told by who reads it
    return tuple(_open(path).schema_arrow.names)


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows, counted from 1 on; dates as Python's."""
    number = 0
    try:
        for batch in _open(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise HeadwayError(f"{path}:{number + 1}: cannot be read: {one_line(error)}") from None


def _open(path: Path) -> Any:
    need_package(str(path), "parquet", "pyarrow.parquet")
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{path}: cannot be read: {one_line(error)}") from None
