"""Lets the clock of a simulation run until all is done."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, repeat

import simpy
from simpy.core import EmptySchedule

from simulator.core.log import Log
from simulator.engine.client import StreamClient
from simulator.util.errors import HeadwayError

# A loop that the clock attends to may have MOST_SKIPS turns in one event.
EVENTS_PER_LOOK = 512  # events between two looks at the progress bar
EVENTS_PER_QUESTION = 64  # between two at which `stop` is asked
PAGES_LEFT = 100  # of rows, in all logs: so many are packed at once, and of a short run none
LONGEST = 1e8  # s, of a run: its tokens are counted by the second


def drive(
    env: simpy.Environment,
    client: StreamClient,
    progress: Callable[[float, int, int], None] | None,
    stop: Callable[[], bool] | None = None,
    logs: Sequence[Log] = (),
) -> bool:
    """Let the clock run until all is done; say whether it was broken off, by the user or `stop`.

    What is old in the `logs` is packed on the way. Raises HeadwayError if it goes on beyond
    `LONGEST`.
    """
    with no_garbage_collection(), _signals() as asked:
        interrupted = _loop(env, client, progress, stop, logs=logs, asked=asked)
    if client.done < client.total and not interrupted:
        raise RuntimeError(f"{client.total - client.done} requests never ended")
    return interrupted


def _loop(
    env: simpy.Environment,
    client: StreamClient,
    progress: Callable[[float, int, int], None] | None,
    stop: Callable[[], bool] | None,
    *,
    logs: Sequence[Log],
    asked: Sequence[int],
) -> bool:
    """Run until nothing is left to happen; say whether it was broken off."""
    step = env.step
    turns, least = cycle(logs), max(PAGES_LEFT // max(len(logs), 1), 1)
    total = client.total
    events = EVENTS_PER_LOOK if stop is None else EVENTS_PER_QUESTION
    try:
        while True:
            for _ in repeat(None, events):
                step()
            if asked:
                return True
            if env.now > LONGEST:
                raise HeadwayError(
                    f"the run has lasted {env.now:.1e} s, more than the {LONGEST:.0e} s up to "
                    f"which times are exact: {client.done:,} of {total:,} requests have ended"
                )
            if (log := next(turns, None)) is not None:
                log.put_by(least)
            if progress is not None:
                progress(env.now, client.done, total)
            if stop is not None and stop():
                return True
    except EmptySchedule:
        return bool(asked)
    except KeyboardInterrupt:
        return True


@contextmanager
def _signals() -> Iterator[Sequence[int]]:
    """Collect the signals that ask the run to stop: it does so between two events.

    Raised at once, KeyboardInterrupt would leave a step half committed. A second signal raises it.
    What is ignored, or ends the process without a word, stays so.
    """
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
