"""Whoever sends the requests: each at its time, behind `max_concurrency`, turn after turn."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from math import inf, isnan, nan, nextafter
from typing import TYPE_CHECKING

import numpy as np
import simpy

from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.util.errors import MappingError
from simulator.workload.workload import Floats, Ints, Workload

if TYPE_CHECKING:
    from simulator.policies.predictor import Predictor


class RequestReader:
    """Reads a workload's rows as requests, one at a time; `ids` are theirs, else as rows count."""

    def __init__(self, workload: Workload, ids: Sequence[int] | None = None) -> None:
        self.frontend = workload.frontend
        # Plain numbers come out of a memoryview faster than out of an array.
        self.prompts = workload.prompt_tokens.data
        self._ids = range(len(workload)) if ids is None else ids
        self._outputs = workload.output_tokens.data
        self._client: Sequence[str] | None = workload.client
        self._priority = workload.priority
        self._max_tokens = None if workload.max_tokens is None else workload.max_tokens.data
        self._segments = workload.segments
        self._hints = None if workload.hint is None else workload.hint.data
        self._models = workload.model

    def read(self, index: int, arrival: float) -> Request:
        """Return a row as a request that reaches the engine at `arrival`, s."""
        return Request(
            self._ids[index],
            arrival,
            self.prompts[index],
            self._outputs[index],
            client="" if self._client is None else self._client[index],
            priority=0 if self._priority is None else int(self._priority[index]),
            segments=None if self._segments is None else self._segments[index],
            hint=None if self._hints is None else self._hints[index] or None,
            max_tokens=None if self._max_tokens is None else self._max_tokens[index] or None,
            model="" if self._models is None else self._models[index],
        )


class ApiServer:
    """Passes requests on to the engine, at whose front it works on one at a time."""

    def __init__(self, env: simpy.Environment, submit: Callable[[Request], None]) -> None:
        self.env = env
        self.submit = submit
        self._free = 0.0  # s, when the server has passed on all that was sent
        self._last_arrival = -1.0  # of a request at the engine, s

    def send(self, reader: RequestReader, index: int, now: float) -> None:
        """Send the request of a row, now."""
        if (costs := reader.frontend) is None:
            self._deliver(reader, index, now)
            return
        delay, self._free = costs.delay(now, self._free, reader.prompts[index])
        arrival = self.env.timeout(delay)
        arrival.callbacks.append(lambda _: self._deliver(reader, index, self.env.now))

    def _deliver(self, reader: RequestReader, index: int, now: float) -> None:
        """Hand a request to the engine, now."""
        # Engines stamp requests by a clock that never shows the same time twice. Of two that
        # agreed in priority and arrival, vLLM's scheduler would undo the work for ever.
        last = self._last_arrival
        self._last_arrival = arrival = now if now > last else nextafter(last, inf)
        self.submit(reader.read(index, arrival))


@dataclass(slots=True, eq=False)
class Chunk:
    """Successive requests of which not all have ended."""

    work: Workload
    first: int  # id of the first
    reader: RequestReader
    sent: "array[float]"  # s; NaN: not yet
    _: KW_ONLY
    times: Floats  # s, when those come that wait for nobody
    left: int = 0  # requests that have not ended
    first_turns: Sequence[int] | None = None  # which these are; None: all
    rows: Ints | None = None  # which of the chunk are sent from here; None: all


class Turns:
    """What waits for the end of another request, and the sessions of requests: all by their ids.

    A session has the id of its first request; it is known as one while it goes on, -1 else.
    """

    def __init__(self, whole: Workload | None = None) -> None:
        """Know the turns of a whole workload, or else those that `load` is told."""
        self._next: dict[int, list[tuple[int, float]]] = {}
        self._first: dict[int, int] = {}
        self._whole = False
        if whole is not None:
            self.load(whole, 0)
            self._whole = True

    def __getitem__(self, id: int) -> int:
        return self._first.get(id, id if id in self._next else -1)

    def load(self, work: Workload, first: int) -> None:
        """Take note of the turns among some requests, whose ids begin with `first`."""
        if work.after is None or self._whole:
            return
        delay = np.zeros(len(work)) if work.delay is None else work.delay
        for row in np.flatnonzero(work.after >= 0).tolist():
            turn = first + row, float(delay[row])
            self._next.setdefault(int(work.after[row]), []).append(turn)

    def end(self, id: int) -> Sequence[tuple[int, float]]:
        """Return the turns that come after the end of a request, and in how many s."""
        session = self[id]
        self._first.pop(id, None)
        turns = self._next.pop(id, ())
        for turn, _ in turns:
            self._first[turn] = session
        return turns


