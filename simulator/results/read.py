"""The files that commands wrote, read back: what is wrong is told by its place, as HeadwayError.

Tables come whole, as DataFrames, or row by row where a message must name the line.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isinf, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import check_type

if TYPE_CHECKING:
    import pandas as pd

WRITES = "`headway run` and `headway compare` write such folders"
COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "cached_tokens")
"""Columns of requests.csv without an empty cell: whole numbers."""
NEVER_EMPTY = ("id", "prompt_tokens", "output_tokens")
WORDS = ("client", "finish_reason")
NEEDS_PYARROW = "needs pyarrow; pip install headway[parquet]"


def read_yaml(text: str) -> object:
    """Read YAML; raise ValueError where it is none."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError("it is no YAML") from error


def load_mapping(path: Path, parse: Callable[[str], object]) -> Mapping[str, Any]:
    """Read a file that holds one mapping; raise HeadwayError where it is none, or missing."""
    try:
        found = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except ValueError as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None
    if not isinstance(found, Mapping):
        raise HeadwayError(f"{path}: damaged: it holds no keys")
    return found


def check_numbers(path: Path, values: Mapping[str, Any]) -> None:
    """Raise HeadwayError where one of a file's values is neither null nor a number."""
    for name, value in values.items():
        wrong, message = check_type(name, float, value)
        if wrong and value is not None:
            raise HeadwayError(f"{path}: {message}")


def find_table(folder: Path, name: str) -> Path:
    """Give the path of a table: CSV, else Parquet if that is there."""
    path, other = folder / f"{name}.csv", folder / f"{name}.parquet"
    return other if other.exists() and not path.exists() else path


def read_table(folder: Path, name: str, columns: Sequence[str] = ()) -> "pd.DataFrame":
    """Read a table, CSV or Parquet, whose `columns` must be there and hold numbers."""
    import pandas as pd

    path = find_table(folder, name)
    words = dict.fromkeys(WORDS, "category")
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path, engine="pyarrow")
        else:
            frame = pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except ImportError:
        raise HeadwayError(f"{path}: {NEEDS_PYARROW}") from None
    except (OSError, ValueError) as error:  # pandas' ParserError is a ValueError
        raise HeadwayError(f"{path}: damaged: {' '.join(str(error).split())}") from None
    check_columns(frame, columns, path)
    return frame if len(frame) else frame.astype(dict.fromkeys(columns, float))


def check_columns(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns, and numbers in them."""
    import pandas as pd

    need_columns(frame, columns, where)
    for name in columns if len(frame) else ():  # without rows there is no telling
        lacking = name in NEVER_EMPTY and frame[name].isna().any()
        if lacking or not pd.api.types.is_numeric_dtype(frame[name]):
            raise HeadwayError(f"{where}: damaged: {name} holds what is no number")


def need_columns(frame: "pd.DataFrame", columns: Sequence[str], where: object) -> None:
    """Raise HeadwayError unless the table has these columns."""
    if missing := [name for name in columns if name not in frame]:
        raise HeadwayError(f"{where}: has no column {', '.join(missing)}")


def read_rows(folder: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, CSV or Parquet, and the place of each.

    Raises HeadwayError where the table is missing or damaged.
    """
    path = find_table(folder, name)
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"line {reader.line_num} has not as many cells as the first")
                yield f"{path}:{reader.line_num}", row
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; {WRITES}") from None
    except (ValueError, csv.Error) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise HeadwayError(f"{path}: {NEEDS_PYARROW}") from None
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for batch in batches:
            for number, row in enumerate(batch.to_pylist()):
                yield f"{path}: row {number}", {k: "" if v is None else v for k, v in row.items()}
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{path}: damaged: {error}") from None


def read_cell(place: str, column: str, value: Any) -> float | None:
    """Read a cell; an empty one, or NaN, is None. Raise HeadwayError where it is no number."""
    try:
        number = float(value) if value != "" else nan
        if isnan(number):
            return None
        if isinf(number) or (column in COUNTS and (number < 0 or number % 1)):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        kind = "whole number" if column in COUNTS else "number"
        raise HeadwayError(f"{place}: {column}: {value!r} is no {kind}") from None
    return number
