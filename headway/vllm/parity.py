"""Is what was simulated what the installed vLLM decides? Random scenarios, under both.

    python -m headway.vllm.parity [--count N] [--seed SEED] [--record FILE.jsonl.gz]

Each scenario is run by Headway's scheduler with a policy, and by vLLM's scheduler with the same
policy in it (`scheduler: vllm, scheduler_cls: headway.vllm.HeadwayScheduler`), on the same clock.
Every request must have been admitted, preempted, answered and ended at the same times, to the last
bit. It needs vLLM, but neither a GPU nor weights. With --record what vLLM did is written down.
"""

import argparse
import gzip
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from headway.vllm.interface import check_vllm
from simulator.build.policy_table import PLUGIN
from simulator.core.log import REQUEST
from simulator.scenario.load import check_scenario
from simulator.schedulers.running_requests import EndlessPreemptionError
from simulator.schedulers.vllm.rules import (
    NEWEST_RELEASE,
    Release,
    options_without_effect,
    rules_of,
    write_release,
)
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.files import write_atomic
from simulator.util.yaml_lines import SourceMap

Values = dict[str, Any]
PREEMPTIONS = 4  # column of log.REQUEST

ORDERS = ("sjf", "boost", "priority", "fair", "wfq", "drr", "headway.vllm.parity:Newest")
"""Policies that order the queue, or pick victims; here also one of a user's own."""
DYNAMIC = ("hrrn", "srpt", "mlfq", "preemptive", "deadline", "virtual-finish-time")
"""Those whose order changes with time, or that displace."""
WITHOUT_VICTIM = ("sjf", "boost", "hrrn", "fair", "wfq", "drr")
"""Those that can run in vLLM 0.11.0, which computes on the freed blocks of a victim."""


class Newest:
    """A policy as a user may write it: last come, first served; the first admitted is preempted.

    In a small memory it may go round in circles: whoever is admitted throws out who was before.
    """

    def key(self, request: Any) -> float:
        return float(-request.arrival)

    def victim(self, running: Any) -> Any:
        return next(iter(running))


