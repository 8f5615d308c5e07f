"""Columns of values as they stand in files, JSON or text, made numbers, times and names.

What is wrong with a value is told by its place, as `tell(place, what is wrong)`. Texts that are all
plain are converted at once; otherwise one by one.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite, nan

import numpy as np

from simulator.util.from_mapping import short_repr
from simulator.workload.traces.fields import NO_DATE, parse_date, units_in
from simulator.workload.traces.format import Numbers, name_problem
from simulator.workload.workload import Floats, Ints

Tell = Callable[[int, str], object]
NOTHING = {"", "-", "none", "null", "nan"}
LARGEST = 1e15  # tokens
WHOLE = "a whole number such as 64"
NEAREST = 1e-6  # s: a time that is so little below 0 is rounded
LATEST = 9e18  # ns since 1970
PLAIN = frozenset("0123456789.eE+-")
STAMPS = re.compile(
    r"(?:(?:19|20)\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?,)++", re.ASCII
)
"""Dates and times that numpy reads as they are meant, in UTC where they name no zone."""
DECIMALS = re.compile(r"(?:\d+(?:\.\d*)?,)++", re.ASCII)
"""Numbers, among which no date needs to be looked for."""
# What looks like a date, be it one that can be read or not.
DATED = re.compile(r"\s*(\d+[-/.]\d+[-/.]\d|\d+:\d\d|[A-Z][a-z]{2},? )")
THOUSANDS = re.compile(r"\d{1,3}(\.\d{3})+")


def counts(
    values: Sequence[object], tell: Tell, least: float, what: str, *, dotted: bool = False
) -> Ints:
    """Return whole numbers, LARGEST where nothing is told: also of `12.0`, which tables make.

    `dotted`: dots may mark thousands, so that one before three digits is told.
    """
    if (plain := as_whole(values)) is not None and plain.max() < LARGEST:
        return plain
    found = numbers(values, tell, what)
    whole = np.isfinite(found) & (found == np.floor(found)) & (np.abs(found) < LARGEST)
    marked = [dotted and _marks_thousands(value) for value in values]
    good = whole & (found >= least) & ~np.array(marked, np.bool_)
    for k in np.flatnonzero(~good & ~np.isnan(found)).tolist():
        less = "" if whole[k] else f" is not {what}"
        less = " is negative" if whole[k] and found[k] < least else less
        why = ": its dot may mark thousands; write it without one"
        tell(k, f"{short_repr(values[k])}{less}{why * _marks_thousands(values[k])}")
    return np.where(whole, found, LARGEST).astype(np.int64)


def _marks_thousands(value: object) -> bool:
    return bool(THOUSANDS.fullmatch(str(value).strip()))


def numbers(values: Sequence[object], tell: Tell, what: str = "a number such as 1.5") -> Floats:
    """Return numbers, NaN for none."""
    kinds = {*map(type, values)}
    with suppress(ValueError, OverflowError):
        if kinds <= {int, float} or (kinds == {str} and PLAIN.issuperset("".join(values))):  # type: ignore[arg-type]
            return np.array(list(map(float, values)), np.float64)  # type: ignore[arg-type]
    return np.array([_number(k, value, tell, what) for k, value in enumerate(values)], np.float64)


def _number(k: int, value: object, tell: Tell, what: str) -> float:
    """Return one number, NaN for none."""
    plain = value
    if isinstance(value, str):
        plain = value.strip()
        if plain.lower() in NOTHING:
            return nan
        plain = plain if PLAIN.issuperset(plain) else None
    elif value is None:
        return nan
    if not isinstance(plain, bool) and isinstance(plain, int | float | str):
        with suppress(ValueError, OverflowError):
            return float(plain)
    comma = isinstance(value, str) and re.search(r"\d,\d", value)
    why = ": its comma may mark thousands or decimals; write it without one" if comma else ""
    tell(k, f"{short_repr(value)} is not {what}{why}")
    return nan


def spans(values: Sequence[object], tell: Tell) -> Floats:
    """Return lengths of time, in the column's unit, NaN for none."""
    found = numbers(values, tell)
    for k in np.flatnonzero(np.isinf(found) | (found < -NEAREST)).tolist():
        less = "negative" if found[k] < 0 else "not finite"
        tell(k, f"{short_repr(values[k])} is {less}")
    return found


