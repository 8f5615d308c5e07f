"""The state of a request, as its engine takes it in, preempts it and lets it end."""

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import made


def play(swap_blocks: int) -> list[tuple[str, str]]:
    """Return the states of two requests that do not fit together, step by step."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    one = made(Scheduler, BlockCounter(4, 4), swap_blocks=swap_blocks, **options)
    first, second = Request(0, 0.0, 4, 4), Request(1, 0.0, 4, 4)
    one.add(first)
    one.add(second)
    found = [(first.state, second.state)]
    for now in range(1, 20):
        step = one.schedule(float(now))
        found.append((first.state, second.state))
        one.commit(step, [now + 0.5])
    found.append((first.state, second.state))
    return list(dict.fromkeys(found))


def test_states_of_requests_that_do_not_fit_together():
    begin, end = [("waiting", "waiting"), ("running", "running")], ("finished", "finished")
    again = [("finished", "running"), end]
    assert play(0) == [*begin, ("running", "preempted"), *again]
    assert play(8) == [*begin, ("running", "swapped"), *again]


def test_a_request_may_wait_for_what_was_computed_elsewhere():
    request = Request(0, 0.0, 4, 4)
    request.remote = 1
    assert request.state == "waiting_for_remote_kvs"
