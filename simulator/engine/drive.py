"""Lets the clock of a simulation run until all is done."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat

import simpy
from simpy.core import EmptySchedule

from simulator.engine.client import Client, StreamClient
from simulator.util.errors import HeadwayError

EVENTS_PER_LOOK = 4096  # events between two looks at the progress bar
EVENTS_PER_QUESTION = 512  # between two at which `stop` is asked
LONGEST = 1e8  # s, of a run: its tokens are counted by the second


def drive(
    env: simpy.Environment,
    client: Client | StreamClient,
    progress: Callable[[float, int, int], None] | None,
    stop: Callable[[], bool] | None = None,
) -> bool:
    """Let the clock run until all is done; say whether it was broken off, by the user or `stop`.

    Raises HeadwayError if it goes on beyond `LONGEST`.
    """
    with no_garbage_collection():
        interrupted = _loop(env, client, progress, stop)
    if client.done < len(client.sent) and not interrupted:
        raise RuntimeError(f"{len(client.sent) - client.done} requests never ended")
    return interrupted


def _loop(
    env: simpy.Environment,
    client: Client | StreamClient,
    progress: Callable[[float, int, int], None] | None,
    stop: Callable[[], bool] | None,
) -> bool:
    """Run until nothing is left to happen; say whether it was broken off."""
    step = env.step
    total = len(client.sent)
    events = EVENTS_PER_LOOK if stop is None else EVENTS_PER_QUESTION
    try:
        while True:
            for _ in repeat(None, events):
                step()
            if env.now > LONGEST:
                raise HeadwayError(
                    f"the run has gone on for {env.now:.1e} s, and can be told up to {LONGEST:.0e} "
                    f"s: {client.done:,} of {total:,} requests have ended"
                )
            if progress is not None:
                progress(env.now, client.done, total)
            if stop is not None and stop():
                return True
    except EmptySchedule:
        return False
    except KeyboardInterrupt:
        return True


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Spare the loop the collector: its objects go by reference count."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
