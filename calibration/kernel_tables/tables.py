"""Find and read published tables, whole trees or flattened, and check their columns."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]


def find_table(data: Path, path: str, source: str) -> Path:
    """Find a table below a folder: as in its repository, or flat with `__` for each slash.

    `source` is the folder that flattened files may lie in, below `profiles`.
    """
    flat = path.replace("/", "__")
    for place in (data, data / "profiles" / source):
        for name in (path, flat, f"{flat}.gz"):
            if (place / name).is_file():
                return place / name
    raise HeadwayError(f"{data}: has neither {path} nor {flat} ({source})")


def has_table(data: Path, path: str, source: str) -> bool:
    """Tell whether a table is there."""
    try:
        find_table(data, path, source)
    except HeadwayError:
        return False
    return True


def read_table(data: Path, path: str, source: str, columns: Collection[str]) -> "pd.DataFrame":
    """Read a CSV or Parquet table; HeadwayError where it is missing, damaged or lacks columns."""
    import pandas as pd

    place = find_table(data, path, source)
    if place.suffix == ".parquet":
        _need_pyarrow()
    try:
        table = pd.read_parquet(place) if place.suffix == ".parquet" else pd.read_csv(place)
    except (OSError, ValueError, EOFError) as error:
        what = " ".join(str(error).split())
        raise HeadwayError(f"{place}: cannot be read as a table: {what}") from None
    if lacking := [name for name in columns if name not in table]:
        raise HeadwayError(f"{place}: lacks the columns {', '.join(lacking)}")
    return table


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise HeadwayError(
            "reading Parquet tables needs pyarrow: pip install 'headway[parquet]'"
        ) from None
