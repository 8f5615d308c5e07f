"""Several runs of one scenario that differ in a few keys, side by side."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.scenario.scenario import Scenario
    from simulator.simulation.result import Result

_ITEM = re.compile(r"""(?:[^,"'\[\]{}()]|"[^"]*"|'[^']*')+|[\[\]{}(),"']""")


@dataclass(slots=True, frozen=True)
class Point:
    """One of the runs to compare."""

    label: str  # for tables
    folder: str  # the name of its folder
    varied: dict[str, str]  # value by dotted key, as given
    scenario: "Scenario"


def expand(
    path: Path, vary: Iterable[str], overrides: Sequence[str] = (), seed: int | None = None
) -> list[Point]:
    """Load the scenario once for every combination of the values in `vary`, the last key fastest.

    An item of `vary` is `dotted.key=value,value,...`, each value YAML; commas inside brackets or
    quotes part nothing. Raises HeadwayError with all that is wrong with any of the scenarios.
    """
    items = [split_values(item) for item in vary]
    if not items:
        raise HeadwayError("--vary: is missing; for example --vary engine.max_num_seqs=64,256")
    if messages := hidden([key for key, _ in items], overrides, seed):
        raise HeadwayError(messages)
    axes = dict(items)
    points: list[Point] = []
    wrong: dict[str, list[dict[str, str]]] = {}  # what some points vary, by what is wrong there
    for values in product(*axes.values()):
        varied = dict(zip(axes, values, strict=True))
        try:
            scenario = load_scenario(path, overrides, seed, vary=varied.items())
            label = _label(varied)
            points.append(Point(label, _folder(label, points), varied, scenario))
        except HeadwayError as error:
            for message in error.messages:
                wrong.setdefault(message, []).append(varied)
    if wrong:
        raise HeadwayError(_blamed(wrong, path, overrides, seed))
    return points


def hidden(
    keys: Sequence[str], overrides: Iterable[str], seed: int | None, searched: str = ""
) -> list[str]:
    """Name the options that would be lost, since a later --vary sets their key again.

    So does a plan that searches a key, last of all.
    """
    earlier = [("--set " + item, item.partition("=")[0]) for item in overrides]
    if seed is not None:
        earlier.append((f"--seed {seed}", "seed"))
    messages = []
    setters = [(f"--vary {key}", key) for key in keys]
    setters += [(f"the plan searches {searched} itself", searched)] if searched else []
    for name, key in setters:
        path = _path(key)
        messages += [
            f"{name}: {option} would have no effect"
            for option, other in earlier
            if _path(other)[: len(path)] == path
        ]
        earlier.append((f"--vary {key} before it", key))
    return messages


def _path(key: str) -> list[str]:
    return key.strip().split(".")


def _blamed(
    wrong: dict[str, list[dict[str, str]]], path: Path, overrides: Sequence[str], seed: int | None
) -> list[str]:
    """Add to each message the varied values that it comes with, unless it comes without any."""
    try:
        load_scenario(path, overrides, seed)
        anyway: set[str] = set()
    except HeadwayError as error:
        anyway = set(error.messages)
    told = []
    for message, where in wrong.items():
        common = [
            f"--vary {key}={value}"
            for key, value in where[0].items()
            if all(varied[key] == value for varied in where)
        ]
        known = not common or message in anyway or message.startswith("--")
        told.append(message if known else f"{message} (with {' '.join(common)})")
    return told


def split_values(item: str) -> tuple[str, list[str]]:
    """Split `key=a,b,c` into the key and its values; HeadwayError if a value is empty or twice."""
    key, _, text = item.partition("=")
    values, depth = [""], 0
    for match in _ITEM.finditer(text):
        piece = match.group()
        depth += (piece in "[{(") - (piece in "]})")
        if piece == "," and not depth:
            values.append("")
        else:
            values[-1] += piece
    values = [value.strip() for value in values]
    if not key or not all(values):
        raise HeadwayError(f"--vary {item}: must be dotted.key=value,value,...")
    if len(set(values)) < len(values):
        raise HeadwayError(f"--vary {item}: has a value twice")
    return key.strip(), values


def _label(varied: dict[str, str]) -> str:
    """Name a point by its values, with their keys where there are several."""
    if len(varied) == 1:
        return next(iter(varied.values()))
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())


def _folder(label: str, others: Iterable[Point]) -> str:
    """Make a label the name of a folder that no other point has."""
    plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-.") or "point"
    taken = {point.folder for point in others}
    return next(
        name
        for name in (plain, *(f"{plain}-{k}" for k in range(2, len(taken) + 3)))
        if name not in taken
    )


def numbers(summary: Mapping[str, Any]) -> dict[str, int | float]:
    """Give the single numbers of a summary: vLLM's words, our own, a cluster's as a whole."""
    own = summary["headway"]
    cluster = own.get("cluster", {})
    links = {f"kv_transfer_{key}": value for key, value in cluster.get("kv_transfer", {}).items()}
    values = {**summary, **own, **cluster, **links}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def encode_comparison(points: Sequence[Point], results: "Sequence[Result]") -> bytes:
    """Give the runs as CSV: a row for each, what was varied, then the numbers of its summary."""
    rows = []
    for point, result in zip(points, results, strict=True):
        rows.append({"run": point.folder, **point.varied, **numbers(result.summary())})
    columns = dict.fromkeys(key for row in rows for key in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
