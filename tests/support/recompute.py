"""Every figure of summary.json once more, from requests, steps and scenario alone.

A second implementation on purpose: plain pandas, by the definitions of docs/metrics.md, without
anything of `simulator.results`. `run_files.not_in_files` lists what the files do not say, and why.
"""

import re
from math import inf

import numpy as np
import pandas as pd

from tests.support.recompute_engines import (
    list_servers,
    recompute_cluster,
    recompute_energy,
    recompute_engines,
)
from tests.support.recompute_trends import recompute_clients, recompute_trend
from tests.support.run_files import COMPLETED, Run, Values, flatten, share, token_times

PERCENTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}


OTHER_SCHEDULERS = (
    *("static", "hf-static", "orca", "fcfs-v0", "sarathi", "sglang", "trtllm", "tgi", "fastgen"),
)
"""Policies that are no order of vLLM's queue."""


def recompute(run: Run) -> Values:
    """Return every figure by its dotted key; of those in `not_in_files` anything."""
    found = _head(run) | _throughput(run) | _latencies(run)
    servers = list_servers(run.scenario)
    cores = [engine for engine, _ in servers for _ in range(engine["data_parallel_size"])]
    own = {"replicas": len(cores)} | recompute_engines(run, run.requests, run.steps, cores)
    own |= recompute_energy(run, run.requests, run.steps, cores)
    own |= dict(flatten(_service_levels(run, found)))
    own |= recompute_trend(run)
    own |= {"seed": run.scenario["seed"], "scenario": run.scenario["name"], "interrupted": False}
    own |= {"warmup_s": run.warmup, "cooldown_s": run.cooldown}
    own["vllm_version"] = _vllm_version([engine for engine, _ in servers])
    if run.scenario["cluster"] or run.scenario["engine"]["data_parallel_size"] > 1:
        own |= dict(flatten(recompute_cluster(run, servers), "cluster."))
    if run.requests.client.nunique() > 1:
        own |= recompute_clients(run, token_times(run))
    for column, key in (("client", "per_client"), ("priority", "per_priority")):
        if column in run.requests and run.requests[column].nunique() > 1:
            own |= dict(flatten(_per_part(run, column), f"{key}."))
    return found | {f"headway.{key}": value for key, value in own.items()}


def _per_part(run: Run, column: str) -> Values:
    """What the requests of each client, or of each priority, felt."""
    sent = run.requests[~run.requests.sent.isna()]
    if (window := _window(run)) is not None:
        sent = sent[sent.sent.between(*window)]
    bounds = _bounds(run)
    found: Values = {}
    for name in run.requests[column].dropna().unique():
        rows = sent[sent[column] == name]
        done = rows[rows.finish_reason.isin(COMPLETED)]
        part: Values = {"requests": len(rows), "completed": len(done)}
        part["output_tokens"] = int(done.output_tokens.sum())
        if bounds:
            ended = (~rows.finish_reason.isna()).sum()
            part["slo_attainment"] = _keep(done, bounds).sum() / ended if ended else None
        for latency in ("ttft", "tpot", "e2el", "queue_time"):
            rest = done[done.output_tokens > 1] if latency == "tpot" else done
            values = 1000 * rest[latency].dropna()
            part[f"mean_{latency}_ms"] = values.mean() if len(values) else None
            part[f"p99_{latency}_ms"] = np.percentile(values, 99) if len(values) else None
        found[str(name)] = part
    return found


def _vllm_version(engines: list[Values]) -> str | None:
    """Name the versions of vLLM at work, in order of the groups."""
    found = []
    for engine in engines:
        policy = engine["scheduling_policy"]
        name = policy["policy"] if isinstance(policy, dict) else policy
        if engine["name"] in ("vllm", "textbook") and name not in OTHER_SCHEDULERS:
            found.append(engine["version"] or "0.33 (newest known)")
    return ", ".join(dict.fromkeys(found)) or None


def _head(run: Run) -> Values:
    load = run.scenario["workload"]

    def told(value: float) -> float | str:
        return "inf" if value == inf else value

    return {
        "date": None,
        "backend": "headway",
        "model_id": run.scenario["model"],
        "num_prompts": len(run.requests),
        "request_rate": told(load["request_rate"]),
        "request_rate_unit": "sessions/s" if load.get("sessions") else "requests/s",
        "burstiness": told(load["burstiness"]),
        "max_concurrency": load["max_concurrency"],
    }


