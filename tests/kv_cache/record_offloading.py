"""Record what vLLM's own manager of offloaded blocks decides: run it with a Python that has vLLM.

    python tests/kv_cache/record_offloading.py | gzip -9n > tests/kv_cache/offloading.jsonl.gz

The manager (`vllm/v1/kv_offload/cpu/manager.py`, unmodified) is driven as its connector drives it:
a request looks its blocks up from the first on, loads what is there, offers the rest in chunks, and
ends. A line is a case: the size, the threshold, and what each call said.
"""

import json
import random
import sys

from vllm import __version__
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager


def record(seed: int) -> dict[str, object]:
    """Play a case: requests begin as earlier ones do, and some overlap."""
    rng = random.Random(seed)
    size, threshold = rng.randint(3, 40), rng.choice([0, 0, 0, 2, 3])
    manager = CPUOffloadingManager(size, "lru", store_threshold=threshold)
    calls: list[list[object]] = []
    prompts: list[list[int]] = []
    fresh = 0
    running: list[tuple[ReqContext, list[int], int, int]] = []
    for number in range(60):
        base = list(rng.choice(prompts)) if prompts and rng.random() < 0.7 else []
        base = base[: rng.randint(0, len(base))]
        count = rng.randint(1, 12)
        keys = base + list(range(fresh, fresh + count))
        fresh += count
        prompts.append(keys)
        context = ReqContext(req_id=str(number))
        manager.on_new_request(context)
        names = [_name(key) for key in keys]
        found = 0
        while found < len(names) and manager.lookup(names[found], context) is LookupResult.HIT:
            found += 1
        manager.prepare_load(names[:found], context)
        manager.complete_load(names[:found], context)
        calls.append(["load", number, keys, found])
        running.append((context, keys, found, found))
        while running and (len(running) > 2 or rng.random() < 0.6):
            at = rng.randrange(len(running))
            context, keys, first, done = running.pop(at)
            if done < len(keys):
                end = min(done + rng.randint(1, 6), len(keys))
                told = manager.prepare_store([_name(key) for key in keys[done:end]], context)
                stored = None if told is None else [_key(one) for one in told.keys_to_store]
                evicted = [] if told is None else sorted(_key(one) for one in told.evicted_keys)
                if told is not None:
                    manager.complete_store(told.keys_to_store, context)
                calls.append(["offer", int(context.req_id), done, end, stored, evicted])
                running.append((context, keys, first, end))
            else:
                manager.on_request_finished(context)
                calls.append(["end", int(context.req_id)])
    return {"vllm": __version__, "blocks": size, "store_threshold": threshold, "calls": calls}


def _name(key: int) -> bytes:
    """Write a key as vLLM does: a hash and the number of the group."""
    return key.to_bytes(8, "big") + (0).to_bytes(4, "big")


def _key(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
        print(json.dumps(record(seed), separators=(",", ":")))
