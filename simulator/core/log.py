"""What a run writes down: facts, in packed rows. Every metric is derived from them afterwards.

A *tick* is a step in which each member of the decode set advances by one token. A request's
tokens are runs: one token that a prefill brought out at `start`, then one at each of `ticks`
successive ticks from `first_tick` on. So the times of all tokens are slices of `tick_ends`.
"""

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from simulator.core.packed import PAGE, PackedRows, first_of, pack, pack_column, unpack_column
from simulator.core.request import Copies, Request, Work

STEP = np.dtype(
    [
        ("start", "f8"),  # s
        ("end", "f8"),  # s, of the last of `steps`
        ("steps", "i8"),  # successive steps that this row stands for, all alike
        ("context", "i8"),  # KV entries read by the decodes; each later step: + decodes + ghosts
        ("prefill_context", "i8"),  # (query, key) pairs of the prefill chunks
        ("kv_tokens", "i8"),  # tokens stored in the blocks in use, after the first step
        ("prefill_tokens", "i4"),  # prompt (or recomputed) tokens, without padding
        ("decodes", "i4"),  # decode tokens of each step that somebody receives
        ("wasted", "i4"),  # token slots of each step that nobody needs: padding and ghosts
        ("running", "i4"),
        ("waiting", "i4"),  # as the row begins
        ("blocks_used", "i4"),  # during the first step
        ("prefills", "i4"),  # chunks of prompts
        ("preempted", "i4"),
    ]
)
STEP_ROW = tuple(STEP.names or ())[3:]
"""The columns that are known of a step as it is scheduled."""
StepRow = tuple[int, ...]
"""Their values. A class of its own would cost 2 % of a run: one is made for every step."""
REQUEST = np.dtype(
    [
        ("first_scheduled", "f8"),
        ("first_token", "f8"),
        ("finish", "f8"),
        ("id", "i8"),
        ("preemptions", "i4"),
        ("cached", "i4"),
        ("generated", "i4"),
        ("reason", "i4"),  # index into REASONS
    ]
)
RUN = np.dtype([("start", "f8"), ("id", "i8"), ("first_tick", "i8"), ("ticks", "i8")])
PAUSE = np.dtype(
    [
        ("start", "f8"),  # s, when it was preempted
        ("resumed", "f8"),  # s, when it was admitted again
        ("id", "i8"),
        ("recomputed", "i8"),  # tokens that had been computed and have to be once more
    ]
)
SWAP = np.dtype(
    [
        ("start", "f8"),  # s, of the step that copies
        ("requests_out", "i8"),
        ("blocks_out", "i8"),
        ("requests_in", "i8"),
        ("blocks_in", "i8"),
        ("added", "f8"),  # s by which the copies make the step longer
    ]
)
LOAD = np.dtype(
    [
        ("start", "f8"),  # s, of the step that copies
        ("id", "i8"),
        ("blocks", "i8"),  # of its prefix that came from the host tier
        ("fresh", "i8"),  # 1: at its first admission
        ("first", "i8"),  # of these blocks, those that came from a first tier behind the host
        ("second", "i8"),  # and from a second
    ]
)
DRAFT = np.dtype(
    [
        ("start", "f8"),  # s, of the step that verifies
        ("decodes", "i8"),  # sequences that decode
        ("drafts", "i8"),  # their draft tokens
        ("accepted", "i8"),  # of these, also those beyond the end of their request
    ]
)
SEAT = np.dtype(
    [
        ("first_token", "f8"),  # s, when its first token was computed
        ("end", "f8"),  # s, when its last one was
        ("freed", "f8"),  # s, when its seat was free again
        ("id", "i8"),
        ("steps", "i8"),  # of its batch, until then
        ("idle_steps", "i8"),  # of these, those after its last token
    ]
)
TRANSFER = np.dtype(
    [
        ("id", "i8"),
        ("producer", "i4"),  # by number
        ("consumer", "i4"),
        ("ready", "f8"),  # s, when the prompt was computed
        ("asked", "f8"),  # s, when the consumer had blocks for its KV cache
        ("begin", "f8"),  # s, when the link turned to it
        ("end", "f8"),  # s, when it was there
        ("scheduled", "f8"),  # s, when the consumer admitted the request
        ("blocks", "i4"),  # that were moved
        ("found", "i4"),  # that the consumer's prefix cache had
    ]
)
ENCODING = np.dtype(
    [
        ("id", "i8"),
        ("begin", "f8"),  # s, when its images went to the encoders
        ("encoded", "f8"),  # s, when all were encoded
        ("end", "f8"),  # s, when all outputs were there
    ]
)
REASONS = ("stop", "length", "rejected", "unfinished", "shed", "timeout")
"""Ended by itself; cut at max_tokens or max_model_len; could never fit, or came beyond a limit of
the queue; still there when the run was stopped, or when its client hung up; of a cluster's clients:
refused by its admission control, given up after a timeout."""
STOP, LENGTH, REJECTED, UNFINISHED, SHED, TIMEOUT = range(len(REASONS))

