"""The load of a running vLLM server, from what its /metrics say, or Prometheus of them.

`headway run --prometheus` writes such a file, too. Counters and histograms are taken as what they
grew by, gauges as their mean. A scrape does not say when it was made: then the time of its file
counts, and `process_start_time_seconds` where there is one scrape alone.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError
from simulator.util.json_text import parse_json
from simulator.workload.generate import INPUT_LEN, OUTPUT_LEN

Labels = tuple[tuple[str, str], ...]
Point = tuple[float, float]
"""A time, s since 1970, and a value."""
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?[\d.]+))?")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
GROWING = ("_total", "_sum", "_count", "_bucket")
OLD_NAMES = {"vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc"}
CACHE_FLAGS = {
    "block_size": int,
    "num_gpu_blocks": int,
    "gpu_memory_utilization": float,
    "enable_prefix_caching": str,
}
DEFAULT_LENGTHS = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
SHORTEST = 1.0  # s between two scrapes, where only their files tell it
KNOBS = {"num_gpu_blocks": "num_gpu_blocks_override"}


@dataclass(slots=True)
class Metrics:
    """What each series grew by, or was on average, by name and labels."""

    seconds: float  # that the growth took
    how: str  # these seconds are known
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    level_change: dict[str, float] = field(default_factory=dict)  # of gauges, last less first
    most: dict[str, float] = field(default_factory=dict)  # of gauges

    def total(self, name: str) -> float | None:
        """Add up a metric over all its series; None where there is none."""
        found = self.values.get(name)
        return sum(found.values()) if found else None


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
    if text.lstrip().startswith("{"):
        if later is not None or seconds is not None:
            raise HeadwayError(f"{path}: a range query has times of its own, and needs no other")
        return _of_range(path, _of_model(path, _matrix(path, text), model))
    first = _of_model(path, _scrape(path, text), model)
    if any(points[-1][0] > points[0][0] for points in first.values()):  # OpenMetrics with times
        if later is not None or seconds is not None:
            raise HeadwayError(f"{path}: has times of its own, and needs no other")
        return _of_range(path, first)
    if later is None:
        seconds, how = _since_start(path, first) if seconds is None else (seconds, "as told")
        start: dict[tuple[str, Labels], list[Point]] = {}
        return _growth(path, start, first, seconds, how)
    second = _of_model(later, _scrape(later, _read(later)), model)
    _check_same_server(path, first, later, second)
    how = "as told"
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
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HeadwayError(f"{path}: is no text") from None


Series = dict[tuple[str, Labels], list[Point]]


def _scrape(path: Path, text: str) -> Series:
    """Read a scrape in Prometheus' text format; without times of its own."""
    found: Series = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = SAMPLE.match(line)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise HeadwayError(f"{path}:{number}: line: no metric of Prometheus: {line[:60]!r}")
        labels = tuple(sorted(LABEL.findall(match[2] or "")))
        name = OLD_NAMES.get(match[1], match[1])
        time = float(match[4]) if match[4] else 0.0
        found.setdefault((name, labels), []).append((time, value))
    _check_vllm(path, found)
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
        name = metric.pop("__name__", "")
        labels = tuple(sorted((n, v) for n, v in metric.items() if n not in {"job", "instance"}))
        found.setdefault((OLD_NAMES.get(name, name), labels), []).extend(points)
    _check_vllm(path, found)
    return found


def _check_vllm(path: Path, found: Series) -> None:
    if not any(name.startswith("vllm:") for name, _ in found):
        more = " (ask for {__name__=~'vllm:.*'}, without rate())" if found else ""
        raise HeadwayError(f"{path}:1: vllm: no metric of vLLM in it{more}")


def _of_model(path: Path, found: Series, model: str | None) -> Series:
    """Keep the series of one model."""
    models = _models(found)
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


def _models(found: Iterable[tuple[str, Labels]]) -> list[str]:
    """Name the models that series tell of."""
    return sorted({value for _, labels in found for n, value in labels if n == "model_name"})


def _starts(found: Series) -> list[float]:
    """Return when the processes of a scrape were started, s since 1970."""
    name = "process_start_time_seconds"
    return sorted(points[-1][1] for (n, _), points in found.items() if n == name)


def _check_same_server(path: Path, first: Series, later: Path, second: Series) -> None:
    """Raise HeadwayError where one scrape cannot be taken from the other."""
    one, other = (", ".join(_models(found)) for found in (first, second))
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
    found = Metrics(seconds, how)
    for (name, labels), points in last.items():
        before = first.get((name, labels), [(0.0, 0.0)])[-1][1]
        value = points[-1][1]
        if name.endswith(GROWING):
            if value < before:
                raise HeadwayError(
                    f"{path}: {name}: fell from {before:g} to {value:g}: the server was started "
                    "again between the scrapes"
                )
            value -= before
        elif first:
            _add_level(found, name, [before, value])
            value = (before + value) / 2
        else:
            _add_level(found, name, [value])
        found.values.setdefault(name, {})[labels] = value
    return found


