"""What the /metrics of vLLM or SGLang say, or Prometheus of them: growth and means by series.

`headway run --prometheus` writes such a file, too. Counters and histograms are taken as what they
grew by, gauges as their mean. A scrape does not say when it was made: then the time of its file
counts, and `process_start_time_seconds` where there is one scrape alone.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.util.files import check_regular
from simulator.util.json_text import parse_json
from simulator.workload.traces.fields import NAMES

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
"""A metric's name, and the labels of a series."""
Series = dict[Key, list[tuple[float, float]]]
"""Times, s since 1970, and values."""
NUMBER = r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)"
SAMPLE = re.compile(rf"([a-z_:][\w:]*)(?:\{{(.*)\}})?\s+({NUMBER})(?!\S)(?:\s+(-?[\d.]+))?", re.I)
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
GROWING = ("_total", "_sum", "_count", "_bucket")
OLD_NAMES, SGLANG = NAMES["older names of metrics"], NAMES["SGLang's metrics"]
"""Metrics of SGLang 0.4 and 0.5, and vLLM's names for them; others are called alike."""
PARTS = re.compile(r"(_sum|_count|_bucket)?$")
SHORTEST = 1.0  # s between two scrapes, where only their files tell it


@dataclass(slots=True)
class Metrics:
    """What each series grew by, or was on average, by name and labels."""

    seconds: float  # that the growth took
    how: str  # these seconds are known
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    level_change: dict[str, float] = field(default_factory=dict)  # of gauges, last less first
    most: dict[str, float] = field(default_factory=dict)  # of gauges

    sglang: Mapping[str, str] = field(default_factory=dict)
    """What SGLang calls a metric of vLLM's; {}: vLLM told these metrics."""

    def told_as(self, text: str) -> str:
        """Write the names of metrics as this server has them."""
        if not self.sglang:
            return text
        found = re.sub(r"vllm:\w+", lambda match: self.sglang.get(match[0], match[0]), text)
        return found.replace("vllm:", "sglang:")

    def total(self, name: str) -> float | None:
        """Add up a metric over all its series; None where there is none."""
        found = self.values.get(name)
        return sum(found.values()) if found else None

    def mean(self, name: str) -> float:
        """Return the mean of a histogram; NaN where there is none."""
        count, total = self.total(f"{name}_count"), self.total(f"{name}_sum")
        return total / count if count and total is not None else nan


def read_metrics(
    path: Path, later: Path | None = None, seconds: float | None = None, model: str | None = None
) -> Metrics:
    """Read a scrape, two of one server, or the JSON of a range query.

    Args:
        path: the scrape, the first of two, or the query's result.
        later: the second scrape.
        seconds: between the two, or that the one covers.
        model: of several `model_name`, the one that is meant.

    Raises:
        HeadwayError: for what is no such file, and for times and counters that cannot be.
    """
    text = _read(path)
    ranged = text.lstrip().startswith("{")
    first = _of_model(path, _matrix(path, text) if ranged else _scrape(path, text), model)
    if ranged or any(points[-1][0] > points[0][0] for points in first.values()):  # OpenMetrics
        if later is not None or seconds is not None:
            raise HeadwayError(f"{path}: has times of its own, and needs no other")
        times = [time for points in first.values() for time, _ in points]
        if not times or max(times) <= min(times):
            raise HeadwayError(f"{path}: values of one moment alone: ask for a range")
        return _summed(Metrics(max(times) - min(times), "by the times in the file"), first)
    if later is None:
        seconds, how = _since_start(path, first) if seconds is None else (seconds, "as given")
        return _growth(path, {}, first, seconds, how)
    second = _of_model(later, _scrape(later, _read(later)), model)
    _check_same_server(path, first, later, second)
    how = "as given"
    if seconds is None:
        seconds = later.stat().st_mtime - path.stat().st_mtime
        how = "by the times of the files; --seconds tells it better"
        if not seconds >= SHORTEST:
            raise HeadwayError(
                f"{later}: its file is {max(seconds, 0):.3g} s younger than {path}: too little to "
                "be the time between two scrapes; say --seconds"
            )
    return _growth(later, first, second, seconds, how)