def _window(run: Run) -> tuple[float, float] | None:
    """What is measured of a run with a warm-up or a cool-down."""
    if not run.warmup and not run.cooldown:
        return None
    sent = run.requests.sent
    return sent.min() + run.warmup, sent.max() - run.cooldown


def _throughput(run: Run) -> Values:
    requests, done, (start, end) = run.requests, run.completed, run.span
    failed = requests[~requests.finish_reason.isna() & ~requests.finish_reason.isin(COMPLETED)]
    ended = done
    if (window := _window(run)) is not None:
        start, end = window
        ended = done[done.finish.between(start, end)]
        failed = failed[failed.sent.between(start, end)]
    tokens = ended.output_tokens.sum()
    bounds = {k: v for k, v in run.scenario["goodput"].items() if v is not None}
    good = _keep(ended, bounds)
    times = token_times(run)
    peak = None
    if times is not None:
        spoken = np.concatenate([np.zeros(0), *(times[id] for id in done.id)])
        seconds = np.floor(spoken - done.sent.min()).astype(int) if len(spoken) else [0]
        peak = float(np.bincount(seconds).max()) if len(spoken) else 0.0
    duration = end - start
    return {
        "duration": duration,
        "completed": len(ended),
        "failed": len(failed),
        "total_input_tokens": int(ended.prompt_tokens.sum()),
        "total_output_tokens": int(tokens),
        "request_throughput": share(len(ended), duration),
        "request_goodput": share(good.sum(), duration) if bounds else None,
        "output_throughput": share(tokens, duration),
        "total_token_throughput": share(tokens + ended.prompt_tokens.sum(), duration),
        "max_output_tokens_per_s": peak,
        "max_concurrent_requests": _most_at_once(done.sent, done.finish),
    }


def _keep(ended: pd.DataFrame, bounds: dict[str, float]) -> pd.Series:
    """Tell which requests keep all bounds (ms)."""
    keep = pd.Series(True, ended.index)
    for name, bound in bounds.items():
        keep &= ended[name].fillna(0.0) <= bound / 1000
    return keep


def _bounds(run: Run) -> dict[str, float]:
    """What each request is held against, ms."""
    bounds: dict[str, float] = {}
    for text in run.scenario["slo"] or []:
        if found := re.fullmatch(r"p[\d.]+_(ttft|tpot|e2el)_ms<=(.*)", text):
            bounds[found[1]] = max(float(found[2]), bounds.get(found[1], 0.0))
    goodput = {k: v for k, v in run.scenario["goodput"].items() if v is not None}
    asked = not bounds or any(text.startswith("goodput") for text in run.scenario["slo"])
    return bounds | (goodput if asked else {})


def _percentiles(levels: list[str], bounds: dict[str, float]) -> dict[str, float]:
    """Which percentiles the bounds are of, unless goodput is a level."""
    named = [re.fullmatch(r"p([\d.]+)_(ttft|tpot|e2el)_ms<=(.*)", text) for text in levels]
    means = [re.fullmatch(r"mean_(ttft|tpot|e2el)_ms<=(.*)", text) for text in levels]
    found = {f"slo_{one[1]}_mean_ms": float(one[2]) for one in means if one}
    if any(text.startswith("goodput") for text in levels):
        return found
    loosest = [one for one in named if one and float(one[3]) == bounds[one[2]]]
    return found | {f"slo_{one[2]}_percentile": float(one[1]) for one in loosest}


def _step_span(run: Run) -> list[float]:
    """Between what shares of their time steps lie with 95 %: the widest of all that is told."""
    own = run.summary["headway"]
    told = own["cluster"]["groups"].values() if "cluster" in own else [own]
    each = [one["step_times"]["interval_95"] for one in told]
    if None in each:
        return []
    spans = [span for one in each for span in one.values()]
    return [min(low for low, _ in spans), max(high for _, high in spans)]