def _add_level(found: Metrics, name: str, values: Sequence[float]) -> None:
    """Note how a gauge moved."""
    found.level_change[name] = found.level_change.get(name, 0.0) + values[-1] - values[0]
    found.most[name] = max(found.most.get(name, 0.0), *values)


def _of_range(path: Path, series: Series) -> Metrics:
    """Add up what each series grew by; where it fell, its server was started again."""
    times = [time for points in series.values() for time, _ in points]
    if not times or max(times) <= min(times):
        raise HeadwayError(f"{path}: values of one moment alone: ask for a range")
    found = Metrics(max(times) - min(times), "by the times in the file")
    for (name, labels), points in series.items():
        points.sort()
        values = [value for _, value in points if isfinite(value)]
        if not values:
            continue
        if name.endswith(GROWING):
            steps = pairwise(values)
            value = sum(after - before if after >= before else after for before, after in steps)
        else:
            value = sum(values) / len(values)
            _add_level(found, name, values)
        found.values.setdefault(name, {})[labels] = value
    return found


@dataclass(slots=True)
class Load:
    """What was read of a server's load, and from what."""

    requests: float
    seconds: float
    rate: float  # requests/s
    lines: list[tuple[str, str, str]]  # what, its value, from what it was inferred
    lengths: dict[str, dict[str, Any] | int | None]  # of input_len, output_len; None: not told
    engine: dict[str, Any]
    model: str = ""


def infer_load(metrics: Metrics, place: str) -> Load:
    """Work out rate, lengths, concurrency and memory; HeadwayError if no request was finished."""
    ended = metrics.values.get("vllm:request_success_total", {})
    requests = sum(
        n for labels, n in ended.items() if dict(labels).get("finished_reason") != "abort"
    )
    aborted = sum(ended.values()) - requests
    if requests <= 0:
        raise HeadwayError(f"{place}: vllm:request_success_total: no request was finished")
    levels = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    more = sum(metrics.level_change.get(name, 0.0) for name in levels)
    came = max(requests + aborted + more, 1.0)
    load = Load(requests, metrics.seconds, came / metrics.seconds, [], {}, {})
    add = load.lines.append
    add(("time", f"{metrics.seconds:,.1f} s", metrics.how))
    add(("request rate", f"{load.rate:,.4g} req/s",
         f"{requests:,.0f} finished, {aborted:,.0f} aborted, {more:+,.0f} in flight"))  # fmt: skip
    for key, name in (("input_len", "prompt"), ("output_len", "generation")):
        metric = f"vllm:request_{name}_tokens"
        quantiles = _lengths(metrics, metric)
        if quantiles is None:
            _add_mean(metrics, load, key, name, requests)
            continue
        load.lengths[key] = quantiles
        add((key, f"mean {_mean(metrics, metric):,.0f}, to {quantiles['values'][-1]:,.0f} tokens",
             f"buckets of {metric}, scaled to its mean"))  # fmt: skip
    _add_concurrency(metrics, requests, load)
    for metric, name in (
        ("time_to_first_token_seconds", "TTFT"),
        ("inter_token_latency_seconds", "ITL"),
        ("e2e_request_latency_seconds", "E2EL"),
    ):
        mean = _mean(metrics, f"vllm:{metric}")
        if not isnan(mean):
            add((f"mean {name}", f"{mean * 1e3:,.1f} ms", f"vllm:{metric}"))
    queries = metrics.total("vllm:prefix_cache_queries_total")
    if queries:
        hits = (metrics.total("vllm:prefix_cache_hits_total") or 0.0) / queries
        add(("prefix cache", f"{hits:.1%} of tokens found",
             "not in the workload below: nobody says which prompts share what"))  # fmt: skip
    _add_engine(metrics, load)
    return load


def _add_mean(metrics: Metrics, load: Load, key: str, name: str, requests: float) -> None:
    """Where no histogram tells lengths, take the mean that the counters give, if they do."""
    metric = f"vllm:{name}_tokens_total"
    tokens = metrics.total(metric)
    if not tokens:
        load.lengths[key] = None
        none = f"no vllm:request_{name}_tokens, nor {metric}"
        load.lines.append((key, "not told", f"{none}: {DEFAULT_LENGTHS[key]:,} tokens are taken"))
        return
    load.lengths[key] = mean = max(round(tokens / requests), 1)
    source = f"{metric} by finished request: no vllm:request_{name}_tokens"
    load.lines.append((key, f"mean {mean:,} tokens", source))


