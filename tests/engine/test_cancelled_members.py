"""Requests that hang up and have to stay for all that: members of a static batch."""

import pytest

from simulator.core.alarm import FastEnvironment
from simulator.core.request import Request
from simulator.engine.replica import Replica
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.static import Static
from tests.support.engines import Clock, made


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_who_stays_is_let_go_when_the_batch_is_over(leap: bool) -> None:
    """The one that hung up at 1.5 s is computed to its end at 3 s, nobody receives it, and after
    the batch, at 6 s, the engine keeps no trace of it; the next batch is served."""
    env = FastEnvironment()
    scheduler = made(Static, BlockCounter(1001, 1), batch_size=2)
    replica = Replica(env, scheduler, Clock(1.0), leap=leap)
    requests = [Request(k, 0.0, 4, tokens) for k, tokens in enumerate((3, 6, 1, 1))]

    def play():
        for request in requests[:2]:
            replica.submit(request)
        yield env.timeout(1.5)
        replica.cancel(requests[0])
        yield env.timeout(3.0)
        assert not replica.cancelled
        for request in requests[2:]:
            replica.submit(request)

    env.process(play())
    env.run()
    log = replica.log.requests
    assert log["id"].tolist() == [1, 2, 3]
    assert log["finish"].tolist() == [6.0, 7.0, 7.0]
    assert not replica.cancelled
    assert not replica.loop.cancels
    assert scheduler.blocks.free == scheduler.blocks.usable
