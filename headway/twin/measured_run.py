"""What a replay has measured, in files and in words.

The files are a measured run: `headway validate --measured` and `headway calibrate --from-requests`
read it as it stands.
"""

import json
import sys
from collections.abc import Mapping
from io import FileIO
from itertools import count
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from headway.planning.runs import encode_csv
from headway.twin.replay import GAUGES, Answered, Replayed
from simulator.build.engine_spec import EngineSpec
from simulator.results.metrics import PERCENTILES, describe
from simulator.results.sample import Sample
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import write_together
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.workload import Floats, Workload

LATE = 5.0  # ms, P99, beyond which a client or a simulated server measures itself, too
UNASKED = 0.05  # share of the prompts' tokens that may hit without the workload's doing


def write_measured(
    found: Replayed,
    workload: Workload,
    out: Path,
    engine: tuple[Scenario, EngineSpec] | None = None,
) -> list[Path]:
    """Write what was measured: requests.csv, summary.json, errors.csv, metrics.csv.

    With `engine`, of which the server is, runs.csv makes a measured run of it.
    """
    good = [k for k, one in enumerate(found.requests) if not one.error]
    if not good:
        first = next((one.error for one in found.requests), "the workload is empty")
        raise HeadwayError(f"--url: no request was answered, no file is written: {first}")
    sent = [(number, one) for number, one in enumerate(found.requests) if not isnan(one.sent)]
    start = min(one.sent for _, one in sent)
    failures = len(good) < len(sent)
    rows = [_row(one, workload, number, start, failures=failures) for number, one in sent]
    rows.sort(key=lambda row: float(str(row["arrival_s"])))
    files = {"requests.csv": encode_csv(rows)}
    files["summary.json"] = json.dumps(summary(found, workload), indent=1).encode()
    if engine is not None:
        files["runs.csv"] = encode_csv([_run(found, workload, good, *engine)])
    wrong = [(one.sent - start, one.error) for one in found.requests if one.error]
    if wrong:
        rows = [{"sent_s": "" if isnan(s) else f"{s:.6f}", "error": error} for s, error in wrong]
        files["errors.csv"] = encode_csv(rows)
    if found.gauges:
        names = ("time_s", *GAUGES)
        polls = [(f"{time - start:.6f}", *values) for time, *values in found.gauges]
        files["metrics.csv"] = encode_csv([dict(zip(names, row, strict=True)) for row in polls])
    return write_together(out, files)


def _row(
    one: Answered, workload: Workload, number: int, start: float, *, failures: bool
) -> dict[str, object]:
    """Return a row of requests.csv: times in s, from `start` on; with `failures` what failed."""
    row: dict[str, object] = {
        "arrival_s": f"{one.sent - start:.6f}",
        "prompt_tokens": int(workload.prompt_tokens[number]),
        "output_tokens": one.tokens,
        "ttft_s": "" if one.error else f"{one.first - one.sent:.6f}",
        "e2e_s": f"{one.end - one.sent:.6f}",
    }
    if workload.client is not None:
        row["client_id"] = workload.client[number]
    if failures:
        asked = int(workload.output_tokens[number])
        row |= {"max_tokens": asked if one.error else "", "error": " ".join(one.error.split())}
    return row


class Draft:
    """The rows of requests.csv in the order in which requests end, written as each does.

    The file appears with the first answer. Each row is one write, so that a kill loses none. A disk
    that is full ends the draft and costs no answer.
    """

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.workload = workload
        self.earlier = sorted(folder.glob("requests.draft-*.csv"))
        names = (folder / f"requests.draft-{number}.csv" for number in count(1))
        self.path = next(path for path in names if not path.exists())
        self.failed: list[dict[str, object]] = []  # rows before the first answer
        self.broken = False

    def __enter__(self) -> "Draft":
        """Begin; there is no file yet."""
        return self

    def add(self, number: int, answer: Answered) -> None:
        """Append a request that has ended."""
        if self.broken:
            return
        row, began = _row(answer, self.workload, number, 0.0, failures=True), self.path.exists()
        if answer.error and not began:
            self.failed.append(row)
            return
        text = encode_csv([*self.failed, row])
        self.failed.clear()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileIO(self.path, "a") as file:
                file.write(text.split(b"\n", 1)[1] if began else text)
        except OSError as error:
            self.broken = True
            print(f"warning: {self.path}: {error.strerror}: has no later answers", file=sys.stderr)

    def __exit__(self, wrong: type[BaseException] | None, *_: object) -> None:
        """Remove the file where the final ones are there."""
        if wrong is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            print(f"{self.path}: the answers until then", file=sys.stderr)


def _run(
    found: Replayed, workload: Workload, good: list[int], scenario: Scenario, spec: EngineSpec
) -> dict[str, object]:
    """Return the row of runs.csv: the engine as the scenario says, or rather as the server does."""
    engine = scenario.engine
    prompts = sum(int(workload.prompt_tokens[number]) for number in good)
    hits = sum(found.requests[number].cached for number in good) / prompts
    return {
        "run_id": scenario.name or "replay",
        "gpu": spec.gpu.name,
        "tp": engine.tensor_parallel_size,
        "pp": engine.pipeline_parallel_size,
        "model": scenario.known_model,
        "engine_version": found.version,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": spec.max_model_len,
        "kv_capacity_tokens": found.kv_capacity_tokens or spec.num_gpu_blocks * engine.block_size,
        "prefix_caching": engine.enable_prefix_caching,
        "prefix_hit_frac": f"{hits:.6f}" if hits else "",
        "clock": "client",
        "n_requests": len(good),
        "per_request_file": "requests.csv",
    }


