"""The load of a running server, from what its metrics say (`scrapes.py`), as a scenario."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from typing import Any

import numpy as np

from headway.traffic.scrapes import Metrics, as_vllm, model_names
from simulator.util.errors import HeadwayError
from simulator.workload.generate import INPUT_LEN, OUTPUT_LEN
from simulator.workload.traces.fields import NAMES

CACHE_FLAGS = ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching")
DEFAULT_LENGTHS = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
KNOBS = {"num_gpu_blocks": "num_gpu_blocks_override"}


@dataclass(slots=True)
class Load:
    """What was read of a server's load, and from what."""

    requests: float  # that came: finished, aborted, or still in flight
    seconds: float
    rate: float  # requests/s
    model: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    """What, its value, from what it was inferred."""
    lengths: dict[str, dict[str, Any] | int | None] = field(default_factory=dict)
    """Of input_len, output_len; None: not told."""

    def add(self, what: str, value: str, source: str) -> None:
        """Tell a figure."""
        self.lines.append((what, value, source))


def infer_load(metrics: Metrics, place: str) -> Load:
    """Work out rate, lengths, concurrency and memory; HeadwayError if no request was finished."""
    metrics = as_vllm(metrics)
    ended = metrics.values.get("vllm:request_success_total", {})
    requests = sum(
        n for labels, n in ended.items() if dict(labels).get("finished_reason") != "abort"
    )
    aborted = sum(ended.values()) - requests
    if requests <= 0:
        name = metrics.told_as("vllm:request_success_total")
        raise HeadwayError(f"{place}: {name}: no request was finished")
    levels = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    more = sum(metrics.level_change.get(name, 0.0) for name in levels)
    came = max(requests + aborted + more, 1.0)
    load = Load(came, metrics.seconds, came / metrics.seconds)
    came_by = f"{requests:,.0f} finished, {aborted:,.0f} aborted, {more:+,.0f} in flight"
    load.add("time", f"{metrics.seconds:,.1f} s", metrics.how)
    load.add("request rate", f"{load.rate:,.4g} req/s", came_by)
    for key, name in (("input_len", "prompt"), ("output_len", "generation")):
        metric = f"vllm:request_{name}_tokens"
        quantiles = _lengths(metrics, metric)
        if quantiles is None:
            _add_mean(metrics, load, key, name, requests + aborted)
            continue
        load.lengths[key] = quantiles
        value = f"mean {metrics.mean(metric):,.0f}, to {quantiles['values'][-1]:,.0f} tokens"
        load.add(key, value, f"buckets of {metric}, scaled to its mean")
    _add_concurrency(metrics, load)
    for name, metric in NAMES["latencies in metrics"].items():
        if not isnan(mean := metrics.mean(metric)):
            load.add(f"mean {name}", f"{mean * 1e3:,.1f} ms", metric)
    if queries := metrics.total("vllm:prefix_cache_queries_total"):
        hits = (metrics.total("vllm:prefix_cache_hits_total") or 0.0) / queries
        none = "not in the workload below: nobody says which prompts share what"
        load.add("prefix cache", f"{hits:.1%} of tokens found", none)
    if aborted:
        none = "in the rate below, where none is aborted"
        load.add("aborted", f"{aborted:,.0f} requests", none)
    _add_left_out(metrics, load)
    _add_engine(metrics, load)
    load.lines = [(what, value, metrics.told_as(source)) for what, value, source in load.lines]
    return load


def _add_left_out(metrics: Metrics, load: Load) -> None:
    """Name what the metrics say of a load and the scenario does not have."""
    source = "{}: not in the workload below"
    for head, metric in NAMES["in metrics"].items():
        if value := metrics.total(metric):
            load.add(head, f"{value:,.0f}", source.format(metric))
    if (answers := metrics.mean("vllm:request_params_n")) > 1:
        told = f"{answers:,.2f} by request"
        load.add("answers (n)", told, source.format("vllm:request_params_n"))
    for head, (metric, end) in NAMES["in labels of metrics"].items():
        labels = chain.from_iterable(metrics.values.get(metric, {}))
        texts = [text for key, text in labels if key.endswith(end) and text]
        if names := {name for text in texts for name in text.split(",")}:
            load.add(head, ", ".join(sorted(names)), source.format(metric))


def _add_mean(metrics: Metrics, load: Load, key: str, name: str, requests: float) -> None:
    """Where no histogram tells lengths, take the mean that the counters give, if they do."""
    metric = f"vllm:{name}_tokens_total"
    tokens = metrics.total(metric)
    if not tokens:
        load.lengths[key] = None
        none = f"no vllm:request_{name}_tokens, nor {metric}"
        load.add(key, "not recorded", f"{none}: {DEFAULT_LENGTHS[key]:,} tokens are taken")
        return
    load.lengths[key] = mean = max(round(tokens / requests), 1)
    source = f"{metric} by request that ended: no vllm:request_{name}_tokens"
    load.add(key, f"mean {mean:,} tokens", source)