PACKED = {"step_rows": STEP, "request_rows": REQUEST, "run_rows": RUN}
LISTED = ("tick_ends", "leap_blocks", "joined", "decided")

pack_span = Struct("<ddq").pack  # the first columns of STEP; two calls are faster than one
pack_step = Struct("<qqqiiiiiiii").pack  # the others
pack_request = Struct("<dddqiiii").pack
pack_run = Struct("<dqqq").pack
pack_pause = Struct("<ddqq").pack
pack_swap = Struct("<dqqqqd").pack
pack_load = Struct("<dqqqqq").pack
pack_draft = Struct("<dqqq").pack
pack_seat = Struct("<dddqqq").pack
pack_transfer = Struct("<qiidddddii").pack
pack_encoding = Struct("<qddd").pack


@dataclass(slots=True, eq=False)
class Log:
    """One replica's facts."""

    num_blocks: int  # usable KV blocks
    block_size: int  # tokens
    num_seats: int = 0  # requests that a batch has room for
    step_rows: bytearray = field(default_factory=bytearray)
    request_rows: bytearray = field(default_factory=bytearray)
    run_rows: bytearray = field(default_factory=bytearray)
    pause_rows: bytearray = field(default_factory=bytearray)
    swap_rows: bytearray = field(default_factory=bytearray)
    load_rows: bytearray = field(default_factory=bytearray)
    draft_rows: bytearray = field(default_factory=bytearray)
    seat_rows: bytearray | None = None
    """Where requests keep their seats beyond their end, as in a static batch; else None."""
    delivers_together: bool = False  # answers are given when their seats are freed
    host_waits: float = 0.0
    """Seconds in which kernels waited for the host though the two overlap."""
    offloaded: int = 0  # blocks that went to the host tier
    amounts: dict[str, float] = field(default_factory=lambda: defaultdict(int))
    """What features add to figures of the summary, by their keys there."""
    tick_ends: "array[float]" = field(default_factory=lambda: array("d"))
    ticks_before: int = 0  # that have been taken out of `tick_ends`, where a run is streamed
    leap_blocks: "array[int]" = field(default_factory=lambda: array("i"))
    """KV blocks by which each step adds to those in use, of rows of n steps the last n - 1."""
    joined: "array[float]" = field(default_factory=lambda: array("d"))
    """When requests joined the queue (s), those that could never fit left out."""
    decided: "array[float]" = field(default_factory=lambda: array("d"))
    """When each row's first step was decided (s), where that is before its start: async."""
    emptied: "array[float]" = field(default_factory=lambda: array("d"))
    """When the engine failed (s), and all who waited went elsewhere."""
    pages: dict[str, list[Any]] = field(default_factory=dict)
    """What `put_by` took out of the front of the fields of `PACKED` and `LISTED`, a page each."""

    def put_by(self, least: int = 1) -> None:
        """Pack what is written of a long run, but for the last page of each: it takes less room.

        Only where these are `least` pages, and in a run in which nobody takes rows out again.
        """
        for name, kind in PACKED.items():
            rows: bytearray = getattr(self, name)
            size = PAGE * kind.itemsize
            over = len(rows) // size - 1
            if over >= least:
                parts = np.split(np.frombuffer(bytes(rows[: over * size]), kind), over)
                self.pages.setdefault(name, []).extend(map(pack, parts))
                del rows[: over * size]
        for name in LISTED:
            values: array[Any] = getattr(self, name)
            over = len(values) // PAGE - 1
            if over >= least:
                parts = np.split(np.array(values[: over * PAGE]), over)
                self.pages.setdefault(name, []).extend(map(pack_column, parts))
                del values[: over * PAGE]

    def _rows(self, name: str) -> npt.NDArray[np.void]:
        tail = np.frombuffer(getattr(self, name), PACKED[name])
        pages = self.pages.get(name)
        return cast(npt.NDArray[np.void], PackedRows(pages, tail)) if pages else tail

    def size(self, name: str) -> int:
        """Count the values of one of `LISTED`."""
        return PAGE * len(self.pages.get(name, ())) + len(getattr(self, name))

    def column(self, name: str, begin: int = 0, end: int | None = None) -> npt.NDArray[Any]:
        """Return one of `LISTED`, whole or from one place to another."""
        tail, pages = np.asarray(getattr(self, name)), self.pages.get(name, [])
        first, over = begin // PAGE, self.size(name) if end is None else min(end, self.size(name))
        some = pages[first : -(-over // PAGE)]
        if over <= PAGE * len(pages):
            tail = tail[:0]
        elif not some:
            return tail[begin - PAGE * len(pages) : over - PAGE * len(pages)]
        whole = np.empty(PAGE * len(some) + len(tail), tail.dtype)
        for at, page in enumerate(some):
            whole[PAGE * at : PAGE * (at + 1)] = unpack_column(page)
        whole[PAGE * len(some) :] = tail
        return whole[begin - PAGE * first : over - PAGE * first]

    def ticks_between(self, low: float, high: float) -> npt.NDArray[np.float64]:
        """Return the ends of the ticks from one time (s) to another, and of some around them."""
        pages = self.pages.get("tick_ends", [])
        first, over = (bisect_left(pages, time, key=first_of) for time in (low, high))
        end = None if over == len(pages) else PAGE * (over + 1)
        return self.column("tick_ends", PAGE * max(first - 1, 0), end)

    @property
    def ended(self) -> int:
        """How many requests have a row."""
        return len(self._rows("request_rows"))

    @property
    def steps(self) -> npt.NDArray[np.void]:
        """Rows of dtype STEP, in order of time; of a long run a `PackedRows`."""
        return self._rows("step_rows")

    @property
    def requests(self) -> npt.NDArray[np.void]:
        """Rows of dtype REQUEST, in order of finish; each request has exactly one; likewise."""
        return self._rows("request_rows")

    @property
    def runs(self) -> npt.NDArray[np.void]:
        """Rows of dtype RUN, those of one request in order of time; likewise."""
        return self._rows("run_rows")

    @property
    def pauses(self) -> npt.NDArray[np.void]:
        """Rows of dtype PAUSE, of preemptions whose request was admitted again."""
        return np.frombuffer(self.pause_rows, PAUSE)

    @property
    def swaps(self) -> npt.NDArray[np.void]:
        """Rows of dtype SWAP, one for each step that copies KV blocks to the host or back."""
        return np.frombuffer(self.swap_rows, SWAP)

    @property
    def loads(self) -> npt.NDArray[np.void]:
        """Rows of dtype LOAD, one for each prefix that came from the host tier."""
        return np.frombuffer(self.load_rows, LOAD)

    @property
    def drafts(self) -> npt.NDArray[np.void]:
        """Rows of dtype DRAFT, one for each step with decodes, where these are speculative."""
        return np.frombuffer(self.draft_rows, DRAFT)

    @property
    def seats(self) -> npt.NDArray[np.void]:
        """Rows of dtype SEAT, one for each seat that is free again, where seats are kept."""
        return np.frombuffer(self.seat_rows or b"", SEAT)

    def record(self, one: Request, reason: int, tokens: int, first: float) -> None:
        """Write down what became of a request: its tokens, of which the first came at `first`, s.

        Without a token, `first` does not matter.
        """
        finish = -1.0 if reason == UNFINISHED else one.finish
        times = one.first_scheduled, first if tokens else -1.0, finish
        counts = one.preemptions, one.cached, tokens
        self.request_rows += pack_request(*times, one.id, *counts, reason)

    def record_unserved(self, id: int, finish: float, reason: int) -> None:
        """Write down when a request was given up, s (-1: it was not), and no more."""
        times, counts = (-1.0, -1.0, finish), (0, 0, 0)
        self.request_rows += pack_request(*times, id, *counts, reason)

    @property
    def written(self) -> tuple[int, int]:
        """How many bytes of runs and seats have been written."""
        return len(self.run_rows), len(self.seat_rows or b"")

    def drop_rows_of(self, ids: Sequence[int], since: tuple[int, int]) -> None:
        """Take out the runs and seats of some requests that were written `since`."""
        tables = ((self.run_rows, RUN), (self.seat_rows, SEAT))
        for (rows, kind), start in zip(tables, since, strict=True):
            if rows is not None and start < len(rows):
                found = np.frombuffer(bytes(rows[start:]), kind)
                rows[start:] = found[~np.isin(found["id"], ids)].tobytes()

    def drop_runs_ahead(self) -> None:
        """Take out runs with tokens of steps that were scheduled and will never end."""
        rows = np.frombuffer(bytes(self.run_rows), RUN)
        over = self.ticks_before + len(self.tick_ends)
        kept = rows["first_tick"] + rows["ticks"] <= over
        if not kept.all():
            self.run_rows[:] = rows[kept].tobytes()

    def record_work(
        self, work: Mapping[str, Work], seconds: float, own: Mapping[str, float] | None
    ) -> None:
        """Write down what features had to do with a step and its repeats, of so many s.

        By their keys `own` has the seconds that they took themselves.
        """
        for name, one in work.items():
            for key, amount in one.amounts(seconds, (own or {}).get(name, 0.0)).items():
                self.amounts[key] += amount

    def record_copies(self, start: float, copies: Copies, swap: float) -> None:
        """Write down what a step that began at `start` copied; swaps made it `swap` s longer."""
        for load in copies.loads:
            self.load_rows += pack_load(
                start, load.request.id, load.count, load.fresh, *load.fetched
            )
        if not copies.outgoing and not copies.incoming:
            return
        out = len(copies.outgoing), copies.swapped_out
        back = len(copies.incoming), copies.swapped_in
        self.swap_rows += pack_swap(start, *out, *back, swap)
