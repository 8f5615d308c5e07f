"""Small engines on which a policy orders requests; every step takes 1 s."""

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.dynamic import DynamicScheduler
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.workload.workload import Workload
from tests.support.engines import made, play

DYNAMIC = ("rank", "displaces")


def engine(policy: object, seats: int = 1, num_blocks: int = 1000) -> Scheduler:
    """Few seats, blocks of 4 tokens."""
    kind = DynamicScheduler if any(hasattr(policy, name) for name in DYNAMIC) else Scheduler
    return made(kind, BlockCounter(num_blocks, 4), policy=policy, max_num_seqs=seats)


def spans(load: Workload, policy: object, **options: int) -> dict[int, tuple[float, float, float]]:
    """First scheduled, first token and end of each request; the same with and without leaps."""
    logs = [play(load, engine(policy, **options), leap=leap)[0] for leap in (False, True)]
    assert logs[0].request_rows == logs[1].request_rows
    return {
        int(row["id"]): (row["first_scheduled"], row["first_token"], row["finish"])
        for row in logs[0].requests
    }


def order(load: Workload, policy: object) -> list[int]:
    """Ids in the order in which they board the only seat."""
    seen = spans(load, policy)
    return sorted(seen, key=lambda id: seen[id][0])


def request_of(load: Workload, i: int) -> Request:
    return Request(i, 0.0, int(load.prompt_tokens[i]), int(load.output_tokens[i]))
