"""Cases of SGLang's own options, drawn at random: its orders, priorities, and ways to step."""

from random import Random
from typing import Any

from simulator.kv_cache.hierarchical_cache import WRITE_POLICIES
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.schedulers.sglang.queue_order import ORDERS, WITH_PRIORITIES

Values = dict[str, Any]
EVICTIONS = [name for name in EVICTION_POLICIES if name != "tlru"]  # which is refused as it is


def draw_case(seed: int, number: int) -> Values:
    """Return a case of a seed: little memory and few seats, so that few requests meet many rules.

    The prefix cache and the overlap of steps take turns.
    """
    rng = Random(f"options {seed} {number}")
    longest = rng.choice([30, 60, 120, 250])
    config = _config(rng, longest, caching=number % 2 == 0, overlap=number % 4 > 1)
    _add_order(rng, config)
    return {
        "schema": 1,
        "name": f"options-{seed}-{number}",
        "config": config,
        "step_time": _step_time(rng) | {"per_context_token_ns": rng.choice([0, 40])},
        "max_steps": 1500,
        "requests": _requests(rng, config, longest),
    }


def _step_time(rng: Random) -> Values:
    base, token = rng.choice([1_000_000, 6_000_000]), rng.choice([0, 40_000])
    return {"base_ns": base, "per_token_ns": token}