class ChunkSender:
    """Sends a workload that comes a chunk of `size` requests at a time, `total` in all.

    No request is kept for longer than it must.
    """

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.chunks: dict[int, Chunk] = {}  # of which not all requests have ended, by number
        self.done = 0  # requests that have ended
        self._number = -1  # of the chunk that is being sent
        self._chunk: Chunk  # which is this

    def now(self) -> float:
        """Return how far all have come, s."""
        raise NotImplementedError

    def sent_at(self, id: int) -> float:
        """Return when a request that is still here was sent, s."""
        return self.chunks[id // self.size].sent[id % self.size]

    def empty_chunk(self) -> Chunk:
        """Return a chunk without requests."""
        work = self._chunk.work.part(np.empty(0, np.int64))
        return Chunk(work, self.total, RequestReader(work), array("d"), times=work.arrival)

    def pop_ended(self) -> Iterator[Chunk]:
        """Hand over the first chunks, as far as all of their requests have ended."""
        chunks = self.chunks
        while chunks:
            number = next(iter(chunks))
            if chunks[number].left or number > self._number:
                return
            yield chunks.pop(number)

    def earliest_sent(self) -> float:
        """Return the earliest time, s, that matters to a request which was not given away."""
        now = self.now()
        return min([now, *(float(np.fmin.reduce(one.sent, initial=now)) for one in self._open())])

    def _open(self) -> Sequence[Chunk]:
        """Return the chunks whose requests may be the earliest."""
        return [*self.chunks.values()][:1]


class StreamClient(ChunkSender):
    """Sends requests through `submit`, a chunk of `size` at a time; `finished` is told their ends.

    Under `max_concurrency` a request whose time has come waits here for its turn, as behind the
    semaphore of `vllm bench serve`. A session's next turn comes `delay` seconds after the end of
    the one before, also when that one was rejected. `total` is how many requests there will be;
    where nobody knows, the end of the chunks tells. `turns` are the sessions' later ones, known
    all, or those of a chunk as the chunk before it is begun.
    """

    def __init__(
        self,
        env: simpy.Environment,
        total: int,
        size: int,
        parts: Iterator[Workload],
        submit: Callable[[Request], None],
        *,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(total, size)
        self.env = env
        self._turns = turns
        self._held: deque[tuple[float, int]] = deque()  # when turns were due, s, and which
        self._parts = parts
        self._in_flight = 0
        self._server = ApiServer(env, submit)
        self._sending = self._set = False
        self._index = 0  # in the chunk, of the next to be sent
        self._fetched = self._requests = 0  # chunks so far, and requests in them
        self._load()
        self._limit = self._chunk.work.max_concurrency or total + 1
        self._alarm = Alarm(env, self._arrive)
        self._alarm.set(env.now)

    def _fetch(self) -> bool:
        """Take in a chunk; say whether there is one."""
        work = next(self._parts, None)
        if work is None:
            self.total = self._requests
            return False
        first, left = self._fetched * self.size, len(work)
        times, first_turns = work.arrival, None
        if self._turns is not None and work.after is not None:
            first_turns = np.flatnonzero(work.after < 0).tolist()
            times = work.arrival[first_turns]
            self._turns.load(work, first)
        reader, sent = RequestReader(work, range(first, first + left)), array("d", [nan]) * left
        chunk = Chunk(work, first, reader, sent, times=times, left=left, first_turns=first_turns)
        self.chunks[self._fetched] = chunk
        self._fetched, self._requests = self._fetched + 1, self._requests + left
        return True

    def _load(self) -> bool:
        """Go on with the next chunk; say whether there is one. Turns of the one after are known."""
        number = self._number + 1
        while self._fetched <= number + (self._turns is not None) and self._fetch():
            pass
        if number >= self._fetched:
            return False
        self._number, self._index = number, 0
        self._chunk = chunk = self.chunks[number]
        self._times: Sequence[float] = chunk.times.data
        self._rows = chunk.first_turns
        return True

    def now(self) -> float:
        return self.env.now

    def _open(self) -> Sequence[Chunk]:
        return super()._open() if self._turns is None else [*self.chunks.values()]

    def finished(self, request: Request) -> None:
        """Take note that a request has ended: one more may be sent."""
        self.done += 1
        self._in_flight -= 1
        self.chunks[request.id // self.size].left -= 1
        if self._turns is not None:
            for turn, delay in self._turns.end(request.id):
                if delay > 0:
                    later = self.env.timeout(delay)
                    later.callbacks.append(partial(self._offer, turn))
                else:
                    self._offer(turn)
        if not self._sending and (self._held or not self._set):
            self._send_due()

    def _offer(self, turn: int, _: simpy.Event | None = None) -> None:
        """Send a turn whose time has come, after those that wait already."""
        now, (number, row) = self.env.now, divmod(turn, self.size)
        while number >= self._fetched:
            self._fetch()
        self.chunks[number].work.arrival[row] = now
        self._held.append((now, turn))
        if not self._sending:
            self._send_due()

    def _arrive(self, alarm: simpy.Event) -> None:
        self._set = False
        self._send_due()

    def _send_due(self) -> None:
        """Send those whose time has come, as many as may be; sleep until the next one's."""
        self._sending = True
        now, held = self.env.now, self._held
        while True:
            while self._index == len(self._times) and self._load():
                pass
            if self._in_flight >= self._limit:
                break
            when: float = inf if self._index == len(self._times) else self._times[self._index]
            if held and held[0][0] < when:
                number, row = divmod(held.popleft()[1], self.size)
                self._send(self.chunks[number], row, now)
            elif when <= now:
                row = self._index if self._rows is None else self._rows[self._index]
                self._index += 1
                self._send(self._chunk, row, now)
            else:
                if not self._set:
                    self._set = True  # also where none is left to come, who would be looked for
                    if when < inf:
                        self._alarm.set(when)
                break
        self._sending = False

    def _send(self, chunk: Chunk, row: int, now: float) -> None:
        self._in_flight += 1
        chunk.sent[row] = now
        self._server.send(chunk.reader, row, now)


class Client(StreamClient):
    """Sends a workload that is all there, as one chunk.

    A `predictor` gives each request its hint as it is sent, unless the workload has one. `cancel`
    lets go of a request whose client hangs up (`Workload.cancel_after`); who did is in `hung_up`.
    `turns` are those of the workload, if the routers know them.
    """

    sent: "array[float]"  # s, when each request went to the engine; NaN: not yet

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        submit: Callable[[Request], None],
        predictor: "Predictor | None" = None,
        cancel: Callable[[Request], object] | None = None,
        *,
        turns: Turns | None = None,
    ) -> None:
        self.workload = work = workload
        self.predictor, self.cancel = predictor, cancel
        # Predicted output tokens of each request; 0: it was never sent.
        self.hints = None if predictor is None else array("q", [0]) * len(workload)
        self.hung_up: list[Request] = []  # whose clients hung up, in order
        self._impatient: dict[int, Request] = {}  # not ended, and whose clients will hang up
        if predictor is not None:
            submit = partial(self._submit_with_hint, submit)
        if workload.cancel_after is not None:
            if cancel is None:
                raise MappingError("cancel_after", "nothing here lets a request go before its end")
            submit = partial(self._submit_for_a_while, submit)
        if workload.after is not None:
            work = replace(workload, arrival=workload.arrival.copy())  # it gets those of turns
            turns = turns or Turns(workload)
        size = len(workload)
        super().__init__(env, size, max(size, 1), iter([work]), submit, turns=turns)
        self.sent = self._chunk.sent

    def _submit_with_hint(self, submit: Callable[[Request], None], request: Request) -> None:
        """Hand a request to the engine with the length that is predicted for it."""
        assert self.hints is not None
        assert self.predictor is not None
        hint = self.predictor.predict(request) if request.hint is None else request.hint
        if request.max_tokens is not None:
            hint = min(hint, request.max_tokens)
        request.hint = self.hints[request.id] = hint
        submit(request)

    def _submit_for_a_while(self, submit: Callable[[Request], None], request: Request) -> None:
        """Hand a request to the engine until its client hangs up, if it does."""
        assert self.workload.cancel_after is not None
        when = self.sent[request.id] + float(self.workload.cancel_after[request.id])
        if not isnan(when):
            self._impatient[request.id] = request
            Alarm(self.env, partial(self._hang_up, request)).set(max(when, self.env.now))
        submit(request)

    def _hang_up(self, request: Request, _: simpy.Event) -> None:
        if self._impatient.pop(request.id, None) is None:
            return
        assert self.cancel is not None
        self.cancel(request)
        self.hung_up.append(request)
        super().finished(request)

    def finished(self, request: Request) -> None:
        if self._impatient:
            self._impatient.pop(request.id, None)
        if self.predictor is not None:
            self.predictor.observe(request)
        super().finished(request)