def summary(found: Replayed, workload: Workload) -> dict[str, Any]:
    """Tell what was measured by the keys of `vllm bench serve`'s result; times in ms."""
    good = [one for one in found.requests if not one.error]
    prompts = workload.prompt_tokens[[not one.error for one in found.requests]]
    span = max(one.end for one in good) - min(one.sent for one in good)
    asked, tokens = int(prompts.sum()), sum(one.tokens for one in good)
    told: dict[str, Any] = {
        "backend": "openai",
        "model_id": found.model,
        "engine_version": found.version,
        "num_prompts": len(found.requests),
        "max_concurrency": workload.max_concurrency,
        "duration": span,
        "completed": len(good),
        "failed": found.failed,
        "hung_up": len(found.requests) - len(good) - found.failed,
        "total_input_tokens": asked,
        "total_output_tokens": tokens,
        "total_cached_tokens": sum(one.cached for one in good),
        "request_throughput": len(good) / span,
        "output_throughput": tokens / span,
        "total_token_throughput": (asked + tokens) / span,
    }
    for name, values in _latencies(good).items():
        told |= describe(name, Sample(values), PERCENTILES)
    told["p99_sent_late_ms"] = float(np.percentile([one.late for one in good], 99)) * 1e3
    if found.server_late == found.server_late:
        told["p99_server_late_ms"] = found.server_late * 1e3
    told["prompt_seed"] = found.prompt_seed
    hits, queries = found.hits
    if queries > 0:
        told["prefix_hit_share"] = hits / queries
        told["implied_hit_share"] = (shared_prefix_tokens(workload) or 0) / workload.total_input
    return told


def lateness_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say by how much a measurement is off by itself, where that is more than a little."""
    notes = []
    for key, words in (
        ("p99_sent_late_ms", "the client sent requests {:.1f} ms after their time (P99)"),
        ("p99_server_late_ms", "the simulated server answered {:.1f} ms late (P99)"),
    ):
        late = summary.get(key)
        if isinstance(late, int | float) and late > LATE:
            notes.append(f"{words.format(late)}: latencies may be off by as much")
    hits, implied = (summary.get(f"{name}_hit_share") for name in ("prefix", "implied"))
    if isinstance(hits, float) and isinstance(implied, float) and hits > implied + UNASKED:
        notes.append(
            f"{hits:.0%} of the prompts' tokens hit the server's prefix cache, {implied:.0%} at "
            "most by what the workload shares: it has seen these prompts before (another "
            "--prompt-seed draws others), or others use it"
        )
    return notes


def _latencies(good: list[Answered]) -> dict[str, Floats]:
    """Return latencies, s; those that no request has are left out."""
    several = [one for one in good if one.tokens > 1]
    columns = {
        "ttft": np.array([one.first - one.sent for one in good]),
        "tpot": np.array([(one.end - one.first) / (one.tokens - 1) for one in several]),
        "itl": np.concatenate([np.asarray(one.gaps) for one in good]),
        "e2el": np.array([one.end - one.sent for one in good]),
    }
    return {name: values for name, values in columns.items() if len(values)}


def table(found: Replayed, workload: Workload) -> str:
    """Tell what was measured, in the words of `vllm bench serve`."""
    told = summary(found, workload)
    lines = [
        f"{found.model}{f', vLLM {found.version}' if found.version else ''}: "
        f"{told['completed']:,} of {told['num_prompts']:,} requests answered in "
        f"{told['duration']:.1f} s, {told['request_throughput']:.2f} requests/s, "
        f"{told['output_throughput']:,.0f} output tokens/s",
        f"{'ms':>8}{'mean':>11}{'median':>11}{'P99':>11}",
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        keys = [f"{word}_{name}_ms" for word in ("mean", "median", "p99")]
        if keys[0] in told:
            lines.append(f"{name.upper():>8}" + "".join(f"{told[key]:>11,.2f}" for key in keys))
    lines.append(
        f"sent {told['p99_sent_late_ms']:.1f} ms after their time (P99); prompts drawn with "
        f"--prompt-seed {told['prompt_seed']}"
    )
    lines += [f"warning: {note}" for note in lateness_notes(told)]
    if found.unseen:
        since = f"from {found.gauges[-1][0]:.1f} s on " if found.gauges else ""
        lines.append(
            f"warning: /metrics: {found.unseen}: the server's queue, KV cache and prefix hits are "
            f"{since}not known"
        )
    if told["hung_up"]:
        lines.append(f"repeated hang-ups, not in these figures: {told['hung_up']:,}")
    if causes := [one.error for one in found.requests if one.failed]:
        lines += [f"failed requests, not in these figures: {len(causes):,}; the first: {causes[0]}"]
    return "\n".join(lines)
