"""A scenario at many points: what `--vary`, the block `sweep` and `vary` of a plan set."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

from simulator.results.service_levels import service_levels
from simulator.scenario.load import Source, load_scenario, source_name
from simulator.scenario.scenario import Scenario
from simulator.util.errors import FieldError, HeadwayError, Kind

_ITEM = re.compile(r"""(?:[^,"'\[\]{}()]|"[^"]*"|'[^']*')+|[\[\]{}(),"']""")

LONGEST = 60  # letters of a variant's name, and of a folder's
FILES = ("comparison.csv", "comparison.png", "replications.csv")
"""What stands beside the folders of runs that are compared."""
Axes = Sequence[tuple[str, Sequence[str]]]
"""Dotted keys and the values to try, as YAML."""
Factor = Sequence[Mapping[str, str]]
"""Levels of a design of experiments: in each, values by dotted key that are set together."""


@dataclass(slots=True)
class DesignPoint:
    """A scenario with some keys set, or what is wrong with it."""

    varied: dict[str, str]  # value by dotted key, as YAML
    scenario: Scenario | None = None  # None: it cannot be loaded
    errors: Sequence[str] = ()
    key: str = ""  # that a plan searches for it; "": the one that the problem names
    faults: Sequence[FieldError] = ()  # what is wrong by its keys

    @property
    def error(self) -> str:
        """All that is wrong, in one line."""
        return "; ".join(self.errors)

    def has_fault(self, *kinds: Kind) -> bool:
        """Say whether something of these kinds is wrong."""
        return any(fault.kind in kinds for fault in self.faults)

    @property
    def label(self) -> str:
        """Name it by the keys that it sets."""
        return " ".join(f"{k}={v}" for k, v in self.varied.items()) or "the scenario"


P = TypeVar("P", bound=DesignPoint)


@dataclass(slots=True, frozen=True)
class Alternative:
    """One of the runs to compare."""

    label: str  # for tables
    folder: str  # the name of its folder
    varied: dict[str, str]  # value by dotted key, as given
    scenario: Scenario


def expand(
    path: Path,
    vary: Iterable[str] = (),
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    variants: Iterable[str] = (),
) -> list[Alternative]:
    """Load the scenario once for every combination of the values in `vary`, the last key fastest,
    or once for each of the named `variants`.

    An item of `vary` is `dotted.key=value,value,...`, one of `variants` `NAME: dotted.key=value,
    dotted.key=value`, each value YAML; commas inside brackets or quotes part nothing. Raises
    HeadwayError with all that is wrong with any of the scenarios.
    """
    axes = [split_values(item) for item in vary]
    named = [split_variant(item) for item in variants]
    if not axes and not named:
        raise HeadwayError(
            "--vary: is missing; for example --vary engine.max_num_seqs=64,256, or, for each run, "
            "--variant 'many: engine.max_num_seqs=256'"
        )
    if axes and named:
        raise HeadwayError("--variant: cannot be used with --vary")
    names = [name for name, _ in named]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise HeadwayError(f"--variant: two are named {twice[0]}")
    refuse_overridden([key for key, _ in axes], overrides, seed)
    for _, varied in named:
        refuse_overridden([*varied], overrides, seed, option="--variant")
    if named:
        points = [
            load_point(path, varied, overrides, seed, DesignPoint, option=f"--variant {name}:")
            for name, varied in named
        ]
    else:
        points = load_points(path, factors(axes), overrides, seed, DesignPoint)
    if any(point.errors for point in points):
        options = [f"--variant {name}:" for name in names] or ["--vary"] * len(points)
        raise HeadwayError(_errors_with_values(points, options, path, overrides, seed))
    found: list[Alternative] = []
    for number, point in enumerate(points):
        assert point.scenario is not None
        label = names[number] if named else _label(point.varied)
        folder = _folder(label, {other.folder for other in found})
        found.append(Alternative(label, folder, point.varied, point.scenario))
    return found


def factors(axes: Axes) -> list[Factor]:
    """Let each key be varied by itself."""
    return [[{key: value} for value in values] for key, values in axes]


def load_points(
    path: Source,
    factors: Sequence[Factor],
    overrides: Sequence[str],
    seed: int | None,
    kind: type[P],
) -> list[P]:
    """Load the scenario once for every combination of levels, whatever is wrong with it.

    The last factor varies fastest. Raises HeadwayError where a key is in two factors.
    """
    points = []
    for levels in product(*factors):
        keys = [key for level in levels for key in level]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise HeadwayError(
                f"{source_name(path)}: sweep: a key is varied twice: {', '.join(twice)}"
            )
        varied = {key: value for level in levels for key, value in level.items()}
        points.append(load_point(path, varied, overrides, seed, kind))
    return points


def load_point(
    path: Source,
    varied: dict[str, str],
    overrides: Sequence[str],
    seed: int | None,
    kind: type[P],
    *,
    option: str = "--vary",
) -> P:
    """Load the scenario with some keys set, as `option` says."""
    try:
        scenario = load_scenario(path, overrides, seed, vary=varied.items(), vary_option=option)
        service_levels(scenario)  # what is wrong with them is told before the runs
        return kind(varied, scenario)
    except HeadwayError as error:
        return kind(varied, None, error.messages, faults=error.faults)


def need_runnable(points: Sequence[DesignPoint]) -> None:
    """Raise HeadwayError where not one of the points can be run, one has a key or value that is
    misspelt, or --no-own-code refuses one.
    """
    need_known_values(points)
    if refused := [point for point in points if point.has_fault("own code")]:
        raise HeadwayError(dict.fromkeys(text for point in refused for text in point.errors))
    if all(point.scenario is None for point in points):
        raise HeadwayError(text for _, text in fold_errors(points))


def need_known_values(points: Sequence[DesignPoint]) -> None:
    """Raise HeadwayError for keys and values that are misspelt, and for what no model in the points
    takes, as 3 GPUs for 32 heads.

    What only does not fit together passes, as a model and a GPU: another point may do.
    """
    good = {item for point in points if point.scenario for item in point.varied.items()}
    wrong = [point for point in points if point.has_fault("key", "value")]
    lone = [point for point in points if point.varied.items() - good]
    if wrong := wrong + [point for point in lone if point.has_fault("model")]:
        raise HeadwayError(text for _, text in fold_errors(wrong))


LIKEWISE = 3  # points that a message names beside the first
HIDDEN = "\0"  # in place of a varied value


def fold_errors(points: Sequence[DesignPoint]) -> Iterator[tuple[str, str]]:
    """Yield the label of each point that cannot be run, and why; those alike share a message.

    Alike are errors that differ in the varied values alone.
    """
    alike: dict[str, list[DesignPoint]] = {}
    for point in points:
        if point.error:
            alike.setdefault(_hide_values(point.error, point.varied), []).append(point)
    for first, *others in alike.values():
        yield first.label, first.error + _likewise([other.label for other in others])


def _hide_values(text: str, varied: Mapping[str, str]) -> str:
    for value in sorted(varied.values(), key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", HIDDEN, text)
    return text


def _likewise(labels: Sequence[str]) -> str:
    """Name the points whose error is like another's."""
    more = f" and {len(labels) - LIKEWISE} more" if len(labels) > LIKEWISE else ""
    return f" (likewise {', '.join(labels[:LIKEWISE])}{more})" if labels else ""


def refuse_overridden(
    keys: Sequence[str],
    overrides: Iterable[str],
    seed: int | None,
    searched: str = "",
    option: str = "--vary",
) -> None:
    """Raise HeadwayError for options that would be lost: a later `option` sets their key again.

    So does a plan that searches a key, last of all.
    """
    earlier = [("--set " + item, item.partition("=")[0]) for item in overrides]
    if seed is not None:
        earlier.append((f"--seed {seed}", "seed"))
    messages = []
    setters = [(f"{option} {key}", key) for key in keys]
    setters += [(f"the plan searches {searched} itself", searched)] if searched else []
    for name, key in setters:
        path = _path(key)
        messages += [
            f"{name}: {lost} would have no effect"
            for lost, other in earlier
            if _path(other)[: len(path)] == path
        ]
        earlier.append((f"{option} {key} before it", key))
    if messages:
        raise HeadwayError(messages)


def _path(key: str) -> list[str]:
    return key.strip().split(".")


def _errors_with_values(
    points: Sequence[DesignPoint],
    options: Sequence[str],
    path: Path,
    overrides: Sequence[str],
    seed: int | None,
) -> list[str]:
    """Add to each message the varied values that it comes with, unless it comes without any.

    Of those that differ in varied values alone, the first names the others' points.
    """
    anyway = load_point(path, {}, overrides, seed, DesignPoint).errors
    alike: dict[str, list[tuple[str, str]]] = {}
    for message in dict.fromkeys(message for point in points for message in point.errors):
        failed = [
            (point.varied, option)
            for point, option in zip(points, options, strict=True)
            if message in point.errors
        ]
        (first, option), *rest = failed
        others = [varied for varied, _ in rest]
        common = [
            f"{option} {key}={value}"
            for key, value in first.items()
            if all(varied.get(key) == value for varied in others)
        ]
        known = not common or message in anyway or message.startswith("--")
        text = message if known else f"{message} (with {' '.join(common)})"
        alike.setdefault(_hide_values(text, first), []).append((text, _label(first)))
    return [first + _likewise([label for _, label in rest]) for (first, _), *rest in alike.values()]


def split_variant(item: str) -> tuple[str, dict[str, str]]:
    """Split `NAME: key=value, key=value` into the name and the values by key; without keys it is
    the scenario as it is. A name may have colons. HeadwayError where it is none of both.
    """
    parted = re.fullmatch(r"(.*?):\s*((?:[\w.-]+\s*=.*)?)", item.strip(), re.DOTALL)
    name, text = parted.groups() if parted else ("", "")
    settings = [part.partition("=") for part in _split_commas(text)] if text.strip() else []
    name = name.strip()
    varied = {key.strip(): value.strip() for key, _, value in settings}
    sound = all(key.strip() and value.strip() for key, _, value in settings)
    if not name or "=" in name or not sound or len(varied) < len(settings):
        raise HeadwayError(
            f"--variant {item}: must be 'NAME: dotted.key=value, dotted.key=value', with each key "
            "once"
        )
    if len(name) > LONGEST:
        raise HeadwayError(f"--variant {name[:20]}...: its name has more than {LONGEST} letters")
    return name, varied


def split_values(item: str) -> tuple[str, list[str]]:
    """Split `key=a,b,c` into the key and its values; HeadwayError if a value is empty or twice."""
    key, _, text = item.partition("=")
    values = [value.strip() for value in _split_commas(text)]
    if not key or not all(values):
        raise HeadwayError(f"--vary {item}: must be dotted.key=value,value,..., as seed=1,2")
    if len(set(values)) < len(values):
        raise HeadwayError(f"--vary {item}: has a value twice")
    return key.strip(), values


def _split_commas(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    values, depth = [""], 0
    for match in _ITEM.finditer(text):
        piece = match.group()
        depth += (piece in "[{(") - (piece in "]})")
        if piece == "," and not depth:
            values.append("")
        else:
            values[-1] += piece
    return values


def as_yaml(value: object) -> str:
    """Write a value as YAML, plain words without quotes; numpy's numbers and paths as such."""
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    try:
        return json.dumps(value)
    except TypeError:
        raise HeadwayError(f"{value!r}: is no value of a scenario") from None


def _label(varied: dict[str, str]) -> str:
    """Name an alternative by its values, with their keys where there are several."""
    if len(varied) == 1:
        return next(iter(varied.values()))
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items())


def _folder(label: str, taken: set[str]) -> str:
    """Make a label the name of a folder that no other alternative has."""
    plain = re.sub(r"[^\w.=+-]+", "-", label)[:LONGEST].strip("-.") or "point"
    used = {name.lower() for name in (*taken, *FILES)}  # some disks do not tell case
    return next(
        name
        for name in (plain, *(f"{plain}-{k}" for k in range(2, len(used) + 3)))
        if name.lower() not in used
    )


def axes_of(vary: Mapping[str, Sequence[object]] | None) -> Axes:
    """Return the values of dotted keys as texts; HeadwayError unless they are lists of them."""
    if vary is not None and not isinstance(vary, Mapping):
        raise HeadwayError(f"vary: must be a mapping of dotted keys to lists, not {vary!r}")
    for key, values in (vary or {}).items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise HeadwayError(f"vary: {key}: is not a list of values, but {values!r}")
        if not [*values]:
            raise HeadwayError(f"vary: {key}: has no values")
    return [(key, [as_yaml(value) for value in values]) for key, values in (vary or {}).items()]
