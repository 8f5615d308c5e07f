"""Is what was simulated what the installed SGLang decides? Random cases, under both.

    python -m headway.sglang.parity [--options | --hicache] [--count N] [--seed S] [--record FOLDER]

Each case is decided by SGLang's scheduler with a policy of Headway's in it, on a CPU, and by
Headway's own with the same policy: every step must be the same in every field. With --options the
cases have SGLang's own orders and options, and no policy; with --hicache a host tier, too. With
--record the cases and what SGLang did are kept, as `headway conform` reads them. On the clock of a
case a second of a policy is a nanosecond.
"""

import argparse
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from headway.conformance.case_model import SglangCase
from headway.conformance.cases import read_cases, write_lines
from headway.conformance.compare import conform, report
from headway.conformance.recorder import dump
from headway.sglang import draw_options
from headway.sglang.policy import ORDERS
from headway.sglang.recorder import record
from headway.sglang.stand_ins import load_sglang
from simulator.util.errors import HeadwayError

Values = dict[str, Any]
POLICIES = (*ORDERS, "headway.sglang.parity:Newest")
SECOND = 1e-9  # of a policy, on a clock of nanoseconds


class Newest:
    """A policy as a user may write it: last come, first served, by columns."""

    def rank(self, waiting: Any, now: float) -> Any:
        return waiting.arrival - now if len(waiting) % 2 else -waiting.arrival


def draw_case(seed: int, number: int) -> Values:
    """Return a case of a seed: few seats, little memory, prompts that share what they begin with.

    Policies, and both loops of SGLang's, take turns.
    """
    rng = Random(f"parity {seed} {number}")
    turns = [(name, overlap) for overlap in (False, True) for name in POLICIES]
    name, overlap = turns[number % len(turns)]
    page = rng.choice([1, 1, 1, 4, 16])
    longest = rng.choice([60, 120, 250])
    chunk = rng.choice([-1, 16, 32, 64, 256])
    caching = rng.random() < 0.7
    config: Values = {
        "schedule_policy": "fcfs",
        "scheduling_policy": {"policy": name, **_arguments(rng, name)},
        "chunked_prefill_size": chunk if chunk < 0 else max(chunk, page),
        "max_prefill_tokens": rng.choice([16384, 16384, 100]),
        "max_running_requests": rng.choice([3, 8, 16, 32]),
        "max_total_tokens": int(rng.choice([2.5, 3, 4]) * longest) // page * page,
        "page_size": page,
        "context_length": 2 * longest + 20,
        "disable_radix_cache": not caching,
        "disable_overlap_schedule": not overlap,
        "enable_mixed_chunk": chunk > 0 and rng.random() < 0.3,
        "schedule_conservativeness": rng.choice([0.01, 0.1, 0.4]),
        "prefill_max_requests": rng.choice([None, None, None, 2]),
        "retract_decode_steps": rng.choice([20, 5]),
    }
    return {
        "schema": 1,
        "name": f"{number}-{name.rpartition(':')[2].lower()}",
        "config": config,
        "max_steps": 1500,
        "requests": _requests(rng, longest, caching=caching, caps=rng.choice([1, 1, 2, 6])),
    }


def _requests(rng: Random, longest: int, *, caching: bool, caps: int) -> list[Values]:
    gap = rng.choice([1e6, 4e6, 8e6, 2e7])
    clients, arrival = rng.randint(2, 4), 0.0
    chats = rng.random() < 0.5  # short questions: memory runs out while they are answered
    found: list[Values] = []
    for number in range(24 if chats else 36):
        arrival += 0.0 if rng.random() < 0.1 else rng.expovariate(1 / gap)
        prompt = rng.randint(2, longest // 3 if chats else longest)
        answer = rng.randint(longest // 3, longest) if chats else rng.randint(1, longest // 2)
        request: Values = {
            "id": number,
            "arrival_ns": int(arrival),
            "prompt_len": prompt,
            "output_len": answer,
            "max_new_tokens": min(answer * rng.randint(1, caps) + rng.randint(0, 1), 2 * longest),
            "client": f"client-{rng.randrange(clients)}",
            "hint": max(1, int(answer * rng.lognormvariate(0, 0.7))),
        }
        if caching and rng.random() < 0.6:
            shared = rng.randint(1, prompt)
            request["segments"] = [[f"sys:{rng.randrange(3)}", shared]]
            if prompt > shared:
                request["segments"].append([f"in:{number}", prompt - shared])
        found.append(request)
    return found


def _arguments(rng: Random, name: str) -> Values:
    """Draw arguments of a policy."""
    by = {"by": rng.choice(["prompt", "hint", "total"])}
    shares = {"weights": {f"client-{k}": rng.choice([1, 2, 0.5]) for k in range(4)}}
    drawn: dict[str, Values] = {
        "sjf": by | {"ageing": rng.choice([0.0, 200.0]) * SECOND},
        "boost": by | {"gamma": rng.choice([0.1, 2.0]) * SECOND, "token_time": 1e-3 / SECOND},
        "hrrn": by,
        "fair": shares,
        "wfq": shares | {"boost": rng.choice([0.0, 50.0]) * SECOND},
        "drr": shares | {"quantum": rng.choice([16, 128])},
    }
    return drawn.get(name, {})


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code: 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m headway.sglang.parity")
    parser.add_argument("--count", type=int, default=140, help="cases (140)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the cases (1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument(
        "--options", action="store_true", help="draw SGLang's own orders and options"
    )
    parser.add_argument("--hicache", action="store_true", help="draw these with HiCache on")
    parser.add_argument("--drafts", action="store_true", help="draw these with EAGLE")
    parser.add_argument("--record", type=Path, help="folder for cases and what SGLang did")
    options = parser.parse_args(arguments)
    if options.count < 1 or options.first < 0:
        parser.error("--count must be at least 1, --first at least 0")
    try:
        with TemporaryDirectory() as scratch:
            numbers = range(options.first, options.first + options.count)
            draw = draw_options.draw_case if options.options else draw_case
            if options.hicache:
                draw = draw_options.draw_with_host
            if options.drafts:
                draw = draw_options.draw_with_drafts
            cases = [draw(options.seed, number) for number in numbers]
            return _compare(cases, options.record or Path(scratch))
    except HeadwayError as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2


def _compare(raw: list[Values], folder: Path) -> int:
    """Record cases into a folder, and compare the simulation with them, stepwise and in leaps."""
    paths = folder / "cases" / "policies.jsonl.gz", folder / "golden" / "policies.jsonl.gz"
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(paths[0], map(dump, raw))
    load_sglang()
    lines: list[str] = []
    kept: list[Values] = []
    retracting = 0
    for one, case in zip(raw, read_cases(paths[0]), strict=True):
        assert isinstance(case, SglangCase)
        try:
            found = record(case)
        except HeadwayError as error:  # SGLang's own: it has no memory left for a split prompt
            print(f"not compared: {error}")
            continue
        kept.append(one)
        lines += found
        retracting += sum('"retracted":[' in row and '"retracted":[]' not in row for row in found)
    write_lines(paths[0], map(dump, kept))
    write_lines(paths[1], lines)
    stepwise, leaping = (conform(*paths, leap=leap) for leap in (False, True))
    print(report(stepwise))
    wrong = [one.case for one in leaping if not one.agrees]
    print(f"in leaps {len(leaping) - len(wrong)} agree; {retracting:,} steps retract")
    return 1 if wrong or not all(one.agrees for one in stepwise) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