LEVELS = {
    "num_requests_running": ",.1f",
    "num_requests_waiting": ",.1f",
    "kv_cache_usage_perc": ".1%",
}


def _add_concurrency(metrics: Metrics, load: Load) -> None:
    if (busy := metrics.total("vllm:e2e_request_latency_seconds_sum")) is not None:
        source = "requests' latencies over the time (Little's law)"
        load.add("concurrency", f"{busy / load.seconds:,.1f} in flight on average", source)
    for name, form in LEVELS.items():
        if value := metrics.values.get(f"vllm:{name}"):
            mean = sum(value.values()) / (len(value) if form == ".1%" else 1)
            told = f"{metrics.most.get(f'vllm:{name}', 0.0):{form}} on one engine"
            load.add(name, f"{mean:{form}}", f"mean of what was scraped, at most {told}")


def _add_engine(metrics: Metrics, load: Load) -> None:
    """Take the flags that vLLM tells of its cache, and the model's name."""
    infos = metrics.values.get("vllm:cache_config_info", {})
    series = ((name, labels) for name, found in metrics.values.items() for labels in found)
    load.model = next(iter(model_names(series)), "")
    if load.model:
        load.add("model", load.model, "label model_name")
    if metrics.sglang:
        load.engine["name"] = "sglang"
        if pools := metrics.values.get("vllm:kv_cache_tokens"):
            load.engine["num_gpu_blocks_override"] = tokens = int(max(pools.values()))
            load.add("KV cache", f"{tokens:,} tokens", "vllm:kv_cache_tokens")
    elif not infos:
        load.add("KV cache", "not recorded", "no vllm:cache_config_info")
    if not infos:
        return
    flags = dict(next(iter(infos)))
    for name in CACHE_FLAGS:
        with suppress(ValueError):  # None, or no flag
            load.engine[KNOBS.get(name, name)] = json.loads(flags.get(name, "").lower())
    size, count = load.engine.get("block_size"), load.engine.get("num_gpu_blocks_override")
    if size and count:
        load.add("KV cache", f"{size * count:,} tokens", "vllm:cache_config_info")
    engines = {(dict(one).get("engine"), dict(one).get("instance")) for one in infos}
    if len(engines) > 1:
        load.engine["data_parallel_size"] = len(engines)
        load.add("engines", str(len(engines)), "each with such a cache; rate of all")
    load.add("version, GPU", "not recorded", "vLLM's metrics do not have them")


def _lengths(metrics: Metrics, name: str) -> dict[str, Any] | None:
    """Return a histogram as quantiles: straight lines between its bounds, scaled to its mean."""
    counts: Counter[float] = Counter()
    for labels, count in metrics.values.get(f"{name}_bucket", {}).items():
        counts[float(dict(labels).get("le", "inf"))] += count  # type: ignore[assignment]
    total, mean = max(counts.values(), default=0.0), metrics.mean(name)
    if not total or isnan(mean):
        return None
    bounds = sorted(counts)
    tops = np.array([1.0, *bounds])
    tops[np.isinf(tops)] = tops[np.isfinite(tops)][-1]
    shares = np.maximum.accumulate([0.0, *(counts[bound] / total for bound in bounds)])
    rises = np.flatnonzero(np.diff(shares))
    values, at = (column[[rises[0], *(rises + 1)]] for column in (tops, shares))
    scale = mean / ((values[1:] + values[:-1]) / 2 @ np.diff(at))
    return {
        "kind": "quantiles",
        "values": [round(max(value * scale, 1.0), 1) for value in values.tolist()],
        "at": [round(share, 6) for share in at.tolist()],
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
    lines = [
        f"# From {' and '.join(sources)}: {load.requests:,.0f} requests in {load.seconds:,.1f} s.",
        f"model: {model}" if model else "# model: a shipped one, or a config.json",
        "# gpu: {name: H100-80GB}  # the metrics do not tell it; without, an A100-80GB",
    ]
    if load.engine:
        lines += ["engine:", *_pairs(load.engine)]
    count = max(round(load.requests), 1)
    lines += ["workload:", *_pairs({"num_prompts": count, "request_rate": round(load.rate, 6)})]
    for key, value in load.lengths.items():
        told = DEFAULT_LENGTHS[key] if value is None else value
        default = "  # vLLM's default: the metrics have none" if value is None else ""
        lines += [f"{line}{default}" for line in _pairs({key: told})]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"  {key}: {json.dumps(value)}" for key, value in values.items()]