def draw_scenario(seed: int, number: int, release: Release | None = None) -> Values:
    """Get a scenario of a seed: few seats, little memory, prompts that share what they begin with.

    Policies, and both kinds of scheduling, take turns. `release` is the vLLM that is to decide;
    None: the newest known.
    """
    rng = Random(f"parity {seed} {number}")
    withdraws = rules_of(release or NEWEST_RELEASE).withdraws_tokens
    names = [*ORDERS, *DYNAMIC] if withdraws else [*WITHOUT_VICTIM]
    policies = [(name, kind) for kind in (False, True) for name in names]
    name, asynchronous = policies[number % len(policies)]
    longest, clients = rng.choice([60, 120, 200]), rng.randint(1, 5)
    seats = rng.choice([2, 3, 5, 8, 16])
    chunked = rng.random() < 0.85
    budget = max(seats, rng.choice([8, 16, 64, 256]), 0 if chunked else 2 * longest)
    interval = rng.choice([1, 1, 1, 3])
    engine: Values = {
        "scheduling_policy": {"policy": name, **_arguments(rng, name, clients)},
        "async_scheduling": asynchronous,
        "max_num_seqs": seats,
        "max_num_batched_tokens": budget,
        "max_model_len": 2 * longest,
        "block_size": rng.choice([4, 16]),
        "enable_prefix_caching": rng.random() < 0.5,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 7, 30]) if chunked else 0,
        "prefill_schedule_interval": interval,
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
    }
    if release is not None:
        engine = {k: v for k, v in engine.items() if k not in options_without_effect(release)}
        engine["version"] = write_release(release)
    room = rng.choice([1.2, 2.0, 4.0]) * 2 * longest
    engine["num_gpu_blocks_override"] = int(room / engine["block_size"]) + 3
    workload: Values = {
        "num_prompts": 24,
        "request_rate": rng.choice([5, 20, 60, 1000]),
        "input_len": longest // 2,
        "output_len": longest // 3,
        "range_ratio": 0.9,
        "clients": [rng.randint(1, 4) for _ in range(clients)],
        "priorities": [rng.randint(0, 3) for _ in range(clients)],
    }
    if rng.random() < 0.5:
        workload["prefix_groups"] = {"num_prefixes": 3, "prefix_len": longest // 5}
        workload["input_len"] = longest // 3
    if rng.random() < 0.3:
        workload["max_tokens"] = longest // 3
    return {
        "model": "llama-3-8b",
        "cost": {"kind": "linear", "base": 2**-7, "per_token": 2**-12, "per_context": 0.0},
        "seed": rng.randint(0, 10**6),
        "predictor": {"kind": "noisy", "sigma": 0.7},
        "engine": engine,
        "workload": workload,
    }


def _arguments(rng: Random, name: str, clients: int) -> Values:
    """Draw arguments of a policy."""
    by = {"by": rng.choice(["prompt", "hint", "total"])}
    shares = {"weights": {f"client-{k}": rng.choice([1, 2, 0.5]) for k in range(clients)}}
    drawn: dict[str, Values] = {
        "sjf": by | {"ageing": rng.choice([0.0, 20.0])},
        "boost": by | {"gamma": rng.choice([0.1, 2.0])},
        "hrrn": by,
        "fair": shares,
        "wfq": shares | {"boost": rng.choice([0.0, 50.0])},
        "drr": shares | {"quantum": rng.choice([16, 128])},
        "srpt": {"margin": rng.choice([0, 5]), "limit": rng.choice([0.8, 1.0, 3.0])},
        "mlfq": {"quantum": rng.choice([2, 8]), "starvation": rng.choice([0.3, 3.0])},
        "preemptive": {"threshold": rng.choice([0, 1]), "ageing": rng.choice([0.0, 1.0])},
        "deadline": {"ttft": 300.0, "tpot": 20.0, "slack": rng.choice([0.0, 200.0])},
        "virtual-finish-time": shares,
    }
    return drawn.get(name, {})


def outcome(scenario: Values, *, by_vllm: bool) -> list[list[Any]]:
    """Run a scenario; give what came of each request, in order of their ends."""
    engine = dict(scenario["engine"])
    if by_vllm:
        engine |= {"scheduler": "vllm", "scheduler_cls": PLUGIN}
    checked = check_scenario(scenario | {"engine": engine}, SourceMap("scenario", {}))
    rows = run(checked).logs[0].request_rows
    return [list(row) for row in np.frombuffer(bytes(rows), REQUEST).tolist()]


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code: 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m headway.vllm.parity")
    parser.add_argument("--count", type=int, default=200, help="scenarios (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the scenarios (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario (0)")
    parser.add_argument("--record", type=Path, help="write what vLLM did, as .jsonl.gz")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.first < 0:
        parser.error("--count must be at least 1, --first at least 0")
    warnings.simplefilter("ignore", HeadwayWarning)
    total: Counter[str] = Counter()
    lines = []
    try:
        release = check_vllm("parity")
        for number in range(options.first, options.first + options.count):
            scenario = draw_scenario(options.seed, number, release)
            name = scenario["engine"]["scheduling_policy"]["policy"]
            try:
                simulated = outcome(scenario, by_vllm=False)
            except EndlessPreemptionError:
                print(
                    f"scenario {number} ({name}): goes round in circles in the simulation: left out"
                )
                total["left out"] += 1
                continue
            decided = outcome(scenario, by_vllm=True)
            total["requests"] += len(decided)
            total["preemptions"] += sum(row[PREEMPTIONS] for row in decided)
            if simulated != decided:
                total["different"] += 1
                off = sum(one != other for one, other in zip(simulated, decided, strict=False))
                print(f"scenario {number} ({name}): {off} of {len(decided)} requests differ")
            lines.append(json.dumps({"scenario": scenario, "requests": decided}))
        if options.record is not None:
            text = "".join(f"{line}\n" for line in lines)
            write_atomic(options.record, gzip.compress(text.encode(), mtime=0))
    except HeadwayError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2
    count = options.count - total["left out"]
    print(
        f"vLLM {write_release(release)}: {count} scenarios, {total['requests']:,} "
        f"requests, {total['preemptions']:,} preemptions: {total['different']} scenarios differ"
    )
    return 1 if total["different"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