def _service_levels(run: Run, summary: Values) -> Values:
    """How far the scenario's service levels are kept; latencies' percentiles are the summary's."""
    goodput = {k: v for k, v in run.scenario["goodput"].items() if v is not None}
    levels = run.scenario["slo"] or (["goodput>=0.99"] if goodput else [])
    if not levels:
        return {}
    if not any("completion" in text for text in levels):
        levels = [*levels, "completion>=1"]
    bounds = _bounds(run)
    done, failed = run.completed, summary["failed"]
    if (window := _window(run)) is not None:
        done = done[done.finish.between(*window)]
    count = len(done) + failed
    own: Values = {f"slo_{name}_ms": bound for name, bound in bounds.items()}
    own |= _percentiles(levels, bounds)
    own |= {
        f"slo_attainment_{name}": share(_keep(done, {name: bound}).sum(), count)
        for name, bound in bounds.items()
    }
    if bounds:
        own["slo_attainment"] = share(_keep(done, bounds).sum(), count)
    values = summary | {
        "goodput": share(_keep(done, goodput).sum(), count) if goodput else 0.0,
        "completion": share(len(done), count),
    }
    verdicts = []
    for text in levels:
        metric, sign, bound = re.fullmatch(r"([\w.]+)(<=|>=)(.*)", text).groups()
        value = values[metric]
        met = bool(value <= float(bound) if sign == "<=" else value >= float(bound))
        verdicts.append({"bound": text, "value": value, "met": met})
        if span := _step_span(run):
            ends = [value * factor for factor in span]
            if metric in ("goodput", "completion"):
                ends = [value, value]
            elif sign == ">=":
                ends = [value / factor for factor in reversed(span)]
            if metric == "goodput":
                strict = [{k: v / f for k, v in goodput.items()} for f in reversed(span)]
                ends = [share(_keep(done, within).sum(), count) for within in strict]
            verdicts[-1] |= {"ends": ends, "step_times": span}
            point = 100 * float(bound) * count / max(len(done), 1)
            if metric == "goodput" and len(done) and point <= 100:
                each = [1e3 * done[name] / most for name, most in goodput.items()]
                latest = pd.concat(each, axis=1).max(axis=1)
                if needed := np.percentile(latest.fillna(0.0), point):
                    verdicts[-1]["kept_until"] = 1 / needed
    met = all(one["met"] for one in verdicts)
    return own | {"slo": verdicts, "slo_met": met}


def _most_at_once(begin: pd.Series, end: pd.Series) -> int:
    """Count the most that are there at once; who leaves as another comes is no longer there."""
    changes = sorted([(t, 1) for t in begin.round(9)] + [(t, -1) for t in end.round(9)])
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def _latencies(run: Run) -> Values:
    done = run.completed
    if (window := _window(run)) is not None:
        done = done[done.sent.between(*window)]
    load = run.scenario["workload"]
    pools = {
        "ttft": done.ttft,
        "tpot": done.tpot[done.output_tokens > 1],
        "e2el": done.e2el,
        "queue_time": done.queue_time,
    }
    if load["max_concurrency"] is not None:
        pools["client_queue_time"] = done.client_queue_time
        if load["request_rate"] != inf:
            pools["e2el_including_client_queue"] = done.e2el + done.client_queue_time
    for name in (
        "retry_time",
        "encoder_time",
        "ec_transfer_time",
        "transfer_time",
        "decode_queue_time",
    ):
        if name in done:
            pools[name] = done[name].dropna()
    times = token_times(run)
    gaps = None
    if times is not None:
        gaps = pd.Series(np.concatenate([np.zeros(0), *(np.diff(times[id]) for id in done.id)]))
    found: Values = {}
    for name, values in (pools | {"itl": gaps}).items():
        for word in ("mean", "std", *PERCENTILES):
            found[f"{word}_{name}_ms"] = None if values is None else _statistic(word, values)
    for word, pick in (("min", np.min), ("max", np.max)):
        found[f"headway.{word}_itl_ms"] = (
            None if gaps is None else 1000 * float(pick(gaps) if len(gaps) else 0.0)
        )
    if gaps is None:  # the mean is known: it is that of all time between first and last tokens
        count = (done.output_tokens - 1).sum()
        found["mean_itl_ms"] = 1000 * share((done.e2el - done.ttft).sum(), count)
    return found


def _statistic(word: str, values: pd.Series) -> float:
    values = np.asarray(values, float) if len(values) else np.zeros(1)
    if word in PERCENTILES:
        return 1000 * float(np.percentile(values, PERCENTILES[word]))
    return 1000 * float(values.mean() if word == "mean" else values.std())