def clock(values: Sequence[object], per_second: float | None, tell: Tell) -> tuple[Numbers, float]:
    """Return times and how many units a second has; dates count in nanoseconds."""
    text = joined(values)
    if STAMPS.fullmatch(text):
        with suppress(ValueError):  # a wrong one is named below, by its line
            return _nanoseconds(text), 1e9
    if not DECIMALS.fullmatch(text):  # a look at each cell takes 3 s a million
        values = [None if str(v).strip().lower() in NOTHING else v for v in values]
        dates = [date_of(value) for value in values]
        texts = (value for value in values if isinstance(value, str))
        if any(date is not None for date in dates) or any(map(DATED.match, texts)):
            for k, date in enumerate(dates):
                if date is None and values[k] is not None:
                    tell(k, f"{short_repr(values[k])} {NO_DATE}")
            gaps = any(value is None for value in values)
            return np.array([date or (nan if gaps else 0) for date in dates]), 1e9
    found: Numbers | None = as_whole(values)
    if found is None and {*map(type, values)} == {int}:
        with suppress(OverflowError):  # nanoseconds since 1970 are more than a float holds
            found = np.array(values, np.int64)
    found = numbers(values, tell) if found is None else found
    for k in np.flatnonzero(np.isinf(found) | (found < 0)).tolist():
        less = "is negative" if found[k] < 0 else "is not finite"
        tell(k, f"{short_repr(values[k])} {less}")
    if per_second is None:
        known = found[~np.isnan(found)]
        per_second = units_in(float(known[0])) if len(known) else 1.0
    return found, per_second


def _nanoseconds(text: str) -> Numbers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that other zones become UTC
        texts = text.replace("+00:00,", ",")[:-1].split(",")  # faster than numpy's way with a zone
        return np.array(texts, "datetime64[ns]").astype(np.int64)


def date_of(value: object) -> int | None:
    """Read a date and time, as a text or an object: ns since 1970; None if it is a number."""
    if value is None or isinstance(value, int | float):
        return None
    text = str(value).strip()
    if not text[:1].isdigit() or text.replace(".", "", 1).isdigit():
        return None
    try:
        if STAMPS.fullmatch(f"{text},"):
            return int(_nanoseconds(f"{text},")[0])
        found = 1000 * parse_date(text)
    except ValueError:
        return None
    return found if abs(found) < LATEST else None


def names(values: Sequence[object], untold: str, tell: Tell) -> list[str]:
    """Return names, `untold` for none."""
    found = [untold if value is None or value == "" else str(value) for value in values]
    wrong = {name: why for name in {*found} if (why := name_problem(name))}
    kinds = {*map(type, values)} & {bool, list, dict}
    for k, value in enumerate(values if wrong or kinds else ()):
        if why := wrong.get(found[k], "is no name" if type(value) in kinds else ""):
            tell(k, f"{short_repr(value)} {why}")
    return found


def joined(values: Sequence[object]) -> str:
    """Return the values, a comma behind each; "" unless all are texts without a comma."""
    try:
        text = ",".join(values) + ","  # type: ignore[arg-type]
    except TypeError:
        return ""
    return text if text.count(",") == len(values) else ""


def as_whole(values: Sequence[object]) -> Ints | None:
    """Return whole numbers, where all are texts of digits alone."""
    text = joined(values)
    data = np.frombuffer(text.encode(), np.uint8)
    if text[:1] in ",x" or ",," in text or not (((data >= 48) & (data < 58)) | (data == 44)).all():
        return None
    return np.fromstring(text[:-1], np.int64, sep=",")


def is_plain(value: object, whole: bool) -> bool:
    """Tell a finite number, 0 or more; where it is to be whole, one that is."""
    try:
        found = float(str(value))
    except ValueError:
        return False
    fits = not whole or (found < LARGEST and found.is_integer())
    return found >= 0 and isfinite(found) and fits
