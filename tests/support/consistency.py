"""What a scheduler's books must say of the requests that they are of, at every step."""

from collections import Counter

from simulator.core.decode_set import DecodeSet
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.schedulers.static import Static


def assert_consistent(scheduler: SchedulerBase) -> None:
    """See that sums, lists and requests agree, as a step that was scheduled is executed."""
    running, decodes, blocks = scheduler.running, scheduler.decodes, scheduler.blocks
    members = [request for request in running if request.joined >= 0]
    others = [request for request in running if request.joined < 0]
    assert not Counter(running.partial) - Counter(others)
    gone = {*others} - {*running.partial}  # whose last token is on its way
    assert gone <= {*getattr(running, "leaving", ())}
    assert decodes.count == len(members)
    assert {*getattr(running, "open", ())} <= {*members}
    ordered = isinstance(scheduler, SgLang)
    batch = isinstance(scheduler, Static)  # which may not have come to all of its members
    plain = type(decodes) is DecodeSet  # that of drafts sums what each member verifies
    if plain:
        assert decodes.context == sum(map(decodes.computed, members))
        phases = Counter((one.joined - one.computed) % decodes.block_size for one in members)
        assert decodes.phases == [phases[phase] for phase in range(decodes.block_size)]
    assert len(running) <= scheduler.num_seats
    assert 0 <= blocks.free <= blocks.usable
    assert 0 <= blocks.used <= blocks.usable
    assert blocks.shared >= 0
    for request in running:
        begun = not batch or request.computed > 0 or request.joined >= 0
        if begun:
            assert request.state == ("running" if request.finish < 0 else "finished")
        assert decodes.computed(request) >= 0
        assert not plain or decodes.computed(request) <= request.known + decodes.generated(request)
        assert request.admission >= 0 or ordered  # SGLang counts down what it puts in front
