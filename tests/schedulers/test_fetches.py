"""What tiers behind the host bring for a request that waits, and until when."""

from types import SimpleNamespace

from simulator.core.request import Request
from simulator.schedulers.vllm.fetches import Fetches


def asked(ready: float) -> tuple[Fetches, Request]:
    """Ask, at 4 s, three tiers for a prefix that has come at `ready`."""
    request = Request(0, 0.0, 8, 1)
    blocks = SimpleNamespace(fetch=lambda _: ([3, 1, 2], ready))
    fetches = Fetches(blocks, SimpleNamespace(now=0.0))  # type: ignore[arg-type]
    fetches.new.append(request)
    fetches.ask(4.0)
    return fetches, request


def test_a_prefix_is_awaited_until_it_has_come() -> None:
    fetches, request = asked(5.0)
    assert (fetches.awaits(request), fetches.next_end(), fetches.new) == (True, 5.0, [])
    fetches.ask(5.0)
    assert not fetches.awaits(request)
    assert fetches.pop(request, 5) == (3, 2)  # the tiers behind the first together
    assert (fetches.pop(request, 5), fetches.next_end()) == ((0, 0), None)


def test_no_more_blocks_come_than_are_loaded() -> None:
    fetches, request = asked(5.0)
    assert fetches.pop(request, 2) == (2, 0)


def test_what_is_there_already_or_forgotten_is_not_awaited() -> None:
    assert not asked(4.0)[0].coming
    fetches, request = asked(5.0)
    fetches.new.append(request)
    fetches.forget(request)
    assert (fetches.coming, fetches.new) == ({}, [])
