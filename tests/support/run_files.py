"""A run's folder as a table of requests, one of steps, a summary and a scenario."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

COMPLETED = ["stop", "length"]
Values = dict[str, Any]


@dataclass
class Run:
    """A run's folder, as it is read: times in seconds."""

    summary: Values
    requests: pd.DataFrame  # with sent, scheduled, first_token and finish
    steps: pd.DataFrame  # with replica and end
    scenario: Values
    warmup: float = 0.0
    cooldown: float = 0.0

    @property
    def completed(self) -> pd.DataFrame:
        return self.requests[self.requests.finish_reason.isin(COMPLETED)]

    @property
    def span(self) -> tuple[float, float]:
        """From the first request sent to the end of the last step or request."""
        start = self.requests.sent.min()
        if np.isnan(start):
            return 0.0, 0.0
        return start, float(np.nanmax([start, self.requests.finish.max(), self.steps.end.max()]))

    @property
    def leapt(self) -> bool:
        return bool((self.steps.steps > 1).any())


def read_run(folder: Path, warmup: float = 0.0, cooldown: float = 0.0) -> Run:
    """Read a folder that was written as Parquet, which keeps every digit."""
    requests = pd.read_parquet(folder / "requests.parquet")
    requests["finish_reason"] = requests.finish_reason.astype(object)
    requests["sent"] = requests.arrival + requests.client_queue_time
    again = requests.retry_time.fillna(0.0) if "retry_time" in requests else 0.0
    requests["entered"] = requests.sent + again
    requests["scheduled"] = requests.entered + requests.queue_time
    requests["first_token"] = requests.sent + requests.ttft
    requests["finish"] = requests.sent + requests.e2el
    steps = pd.read_parquet(folder / "steps.parquet")
    if "replica" not in steps:
        steps["replica"] = 0
    steps["end"] = steps.start + steps.duration
    summary = json.loads((folder / "summary.json").read_text())
    scenario = yaml.safe_load((folder / "scenario.yaml").read_text())
    return Run(summary, requests, steps, scenario, warmup, cooldown)


def flatten(values: Values, above: str = "") -> Iterator[tuple[str, Any]]:
    """Spell out a summary as dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{above}{key}.")
        elif value and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            yield from flatten({str(k): one for k, one in enumerate(value)}, f"{above}{key}.")
        else:
            yield above + key, value


def share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def token_times(run: Run) -> dict[int, np.ndarray] | None:
    """Return when the tokens of the completed requests came out; None where that cannot be told.

    A request that was in every step of its replica from its first token to its last has a token at
    the end of each. Whether it was is seen by counting them.
    """
    if run.leapt or run.scenario["engine"]["speculative_config"]:
        return None
    ends = {number: np.sort(rows.end) for number, rows in run.steps.groupby("replica")}
    times = {}
    together = "delivery_time" in run.requests  # a static batch that gives its answers at once
    for row in run.completed.itertuples():
        if together:
            times[row.id] = np.full(row.output_tokens, row.finish)
            continue
        steps = ends[row.replica]
        slack = 1e-9  # between two sums of the same floats; steps are longer
        first = np.searchsorted(steps, row.first_token - slack)
        last = np.searchsorted(steps, row.finish + slack)
        if last - first != row.output_tokens:
            return None
        times[row.id] = steps[first:last]
    return times


def not_in_files(run: Run) -> dict[str, str]:
    """Say which keys, by patterns, the files of a run do not tell, and why."""
    engine, cluster = run.scenario["engine"], run.scenario["cluster"] or {}
    times, requests = token_times(run), run.requests
    changes = bool(cluster.get("failures") or cluster.get("autoscaling"))
    preempted = bool(requests.preemptions.sum())
    shared = preempted or bool(requests.cached_tokens.sum())
    groups = (cluster.get("groups") or {}).values()
    apart = any(group.get("kv_role") for group in groups)
    encoders = any(group.get("ec_role") for group in groups)
    others = any(group.get("gpu") for group in groups)  # whose steps cost by a profile
    given_up = requests.finish_reason.isin(["shed", "timeout"]).any()
    tried = given_up or requests.get("retry_time", pd.Series([0.0])).any()
    cut = times is not None and any(requests.output_tokens[~requests.id.isin(times)])
    itl, peak = r"((std|median|p[\d.]+)|headway\.(min|max))_itl_ms", "max_output_tokens_per_s"
    share_of_clients = r"headway\.(jain|service_difference).*"
    stored = r"headway\.(memory_efficiency|internal_fragmentation)"
    waiting = r"headway\..*(mean|max)_waiting"
    host = r"headway\.(.*prefix_cache_h.*|offload.*|loaded_blocks)"
    of_cluster = r"headway\.(cluster\..*|replicas|gpu_busy_fraction|mfu|bandwidth_utilization"
    of_cluster += r"|power_w|(joules|wh|kg_co2)_per.*)"
    ahead = engine["async_scheduling"] or engine["pipeline_parallel_size"] > 1
    limits = (
        (True, r"headway\.(schema|version|warnings|diagnosis.*|engines.*)", "no metrics"),
        (True, r"headway\.host\..*", "what the cost model was read from"),
        (
            True,
            r"headway\.(.*\.)?(profile|step_times.*)",
            "the name of what the cost model was read from",
        ),
        (True, r"headway\.cluster\.(\w*tries\w*|failures|scalings)", "one row for all tries"),
        (
            (run.scenario["cost"] or {}).get("kind") != "linear" or others,  # that cannot tell
            r"headway\.(.*\.)?(host_share|gpu_busy_without_host)",
            "how many prompts a step computes",
        ),
        (times is None, f"{itl}|{peak}|{share_of_clients}", "when each token came out"),
        ("delivery_time" in requests, share_of_clients, "when each token was computed"),
        (cut, share_of_clients, "tokens of requests that did not complete"),
        (run.leapt, r"headway\..*kv_cache_usage.*", "blocks at the first step of a row only"),
        (
            run.leapt or shared or apart or encoders or changes,
            stored,
            "tokens stored, of leaps or shared ones",
        ),
        (ahead, stored, "a step counts who was there as it was decided"),
        (engine["speculative_config"], r"spec_decode_.*", "drafts are in no table"),
        (
            engine["speculative_config"],
            rf"(headway\.)?\w+_itl_ms|{peak}",
            "tokens of a step are one chunk",
        ),
        (run.scenario["workload"]["frontend"], waiting, "when a request passed the front end"),
        (
            engine["pipeline_parallel_size"] > 1
            or (ahead and engine["scheduling_policy"] == "sglang"),
            r"headway\..*max_waiting",
            "when each batch was decided",
        ),
        (ahead and preempted, waiting, "preempted before its token is out"),
        (engine["kv_offloading_size"], host, "what went to the host; cached_tokens are of both"),
        (
            run.scenario["workload"]["sessions"],
            r"headway\.(stationary|trend.*|suggested_warmup_s)",
            "whether a turn came before or after an end at the same time, but for rounding",
        ),
        (given_up, r"headway\.(stationary|trend.*|suggested_warmup_s)", "when clients gave up"),
        (tried, waiting, "tries before the last waited, too"),
        (changes, f"{of_cluster}|{waiting}", "which replicas there were, and when"),
        (engine["multimodal_config"], r"headway\.encod.*", "what a step encodes"),
        (encoders, f"{of_cluster}|{waiting}", "what encoders did and sent"),
        (apart, f"{of_cluster}|{waiting}", "the producer of a request, and what it did there"),
    )
    return {pattern: reason for holds, pattern, reason in limits if holds}
