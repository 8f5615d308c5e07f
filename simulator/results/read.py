"""The files that a run wrote, read one value at a time: what is wrong is told by its place."""

import csv
from collections.abc import Callable, Iterator, Mapping
from math import isinf, isnan, nan
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import check

WRITES = "`headway run` and `headway compare` write such folders"
COUNTS = ("id", "prompt_tokens", "output_tokens", "preemptions", "cached_tokens")
"""Columns without an empty cell: whole numbers."""


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


def need_numbers(path: Path, told: Mapping[str, Any]) -> None:
    """Raise HeadwayError where one of a file's values is neither null nor a number."""
    for name, value in told.items():
        wrong, message = check(name, float, value)
        if wrong and value is not None:
            raise HeadwayError(f"{path}: {message}")


def read_rows(folder: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, CSV or Parquet, and the place of each.

    Raises HeadwayError where the table is missing or damaged.
    """
    path = folder / f"{name}.csv"
    if not path.exists() and (other := folder / f"{name}.parquet").exists():
        yield from _parquet_rows(other)
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
        raise HeadwayError(f"{path}: needs pyarrow; pip install headway[parquet]") from None
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