def _read(path: Path) -> str:
    """Read what a server said of itself: a byte that is no UTF-8 costs no figure beside it."""
    check_regular(path)
    try:
        return path.read_text("utf-8", "replace")
    except OSError as error:
        url = re.fullmatch(r"(https?):/+(.*)", str(path))  # a path has one of two slashes
        hint = f"; save it first: curl {url[1]}://{url[2]} > metrics.txt" if url else ""
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}{hint}") from None


def _scrape(path: Path, text: str) -> Series:
    """Read a scrape in Prometheus' text format; without times of its own."""
    found: Series = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        if match is None:
            raise HeadwayError(f"{path}:{number}: line: no metric of Prometheus: {line[:60]!r}")
        labels = tuple(sorted(LABEL.findall(match[2] or "")))
        name = OLD_NAMES.get(match[1], match[1])
        time = float(match[4]) if match[4] else 0.0
        found.setdefault((name, labels), []).append((time, float(match[3])))
    return found


def _matrix(path: Path, text: str) -> Series:
    """Read the JSON that Prometheus answers a range query with."""
    try:
        whole = parse_json(text)
    except json.JSONDecodeError as error:
        raise HeadwayError(f"{path}:{error.lineno}: line: bad JSON: {error.msg}") from None
    data: Any = whole.get("data")
    series = data.get("result") if isinstance(data, dict) else None
    if not isinstance(series, list) or data.get("resultType") != "matrix":
        raise HeadwayError(
            f"{path}:1: data.resultType: is not matrix: no result of a range query (query_range)"
        )
    found: Series = {}
    for k, one in enumerate(series):
        try:
            metric = {str(name): str(value) for name, value in one["metric"].items()}
            points = [(float(time), float(value)) for time, value in one["values"]]
        except (TypeError, KeyError, ValueError, AttributeError):
            raise HeadwayError(f"{path}:1: data.result[{k}]: no metric with values") from None
        name = OLD_NAMES.get(told := metric.pop("__name__", ""), told)
        labels = tuple(sorted(p for p in metric.items() if p[0] not in {"job", "instance"}))
        old = found.get((name, labels))
        if old and points and min(old) <= max(points) and min(points) <= max(old):
            labels = tuple(sorted(metric.items()))  # a server beside it, not a later start of it
        found.setdefault((name, labels), []).extend(points)
    return found


def _check_vllm(path: Path, found: Series) -> None:
    if not any(name.startswith(("vllm:", "sglang:")) for name, _ in found):
        more = " (ask for {__name__=~'vllm:.*|sglang:.*'}, without rate())" if found else ""
        raise HeadwayError(f"{path}:1: vllm: no metric of vLLM or SGLang in it{more}")


def as_vllm(metrics: Metrics) -> Metrics:
    """Return the metrics of SGLang under vLLM's names; of two of a name the first.

    SGLang looks up every prompt token in its cache, and before 0.4.9 counts what it has finished
    by latencies alone.
    """
    if any(name.startswith("vllm:") for name in metrics.values):
        return metrics
    names: dict[str, str] = {f"vllm:{ours}": f"sglang:{own}" for own, ours in SGLANG.items()}
    found = Metrics(metrics.seconds, metrics.how, sglang=names)
    for name, series in metrics.values.items():
        stem, part = PARTS.sub("", name), PARTS.search(name)
        own = stem.removeprefix("sglang:")
        ours = f"vllm:{SGLANG.get(own, own)}"
        told = f"{ours}{part[0] if part else ''}"
        if told not in found.values and name.startswith("sglang:"):
            names[ours] = stem
            found.values[told] = series
            if name in metrics.most:
                found.most[told] = metrics.most[name]
                found.level_change[told] = metrics.level_change[name]
    values = found.values
    ended = values.pop("vllm:request_success_total", None)
    ended = ended or values.get("vllm:e2e_request_latency_seconds_count", {})
    aborted = values.pop("vllm:aborted_total", {})
    values["vllm:request_success_total"] = ended | {
        (*labels, ("finished_reason", "abort")): count for labels, count in aborted.items()
    }
    if "vllm:prefix_cache_hits_total" in values:
        values["vllm:prefix_cache_queries_total"] = values.get("vllm:prompt_tokens_total", {})
    return found


