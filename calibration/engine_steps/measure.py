"""Measure steps on the engine: a grid in shuffled passes, swaps, and steps of real schedules.

Every pass visits all points once in a new order, with a probe point in between that is always the
same: what drifts (clocks, temperature, neighbours) then hits all points alike and can be seen.
A visit runs its step once unmeasured, since a live engine's steps resemble the ones before them.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from calibration.engine_steps.grid import Point
from calibration.engine_steps.steps_file import Row
from gpu_backend.engine import Engine, Measured
from gpu_backend.live import LiveRun
from gpu_backend.sensors import NO_READING, Reading, Sensors
from simulator.core.request import Chunk, Request

Sink = Callable[[Row], None]

PROBE_EVERY = 20  # visits
REPEATS = 2  # measured runs of a visit, decodes going on by a token each time as in service
MAX_PASSES = 25
SWAP_BLOCKS = (1, 4, 16, 64, 256)
SWAP_REPEATS = 10


class ShuffledBlocks:
    """Pages for made-up requests: the first ones of the cache, which a live engine uses again and
    again, in random order as after some time of service."""

    def __init__(self, engine: Engine, rng: np.random.Generator, count: int) -> None:
        """Shuffle the first `count` pages of an engine, or all of them, without the null page."""
        self._size = engine.block_size
        self._order: list[int] = (1 + rng.permutation(min(count, engine.num_blocks - 1))).tolist()
        self._next = 0

    def allocate(self, tokens: int) -> list[int]:
        """Take pages for so many tokens, from the beginning again once all are taken."""
        count = -(-tokens // self._size)
        first, self._next = self._next, self._next + count
        if self._next > len(self._order):
            first, self._next = 0, count
        return self._order[first : self._next]


def make_chunks(point: Point, allocator: ShuffledBlocks) -> list[Chunk]:
    """Make requests that are where the point has them, their contexts taken as computed.

    They have blocks to go on by `REPEATS` tokens.
    """
    pieces = [*point.chunks, *((context, 1) for context in point.contexts)]
    chunks = []
    for k, (start, new) in enumerate(pieces):
        blocks = allocator.allocate(start + new + REPEATS)
        chunks.append(Chunk(Request(-2 - k, 0.0, start + new, 2, blocks=blocks), start, new))
    return chunks


def point_row(
    point: Point,
    measured: Measured,
    run: str,
    turn: int,
    reading: Reading = NO_READING,
    *,
    ahead: int = 0,
) -> Row:
    """Write a measured point down, its decodes `ahead` tokens beyond where it has them."""
    count = len(point.contexts)
    return Row(
        run=run,
        kind=point.kind,
        point=point.number,
        turn=turn,
        decodes=count,
        context=sum(point.contexts) + count * (1 + ahead),
        longest=max(point.contexts, default=-1 - ahead) + 1 + ahead,
        chunks=point.chunks,
        wall_s=measured.wall_s,
        unique_ctx=point.kv_tokens,  # requests of a grid share nothing
        **_columns(measured, reading),
    )


def _columns(measured: Measured, reading: Reading) -> dict[str, Any]:
    """Return the columns that do not depend on why a step was carried out."""
    return {
        "path": "graph" if measured.bucket else "eager",
        "bucket": measured.bucket,
        "device_s": measured.device_s,
        "host_s": measured.host_s,
        "launch_s": measured.launch_s if measured.launch_s else None,
        "n_logits": measured.n_logits,
        "sm_mhz": reading.sm_mhz,
        "power_w": reading.power_w,
    }


def measure_grid(
    engine: Engine,
    points: Sequence[Point],
    sink: Sink,
    rng: np.random.Generator,
    budget_s: float,
    *,
    sensors: Sensors | None = None,
    clock: Callable[[], float] = monotonic,
) -> int:
    """Measure the points in passes until the time is over; return the number of whole passes.

    The first pass takes coarse points first, so that little time covers the range thinly.
    """
    engine.fill_random()
    until = clock() + budget_s
    probe = _probe(points)

    def visit(point: Point, turn: int) -> None:
        """Run a point's step once for warmth, then measured."""
        engine.reset()
        lengths = [*(context + 1 for context in point.contexts), *map(sum, point.chunks)]
        pages = sum(-(-(length + REPEATS) // engine.block_size) for length in lengths)
        chunks = make_chunks(point, ShuffledBlocks(engine, rng, pages))
        positions = engine.spec.max_position_embeddings
        goes_on = not point.chunks and max(point.contexts) + REPEATS < positions
        engine.execute(chunks, keep=goes_on)
        for ahead in range(1, REPEATS + 1):
            measured = engine.execute(None if goes_on else chunks, keep=goes_on)
            reading = sensors.latest if sensors is not None else NO_READING
            there = ahead if goes_on else 0
            sink(point_row(point, measured, "grid", turn, reading, ahead=there))

    for turn in range(MAX_PASSES):
        order = rng.permutation(len(points)).tolist()
        if turn == 0:
            order.sort(key=lambda k: not points[k].coarse)
        for number, k in enumerate(order):
            if clock() > until:
                return turn
            if number % PROBE_EVERY == 0:
                visit(probe, turn)
            visit(points[k], turn)
    return MAX_PASSES


def _probe(points: Sequence[Point]) -> Point:
    """Choose a decode step of middling size."""
    decodes = [point for point in points if point.kind == "decode"] or list(points)
    middle = sorted(decodes, key=lambda point: point.kv_tokens)[len(decodes) // 2]
    return Point(-1, "probe", middle.contexts, middle.chunks, coarse=True)


def measure_swaps(engine: Engine, sink: Sink, rng: np.random.Generator) -> None:
    """Time copies of 1 to 256 blocks to the host and back."""
    engine.reset()
    sizes = [size for size in SWAP_BLOCKS if size < engine.num_blocks]
    for turn in range(SWAP_REPEATS):
        for size in rng.permutation(sizes).tolist():
            allocator = ShuffledBlocks(engine, rng, engine.num_blocks)
            request = Request(-2, 0.0, size * engine.block_size, 2)
            blocks = allocator.allocate(request.prompt_tokens)
            out = engine.swap_out(request, blocks)
            back = engine.swap_in(request, blocks)
            if turn:  # the first copies are cold
                sink(_swap_row("swap_out", size, out, turn))
                sink(_swap_row("swap_in", size, back, turn))


def _swap_row(kind: str, blocks: int, seconds: float, turn: int) -> Row:
    copies: Any = {"swapped_out" if kind == "swap_out" else "swapped_in": (blocks,)}
    return Row(run="swap", kind=kind, turn=turn, device_s=seconds, wall_s=seconds, **copies)


def live_rows(live: LiveRun, run: str, reading: Reading = NO_READING) -> list[Row]:
    """Write the steps of a live run down; `sensed` is what the GPU said at its end."""
    return [
        Row(
            run=run,
            kind="onpolicy",
            turn=turn,
            decodes=timing.decodes,
            context=timing.context,
            chunks=timing.chunks,
            swapped_out=timing.swapped_out,
            swapped_in=timing.swapped_in,
            wall_s=timing.measured.wall_s - timing.measured.listing_s,  # as a grid has it
            schedule_s=timing.schedule_s + timing.measured.listing_s,
            unique_ctx=timing.measured.unique_ctx,
            **_columns(timing.measured, reading),
        )
        for turn, timing in enumerate(live.timings)
    ]