def _add_concurrency(metrics: Metrics, requests: float, load: Load) -> None:
    busy = metrics.total("vllm:e2e_request_latency_seconds_sum")
    if busy is not None:
        mean = busy / load.seconds
        source = "requests' latencies over the time (Little's law)"
        load.lines.append(("concurrency", f"{mean:,.1f} in flight on average", source))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        value = metrics.values.get(f"vllm:{name}")
        if value:
            mean = sum(value.values()) / (len(value) if name.endswith("perc") else 1)
            text = f"{mean:.1%}" if name.endswith("perc") else f"{mean:,.1f}"
            most = metrics.most.get(f"vllm:{name}", 0.0)
            told = f"{most:.1%}" if name.endswith("perc") else f"{most:,.0f} on one engine"
            load.lines.append((name, text, f"mean of what was scraped, at most {told}"))


def _add_engine(metrics: Metrics, load: Load) -> None:
    """Take the flags that vLLM tells of its cache, and the model's name."""
    infos = metrics.values.get("vllm:cache_config_info", {})
    series = ((name, labels) for name, found in metrics.values.items() for labels in found)
    load.model = next(iter(_models(series)), "")
    if load.model:
        load.lines.append(("model", load.model, "label model_name"))
    if not infos:
        load.lines.append(("KV cache", "not told", "no vllm:cache_config_info"))
        return
    flags = dict(next(iter(infos)))
    for name, kind in CACHE_FLAGS.items():
        with suppress(ValueError):
            if (word := flags.get(name, "None")) not in {"None", ""}:
                value: Any = word == "True" if kind is str else kind(word)
                load.engine[KNOBS.get(name, name)] = value
    size, count = load.engine.get("block_size"), load.engine.get("num_gpu_blocks_override")
    if size and count:
        load.lines.append(("KV cache", f"{size * count:,} tokens", "vllm:cache_config_info"))
    engines = {dict(labels).get("engine") for labels in infos}
    if len(engines) > 1:
        load.lines.append(("engines", str(len(engines)), "each with such a cache; rate of all"))
    load.lines.append(("version, GPU", "not told", "vLLM's metrics do not have them"))


def _mean(metrics: Metrics, name: str) -> float:
    count = metrics.total(f"{name}_count")
    total = metrics.total(f"{name}_sum")
    return total / count if count and total is not None else float("nan")


def _lengths(metrics: Metrics, name: str) -> dict[str, Any] | None:
    """Return a histogram as quantiles: straight lines between its bounds, scaled to its mean."""
    counts: dict[float, float] = {}
    for labels, count in metrics.values.get(f"{name}_bucket", {}).items():
        bound = float(dict(labels).get("le", "inf"))
        counts[bound] = counts.get(bound, 0.0) + count
    total, mean = max(counts.values(), default=0.0), _mean(metrics, name)
    if not total or isnan(mean):
        return None
    values, at, before = [1.0], [0.0], 1.0
    for bound in sorted(counts):
        share = min(counts[bound] / total, 1.0)
        top = bound if isfinite(bound) else before
        if share > at[-1]:
            if at[-1] == 0.0:
                values[0] = before
            values.append(top)
            at.append(share)
        before = top
    pieces = zip(pairwise(values), pairwise(at), strict=True)
    drawn = sum((low + high) / 2 * (to - since) for (low, high), (since, to) in pieces)
    scale = mean / drawn
    return {
        "kind": "quantiles",
        "values": [round(max(value * scale, 1.0), 1) for value in values],
        "at": [round(share, 6) for share in at[:-1]] + [1.0],
    }


def load_text(load: Load) -> str:
    """Describe what was inferred, and from what, in lines for a terminal."""
    width = max(len(value) for _, value, _ in load.lines)
    return "\n".join(f"{what:<22}{value:<{width}}  {source}" for what, value, source in load.lines)


def load_figures(load: Load) -> dict[str, Any]:
    """Return what was inferred, for JSON: requests, s, requests/s, tokens, knobs of the engine."""
    own = {"requests": load.requests, "span_s": load.seconds, "request_rate": load.rate}
    return own | load.lengths | {"engine": load.engine, "model": load.model or None}


def scenario_text(load: Load, model: str | None, sources: Sequence[str]) -> str:
    """Write a scenario with this load; what the metrics do not tell is a comment."""
    head = [
        f"# From {' and '.join(sources)}: {load.requests:,.0f} requests in {load.seconds:,.1f} s."
    ]
    lines = [*head, f"model: {model}" if model else "# model: a shipped one, or a config.json"]
    lines.append("# gpu: {name: H100-80GB}  # vLLM's metrics do not tell it; without, an A100-80GB")
    if load.engine:
        lines += ["engine:", *_pairs(load.engine)]
    count = max(round(load.requests), 1)
    lines += ["workload:", *_pairs({"num_prompts": count, "request_rate": round(load.rate, 6)})]
    for key, value in load.lengths.items():
        if value is None:
            lines.append(
                f"  {key}: {DEFAULT_LENGTHS[key]}  # vLLM's default: the metrics have none"
            )
        else:
            lines += _pairs({key: value})
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"  {key}: {json.dumps(value)}" for key, value in values.items()]