def draw_with_host(seed: int, number: int) -> Values:
    """Return a case of a seed with HiCache on; write policies and the overlap take turns."""
    rng = Random(f"hicache {seed} {number}")
    longest = rng.choice([60, 120, 250])
    config = _config(rng, longest, caching=True, overlap=number % 2 == 0)
    _add_order(rng, config)
    page, store = config["page_size"], rng.choice([0, 0, 1000, 40_000, 2_000_000])
    if store:  # else nobody knows how often SGLang looks until a copy is done
        config["prefill_decode_interval"] = 0
    config |= {
        "enable_hierarchical_cache": True,
        "hicache_ratio": rng.choice([0.125, 0.5, 1.0, 2.0, 2.0, 4.0]),
        "hicache_write_policy": list(WRITE_POLICIES)[number // 2 % 3],
    }
    return {
        "schema": 1,
        "name": f"hicache-{seed}-{number}",
        "config": config,
        "step_time": _step_time(rng)
        | {
            "load_block_ns": page * rng.choice([1000, 40_000, 400_000]),
            "store_block_ns": page * store,
        },
        "max_steps": 1500,
        "requests": _requests(rng, config, longest, hosted=True),
    }


def draw_with_drafts(seed: int, number: int) -> Values:
    """Return a case of a seed with EAGLE, chains and trees; the overlap of steps takes turns."""
    rng = Random(f"drafts {seed} {number}")
    longest = rng.choice([30, 60, 120])
    config = _config(rng, longest, caching=rng.random() < 0.7, overlap=number % 2 == 0)
    _add_order(rng, config)
    steps, branches = rng.choice([1, 2, 3, 5]), rng.choice([1, 1, 1, 2, 4])
    if config["page_size"] > 1:
        branches = 1  # SGLang has no trees there without a GPU
    most = min(1 + branches * steps, 16)
    config |= {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": branches,
        "speculative_num_draft_tokens": 1 + steps if branches == 1 else rng.randint(2, most),
        "acceptance": rng.choice([0.2, 0.5, 0.7, 0.9, 1.0]),
    }
    config["max_total_tokens"] += config["page_size"] * rng.choice([2, 8])
    return {
        "schema": 1,
        "name": f"eagle-{seed}-{number}",
        "config": config,
        "max_steps": 1500,
        "requests": _requests(rng, config, longest),
    }


def _config(rng: Random, longest: int, *, caching: bool, overlap: bool) -> Values:
    page = rng.choice([1, 1, 1, 2, 4, 16])
    chunk = rng.choice([-1, 8, 16, 21, 48, 64, 100, 256])
    return {
        "schedule_conservativeness": rng.choice([0.01, 0.1, 0.4, 1.0, 1.6]),
        "chunked_prefill_size": chunk if chunk < 0 else max(chunk, page),
        "max_prefill_tokens": rng.choice([16384, 16384, 100, 30]),
        "prefill_max_requests": rng.choice([None, None, None, 1, 2]),
        "max_running_requests": rng.choice([1, 2, 3, 8, 16, 32]),
        "max_total_tokens": int(rng.choice([2.5, 3, 4, 8]) * longest) // page * page + page,
        "page_size": page,
        "context_length": 2 * longest + 20,
        "enable_mixed_chunk": chunk > 0 and rng.random() < 0.4,
        "disable_radix_cache": not caching,
        "radix_eviction_policy": rng.choice(["lru", "lru", "lru", *EVICTIONS]),
        "disable_overlap_schedule": not overlap,
        "prefill_decode_interval": rng.choice([0, 0, 0, 0, 1, 3]),
        "min_free_slots_delay": rng.choice([None, None, None, None, 2, 4]),
        "init_new_token_ratio": rng.choice([0.7, 0.2]),
        "min_new_token_ratio_factor": rng.choice([0.14, 1.0]),
        "new_token_ratio_decay_steps": rng.choice([600, 10]),
        "retract_decode_steps": rng.choice([20, 5]),
    }


def _add_order(rng: Random, config: Values) -> None:
    """Draw priorities, or an order that goes without."""
    if rng.random() < 0.35:
        config["schedule_policy"] = rng.choice(WITH_PRIORITIES)
        config["enable_priority_scheduling"] = True
        config["disable_priority_preemption"] = rng.random() < 0.3
        config["schedule_low_priority_values_first"] = rng.random() < 0.3
        config["priority_scheduling_preemption_threshold"] = rng.choice([0, 1, 10])
        config["retraction_policy"] = rng.choice(["length", "priority"])
        return
    orders = [order for order in ORDERS if order != "random"]
    if config["disable_radix_cache"]:
        orders.remove("shortest-prefill-first")
    config["schedule_policy"] = rng.choice(["fcfs", "lpm", *orders])


def _requests(rng: Random, config: Values, longest: int, *, hosted: bool = False) -> list[Values]:
    gap = rng.choice([0, 1e6, 4e6, 8e6, 2e7])
    whole = rng.choice([1, 1, 1_000_000])  # arrivals also at the very end of a step
    chats = rng.random() < 0.5  # short questions: memory runs out while they are answered
    certain, capped, caps = (
        rng.choice([0, 0, 0.2, 1]),
        rng.choice([0, 0.5, 1]),
        rng.choice([1, 2, 6]),
    )
    shares = 0 if config["disable_radix_cache"] else rng.choice([0, 0.6, 0.9])
    documents = [rng.randint(longest // 4, longest) for _ in range(8)] if hosted else []
    arrival, found = 0.0, list[Values]()
    numbers = (20, 60) if hosted else (3, 30)
    for number in range(rng.randint(*numbers) if rng.random() < 0.97 else 150):
        arrival += 0.0 if not gap or rng.random() < 0.2 else rng.expovariate(1 / gap)
        prompt = rng.randint(1, longest // 3 if chats else longest)
        answer = rng.randint(longest // 3, longest) if chats else rng.randint(1, longest // 2)
        if rng.random() < 0.15:
            answer = rng.randint(1, 3)
        request: Values = {
            "id": number,
            "arrival_ns": int(arrival) // whole * whole,
            "prompt_len": prompt,
            "output_len": answer,
            "ignore_eos": rng.random() < certain,
        }
        if rng.random() < capped and not request["ignore_eos"]:
            request["max_new_tokens"] = answer * rng.randint(1, caps) + rng.randint(0, 1)
        if config.get("enable_priority_scheduling") and rng.random() < 0.95:
            request["priority"] = rng.choice([0, 1, 2, 5, 15, 30])
        if rng.random() < shares:
            _share(rng, request, found, 2 * longest)
        if hosted and rng.random() < 0.7:
            _reread(rng, request, documents)
        found.append(request)
    return found


def _reread(rng: Random, request: Values, documents: list[int]) -> None:
    """Let a prompt be a document, of which there are more than memory holds, and a question."""
    number, name = request["id"], rng.randrange(len(documents))
    question = rng.randint(1, 12)
    request["segments"] = [[f"doc {name}", documents[name]], [f"in:{number}", question]]
    request["prompt_len"] = documents[name] + question
    request["output_len"] = rng.randint(1, min(request["output_len"], 20))


def _share(rng: Random, request: Values, before: list[Values], most: int) -> None:
    """Let a prompt begin as others do, or go on where an earlier answer ends."""
    number, prompt = request["id"], request["prompt_len"]
    if before and rng.random() < 0.3:
        turn = rng.choice(before)
        named = turn.get("segments") or [[f"in:{turn['id']}", turn["prompt_len"]]]
        total = turn["prompt_len"] + turn["output_len"] + prompt
        if total <= most:
            answer = [f"out:{turn['id']}", turn["output_len"]]
            request["segments"] = [*named, answer, [f"in:{number}", prompt]]
            request["prompt_len"] = total
            return
    shared = rng.randint(1, prompt)
    request["segments"] = [[rng.choice("abc"), shared]]
    if prompt > shared:
        request["segments"].append([f"in:{number}", prompt - shared])