def _of_model(path: Path, found: Series, model: str | None) -> Series:
    """Keep the series of one model."""
    _check_vllm(path, found)
    models = model_names(found)
    if model is not None and model not in models:
        there = f"there is {', '.join(models)}" if models else "it names none"
        raise HeadwayError(f"{path}: --model-name {model}: not in it; {there}")
    if model is None and len(models) > 1:
        raise HeadwayError(f"{path}: has several models, say --model-name: {', '.join(models)}")
    return {
        key: points
        for key, points in found.items()
        if model is None or dict(key[1]).get("model_name", model) == model
    }


def model_names(found: Iterable[tuple[str, Labels]]) -> list[str]:
    """Name the models that series tell of."""
    return sorted({value for _, labels in found for n, value in labels if n == "model_name"})


def _starts(found: Series) -> list[float]:
    """Return when the processes of a scrape were started, s since 1970."""
    name = "process_start_time_seconds"
    return sorted(points[-1][1] for (n, _), points in found.items() if n == name)


def _check_same_server(path: Path, first: Series, later: Path, second: Series) -> None:
    """Raise HeadwayError where one scrape cannot be taken from the other."""
    engines = [{name.partition(":")[0] for name, _ in one} for one in (first, second)]
    if not engines[0] & engines[1] & {"vllm", "sglang"}:
        raise HeadwayError(f"{later}: has metrics of another engine than {path}: two servers")
    one, other = (", ".join(model_names(found)) for found in (first, second))
    if one and other and one != other:
        raise HeadwayError(f"{later}: model_name: {other}, but {path} is of {one}: two servers")
    if _starts(first) and _starts(second) and _starts(first) != _starts(second):
        raise HeadwayError(
            f"{later}: process_start_time_seconds: another than in {path}: two servers, or one "
            "that was started again between the scrapes"
        )


def _since_start(path: Path, found: Series) -> tuple[float, str]:
    """Return how long the server has run, as its one scrape tells."""
    started = _starts(found)
    if not started:
        raise HeadwayError(
            f"{path}: does not say since when it counts: give a second scrape, or --seconds"
        )
    seconds = path.stat().st_mtime - min(started)
    if not seconds > 0:
        raise HeadwayError(f"{path}: is older than its server's start: say --seconds")
    return seconds, "since process_start_time_seconds, to the time of the file"


def _growth(path: Path, first: Series, last: Series, seconds: float, how: str) -> Metrics:
    """Take one scrape from the other."""
    if not 0 < seconds < inf:
        raise HeadwayError(f"--seconds {seconds:g}: is not more than 0")
    both: Series = {}
    for key, points in last.items():
        name, value, grows = key[0], points[-1][1], key[0].endswith(GROWING)
        before = first[key][-1][1] if key in first else 0.0
        if grows and value < before:
            raise HeadwayError(
                f"{path}: {name}: fell from {before:g} to {value:g}: the server was started "
                "again between the scrapes"
            )
        both[key] = [(0.0, before)] * (grows or key in first) + [(1.0, value)]
    return _summed(Metrics(seconds, how), both)


def _summed(found: Metrics, series: Series) -> Metrics:
    """Add the growth of counters, and of gauges mean, most and change.

    Where a counter fell, its server was started again.
    """
    for (name, labels), points in series.items():
        values = [value for _, value in sorted(points) if isfinite(value)]
        if not values:
            continue
        if name.endswith(GROWING):
            steps = pairwise(values)
            value = sum(after - before if after >= before else after for before, after in steps)
        else:
            value = sum(values) / len(values)
            change = found.level_change.get(name, 0.0)
            found.level_change[name] = change + values[-1] - values[0]
            found.most[name] = max(found.most.get(name, 0.0), *values)
        found.values.setdefault(name, {})[labels] = value
    return found
