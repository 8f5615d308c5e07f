"""Draw cases for `headway conform` at random: the same seed gives the same bytes.

    python -m headway.conformance.draw_cases CASES.jsonl.gz [--count N] [--seed SEED] [--windows] ..

`headway.conformance.record_vllm` records what vLLM decides on them. Small pools, few seats and
idle times of about a millisecond, so that a few requests meet many rules.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

from simulator.util.files import write_atomic

Values = dict[str, Any]
KINDS = {
    "windows": "draw layers with a sliding window, too",
    "loras": "draw adapters, too",
    "images": "draw images in prompts, too",
    "connector": "draw images, some of them encoded elsewhere",
    "offloading": "draw host memory, too",
    "retention": "draw windows of which a part is cached, and prompts that branch off",
    "states": "draw layers that keep states, and prompts that branch off",
    "units": "with states, let prompts match inside blocks",
    "drafts": "draw speculative decoding, too",
    "draft-sizes": "draw drafts, as many as the batch size says",
    "stages": "draw pipeline stages, beside drafts asynchronous ones alone",
    "consumer": "let prompts be computed elsewhere, beside --drafts",
    "limits": "schedule less than fits in a step",
    "stops": "let answers end by a stop token",
}
"""What a case may have beside its requests, each with the help of its option."""


def draw_case(seed: int, number: int, kinds: Collection[str] = ()) -> Values:  # noqa: PLR0912
    """Get a case of a seed, as a case file has it; `kinds` of KINDS are drawn, too."""
    rng = Random(f"case {seed} {number}")
    config = _config(rng, kinds)
    if "drafts" in kinds or "draft-sizes" in kinds:
        _add_drafts(rng, config, sizes="draft-sizes" in kinds)
    retains = "retention" in kinds or "states" in kinds
    if "windows" in kinds or retains:
        (_add_states if "states" in kinds else _add_windows)(rng, config)
    if "units" in kinds:
        _add_units(rng, config)
    gap = rng.choice([0, 200_000, 2_000_000, 20_000_000, 100_000_000])
    requests: list[Values] = []
    now = 0
    for index in range(rng.randint(1, 20)):
        now += rng.choice([0, 1, int(rng.expovariate(1.0) * gap), 1_000_000, rng.randint(0, gap)])
        requests.append(_request(rng, config, requests, index, now))
    if "loras" in kinds:
        _add_loras(rng, config, requests)
    if "limits" in kinds:
        _add_limits(rng, config)
    if "images" in kinds or "connector" in kinds:
        _add_images(rng, config, requests)
    if "connector" in kinds:
        config["ec_cache"] = [str(image) for image in range(12) if rng.random() < 0.6]
    if "offloading" in kinds:
        _add_offloading(rng, config, requests)
    if retains:
        _add_retention(rng, config, requests)
    for request in requests if "stops" in kinds else ():
        request["max_tokens"] = request["output_len"] + rng.choice([0, 1, 3, 20])
    times = {
        "base_ns": rng.choice([100_000, 1_000_000, 6_000_000]),
        "per_token_ns": rng.choice([0, 1_000, 40_000]),
        "per_context_token_ns": rng.choice([0, 40]),
        "empty_ns": 1_000_000,
    }
    if "offloading" in kinds or "consumer" in kinds:
        for way in ("load", "store"):
            times[f"{way}_block_ns"] = rng.choice([1, 70_000, 900_000, 5_000_000])
    return {
        "schema": 1,
        "name": f"drawn-{seed}-{number}",
        "config": config,
        "step_time": times,
        "max_steps": 2000,
        "requests": requests,
    }


def _config(rng: Random, kinds: Collection[str]) -> Values:
    longest = rng.choice([64, 128, 256])
    seats = rng.randint(1, 8)
    size = rng.choice([4, 16])
    chunked = rng.random() < 0.85
    budget = max(seats, rng.choice([8, 16, 32, 64, 256]), 0 if chunked else longest)
    drawn = {
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "max_num_seqs": seats,
        "max_num_batched_tokens": budget,
        "max_model_len": longest,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 7, 20]) if chunked else 0,
        "reserve_full_isl": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "prefill_schedule_interval": rng.choice([1, 1, 1, 3]),
        "async_scheduling": rng.random() < 0.6,
        "block_size": size,
        "num_gpu_blocks": longest // size + rng.choice([1, 2, 5, 20, 100]) + 1,
        "enable_prefix_caching": rng.random() < 0.5,
    }
    if "stages" in kinds:
        drawn["pipeline_parallel_size"] = rng.choice([2, 2, 3, 4])
    if "consumer" in kinds:
        room = longest // size + 7 + rng.choice([0, 2, 8, 30])  # else one may wait for ever
        drawn |= {"kv_role": "kv_consumer", "policy": "fcfs", "num_gpu_blocks": room}
    return drawn


def _add_drafts(rng: Random, config: Values, *, sizes: bool) -> None:
    """Draw speculative decoding."""
    drafts = rng.choice([1, 2, 3, 5])
    config["async_scheduling"] |= "pipeline_parallel_size" in config
    config["long_prefill_token_threshold"] = rng.choice([0, 0, drafts + 1, 20])
    config["speculative_config"] = {
        "method": rng.choice(["ngram", "eagle", "mtp", "draft_model"]),
        "num_speculative_tokens": drafts,
        "acceptance": rng.choice([0, 0.5, 0.8, 1]),
    }
    if sizes:
        first = rng.randint(1, 3)
        ranges = [
            [1, first, rng.randint(0, drafts)],
            [first + rng.randint(1, 2), 9, rng.randint(0, 6)],
        ]
        config["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges


def _add_windows(rng: Random, config: Values) -> None:
    """Draw groups of layers with a window, and a pool for them."""
    size, longest = config["block_size"], config["max_model_len"]
    window = rng.choice([size, 2 * size, 2 * size + 1, 3 * size - 1, rng.randint(2, longest // 2)])
    kinds = rng.choice([[0, 1], [1, 0], [0, 1, 1], [1, 1, 0], [1], [0, 1, 1, 1, 1]])
    config["kv_cache_groups"] = [window * kind for kind in kinds]
    config["enable_prefix_caching"] = rng.random() < 0.75
    config["max_num_batched_tokens"] = tokens = max(
        config["max_num_seqs"],
        0 if config["enable_chunked_prefill"] else longest,
        rng.choice([8, 32]),
    )
    whole, held = longest // size, window - 1 + tokens * (1 + config["async_scheduling"])
    windowed = min(whole, -(-held // size) + 1)
    most = sum(windowed if kind else whole for kind in kinds)
    config["num_gpu_blocks"] = 1 + most + rng.choice([0, 1, 3, 10, 40, 200])


def _add_states(rng: Random, config: Values) -> None:
    """Draw groups of layers that keep states, and a pool for them."""
    size, longest = config["block_size"], config["max_model_len"]
    kinds = rng.choice([[0, 1], [0, 1, 1, 1], [1, 1, 0], [0, 0, 1]])
    config["kv_cache_groups"] = ["mamba" if kind else 0 for kind in kinds]
    config["num_prefill_checkpoint_blocks"] = rng.choice([0, 1, 1])
    config["enable_prefix_caching"] = config["enable_chunked_prefill"] = True
    budgets = [3, size, 2 * size + 1, 32, 64]
    config["max_num_batched_tokens"] = max(config["max_num_seqs"], rng.choice(budgets))
    whole = longest // size
    most = sum(min(whole, 3) if kind else whole for kind in kinds)
    config["num_gpu_blocks"] = 1 + most + rng.choice([0, 1, 3, 10, 40, 200])


def _add_units(rng: Random, config: Values) -> None:
    """Draw parts of blocks at which prompts match."""
    unit = rng.choice([size for size in (1, 2, 4, 8) if size < config["block_size"]])
    config["prefix_match_unit"] = unit
    config["prefill_checkpoint_alignment"] = rng.choice([1, 2 * unit, 3 * unit])
    # Of a hit inside a block there is a copy. Without room for it vLLM waits for ever.
    config["num_gpu_blocks"] += 2 * len(config["kv_cache_groups"])


def _add_limits(rng: Random, config: Values) -> None:
    """Draw what the scheduler is limited to below the sizes of a step."""
    seats = config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if config["enable_chunked_prefill"] and "speculative_config" not in config:
        tokens = rng.randint(seats, config["max_num_batched_tokens"])
        config["max_num_scheduled_tokens"] = rng.choice([None, tokens])


def _add_loras(rng: Random, config: Values, requests: list[Values]) -> None:
    """Draw adapters."""
    config["max_loras"] = rng.randint(1, 3)
    if drafts := config.get("speculative_config"):  # vLLM wants room for all of them at once
        whole = config["max_num_seqs"] * (1 + drafts["num_speculative_tokens"])
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], whole)
    for request in requests:
        request["adapter"] = rng.choice([0, 1, 2, 3, 4, 4])


def _add_images(rng: Random, config: Values, requests: list[Values]) -> None:
    """Draw an encoder and a pool of images, and put some into most prompts."""
    sizes = [rng.choice([1, 3, 8, rng.randint(1, 40)]) for _ in range(rng.choice([2, 5, 12]))]
    for name in ("encoder_cache_size", "max_num_encoder_input_tokens"):
        config[name] = max(sizes) + rng.choice([0, 0, 5, 20, 200])
    tokens = config["max_num_batched_tokens"]  # of a chunk: a larger image would wait for ever
    tokens = config.get("max_num_scheduled_tokens") or tokens
    tokens = min(tokens, config["long_prefill_token_threshold"] or tokens)
    config["disable_chunked_mm_input"] = rng.random() < 0.3 and max(sizes) <= tokens
    for request in requests:
        left, before = request["prompt_len"], request.get("segments", [[f"in:{request['id']}", -1]])
        parts: list[Any] = []
        for _ in range(rng.choice([0, 1, 1, 2, 4, 8])):
            text, image = rng.choice([0, 1, rng.randint(0, 20)]), rng.randrange(len(sizes))
            if text + sizes[image] <= left:
                parts += [[f"{before[0][0]}", text]] * (text > 0)
                parts.append([f"image:{image}", sizes[image]])
                left -= text + sizes[image]
        if parts:
            request["segments"] = parts + [[f"in:{request['id']}", left]] * (left > 0)


def _add_offloading(rng: Random, config: Values, requests: list[Values]) -> None:
    """Draw host memory, a small pool beside it, and long prompts that begin as one of five do."""
    longest, size = config["max_model_len"], config["block_size"]
    config["enable_prefix_caching"] = True
    config["num_gpu_blocks"] = longest // size + rng.choice([1, 2, 5, 20]) + 1
    config["kv_offloading_blocks"] = rng.choice([3, 10, 40, 200, 1000])
    config["store_threshold"] = rng.choice([0, 0, 0, 2])
    for request in requests:
        request["prompt_len"] = prompt = rng.randint(longest // 4, longest - 1)
        shared = rng.randint(prompt // 2, prompt)
        request["segments"] = [[rng.choice(["a", "b", "c", "d", "e"]), shared]]
        if prompt > shared:
            request["segments"].append([f"in:{request['id']}", prompt - shared])
        request["max_tokens"] = request["output_len"] + rng.choice([0, 0, 0, 3])


def _add_retention(rng: Random, config: Values, requests: list[Values]) -> None:
    """Draw which blocks of a window are cached, and prompts that branch off inside earlier ones."""
    kept = [0, 0, config["block_size"] * rng.randint(1, 6), None]
    config["prefix_cache_retention_interval"] = rng.choice(kept)
    config["enable_prefix_caching"] = True
    for request in requests[1:]:
        if rng.random() < 0.3:
            continue
        before = rng.choice(requests[: request["id"]])
        left = rng.randint(1, min(before["prompt_len"], request["prompt_len"]))
        own, request["segments"] = request["prompt_len"], []
        for name, count in before.get("segments", [[f"in:{before['id']}", before["prompt_len"]]]):
            taken = min(count, left)
            if not taken or (taken < count and name.startswith("image:")):
                break
            request["segments"].append([name, taken])
            left, own = left - taken, own - taken
        request["segments"] += [[f"in:{request['id']}", own]] * (own > 0)


def _request(rng: Random, config: Values, before: list[Values], index: int, now: int) -> Values:
    longest = config["max_model_len"]
    prompt = rng.randint(1, rng.choice([4, longest // 2, longest - 1]))
    output = rng.choice([1, 2, rng.randint(1, 40)])
    found: Values = {"id": index, "arrival_ns": now, "prompt_len": prompt, "output_len": output}
    if config["policy"] == "priority":
        found["priority"] = rng.randint(0, 3)
    if config["enable_prefix_caching"] and rng.random() < 0.6:
        shared = rng.randint(1, prompt)
        name = rng.choice(["a", "b"])
        if before and rng.random() < 0.3:
            name = f"out:{rng.randrange(len(before))}"
        found["segments"] = [[name, shared]]
        if prompt > shared:
            found["segments"].append([f"in:{index}", prompt - shared])
    return found


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m headway.conformance.draw_cases", description=__doc__
    )
    parser.add_argument("out", type=Path, metavar="CASES.jsonl.gz")
    parser.add_argument("--count", type=int, default=200, help="cases (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (0)")
    for kind, words in KINDS.items():
        parser.add_argument(
            f"--{kind}", action="append_const", dest="kinds", const=kind, help=words
        )
    asked = parser.parse_args(arguments)
    kinds = asked.kinds or ()
    cases = (draw_case(asked.seed, number, kinds) for number in range(asked.count))
    data = "".join(json.dumps(case, separators=(",", ":")) + "\n" for case in cases).encode()
    write_atomic(asked.out, gzip.compress(data, mtime=0) if asked.out.suffix == ".gz" else data)
    print(f"written to {asked.out}: {asked.count:,} cases of seed {asked.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
