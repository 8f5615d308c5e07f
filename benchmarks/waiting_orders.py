"""Compare orders of vLLM's waiting queue on published traces: the figures of docs/waiting-order.md.

    HEADWAY_DATA=... python benchmarks/waiting_orders.py [--workers N] [--only azure-conv,...]

Writes benchmarks/waiting_orders.csv, a row for each window of a trace (or part of its
conversations, or seed of a generator), load and policy. Nothing in it is a request: all are figures
of a simulated run. A load is the share of the rate at which first come, first served gets through
the window when all of it is sent at once; the window's arrivals are stretched or pressed to it. So
a row and that of `fcfs` beside it are a pair: the same requests at the same times.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from headway.planning.runs import encode_csv
from simulator import load_scenario, run
from simulator.scenario.draw import make_workload
from simulator.workload import Workload

ROOT = Path(__file__).parent.parent
SCENARIO = ROOT / "scenarios" / "examples" / "waiting-order.yaml"
OUT = Path(__file__).parent / "waiting_orders.csv"
WINDOWS = 10
LOADS = (0.7, 0.9, 1.1)
POLICIES = {
    "fcfs": "fcfs",
    "sjf": "sjf",
    "residual-sjf": '{policy: "vllm_proposals:ResidualSJF", max_wait: 10}',
    "cache-affinity": '{policy: "vllm_proposals:CacheAffinity"}',
    "least-computed": '{policy: "vllm_proposals:LeastComputedVictim"}',
}
MOONCAKE = "{path: traces/mooncake_fast25_conversation.jsonl.gz, format: mooncake}"
TRACES = {
    # name: (trace, requests in a window, None: every 16th conversation; KV blocks)
    "azure-conv": ("{path: traces/azure_llm_2023_conv.csv.gz, format: azure}", 1500, 9000),
    "azure-code": ("{path: traces/azure_llm_2023_code.csv.gz, format: azure}", 850, 9000),
    "mooncake": (MOONCAKE, None, 27000),
    "mooncake-ample": (MOONCAKE, None, 100_000),
}
PARTS = 16
GENERATED = {"bursty": 200, "bursty-long": 1000}  # typical tokens of an answer
GENERATED_REQUESTS, GENERATED_BLOCKS = 1500, 9000
NAMES = (*TRACES, *GENERATED)


def bursty(seed: int, answer: int) -> Workload:
    """Draw bursty traffic of 20 clients, as BurstGPT's: few send most of it.

    Gaps are of a Gamma distribution of shape 0.3. A client's share falls as 1 / its number; each
    has prompts and answers about lengths of its own; `answer` is a typical one, in tokens.
    """
    rng = np.random.default_rng(seed)
    clients, count = 20, GENERATED_REQUESTS
    share = 1 / np.arange(1, clients + 1)
    client = rng.choice(clients, count, p=share / share.sum())
    prompts = np.exp(rng.normal(np.log(500), 1.0, clients))[client]
    answers = np.exp(rng.normal(np.log(answer), 0.5, clients))[client]

    def around(lengths: np.ndarray, high: int) -> np.ndarray:
        return np.clip(lengths * np.exp(rng.normal(0, 0.6, count)), 4, high).astype(np.int64)

    return Workload(
        arrival=np.cumsum(rng.gamma(0.3, 1 / 0.3, count)),
        prompt_tokens=around(prompts, 8000),
        output_tokens=around(answers, 8000),
        client=[f"client-{number}" for number in client.tolist()],
    )


@lru_cache(maxsize=1)
def whole_trace(name: str) -> Workload:
    trace, _, _ = TRACES[name]
    return make_workload(load_scenario(SCENARIO, [f"workload={{trace: {trace}}}"]))


def conversations(trace: Workload) -> list[int]:
    """Number the conversations of Mooncake's trace, by the second block of their prompts.

    The first 512 tokens are those of all; the second begin what the turns of one have in common.
    """
    assert trace.segments is not None
    numbers: dict[object, int] = {}
    starts = [pieces[min(1, len(pieces) - 1)] for pieces in trace.segments if pieces]
    return [numbers.setdefault(start, len(numbers)) for start in starts]


def window(name: str, number: int) -> tuple[Workload, int]:
    """Return the requests of one window, and the KV blocks to serve them with."""
    if name in GENERATED:
        return bursty(number, GENERATED[name]), GENERATED_BLOCKS
    trace = whole_trace(name)
    _, count, blocks = TRACES[name]
    if count is None:
        chosen = [i for i, one in enumerate(conversations(trace)) if one % PARTS == number]
        return trace.part(np.array(chosen)), blocks
    first = number * (len(trace) - count) // (WINDOWS - 1)
    return trace.part(np.arange(first, first + count)), blocks


def groups(load: Workload) -> np.ndarray:
    """Number those whose harm is told apart: the clients, or tenths by length of prompt."""
    if load.client is not None:
        return np.unique(load.client, return_inverse=True)[1]
    rank = np.argsort(np.argsort(load.prompt_tokens, kind="stable"), kind="stable")
    return rank * 10 // len(load)


def figures(result: object, load: Workload, first: np.ndarray | None) -> dict[str, float]:
    """Return the figures of a run; `first` are the TTFT of the same requests under fcfs."""
    summary, ttft = result.summary(), result.requests.ttft.to_numpy()
    headway, group = summary["headway"], groups(load)
    fcfs = ttft if first is None else first
    sums, before = np.bincount(group, ttft), np.bincount(group, fcfs)
    longest = load.prompt_tokens >= np.quantile(load.prompt_tokens, 0.9)
    return {
        "mean_ttft_s": summary["mean_ttft_ms"] / 1000,
        "p99_ttft_s": summary["p99_ttft_ms"] / 1000,
        "max_ttft_s": float(ttft.max()),
        "mean_tpot_ms": summary["mean_tpot_ms"],
        "mean_e2el_s": summary["mean_e2el_ms"] / 1000,
        "ttft_longest_tenth_s": float(ttft[longest].mean()),
        "harmed_share": float((ttft > fcfs + 10).mean()),
        "worst_group_ratio": float((sums / before).max()),
        "output_tok_s": summary["output_throughput"],
        "preemptions": headway["preemptions"],
        "prefill_tokens": headway["prefill_tokens"],
        "cached_share": headway["prefix_cache_hit_rate"],
    }


def simulate(load: Workload, blocks: int, policy: str) -> object:
    keys = [f"engine.num_gpu_blocks_override={blocks}", f"engine.scheduling_policy={policy}"]
    return run(load_scenario(SCENARIO, keys), workload=load)


def play(name: str, number: int) -> list[dict[str, object]]:
    """Simulate a window under all loads and policies; return the rows."""
    warnings.simplefilter("ignore")
    load, blocks = window(name, number)
    start = load.arrival - load.arrival[0]
    together = simulate(replace(load, arrival=np.zeros(len(load))), blocks, "fcfs")
    seconds = together.summary()["duration"]
    rows = []
    for share in LOADS:
        pressed = replace(load, arrival=start * (seconds / share / start[-1]))
        first = None
        for policy, how in POLICIES.items():
            result = simulate(pressed, blocks, how)
            row = figures(result, pressed, first)
            if first is None:
                first = result.requests.ttft.to_numpy()
            place = {"workload": name, "window": number, "load": share, "policy": policy}
            rows.append(place | {key: float(f"{value:.6g}") for key, value in row.items()})
    return rows


def all_rows(names: list[str], workers: int) -> Iterator[dict[str, object]]:
    """Simulate everything, in the order of the file."""
    with ProcessPoolExecutor(workers) as pool:
        for name in names:
            for rows in pool.map(partial(play, name), range(WINDOWS)):
                print(name, rows[0]["window"], file=sys.stderr, flush=True)
                yield from rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", default=",".join(NAMES), help="workloads, after commas")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rows = list(all_rows(options.only.split(","), options.workers))
    options.out.write_bytes(encode_csv(rows))


if __name__ == "__main__":
    main()
