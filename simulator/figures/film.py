"""Batching step by step, as a film: who sits where, what each step computes, and why one waits.

The first requests of a scenario are simulated again, step by step, and each step is written down
as a frame. Films of several runs show the same moments side by side.
"""

import json
from collections.abc import Sequence
from colorsys import hls_to_rgb
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.core.alarm import FastEnvironment
from simulator.core.request import Request, Step
from simulator.engine.core import InFlight
from simulator.engine.pipeline import make_replica
from simulator.engine.replica import Replica
from simulator.figures.style import PALE, PHASES, ink
from simulator.scenario import make_scheduler, resolve
from simulator.scenario.scenario import Scenario
from simulator.schedulers.continuous_batching import ContinuousBatching
from simulator.schedulers.static import Static
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.simulation.run import play
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

REQUESTS = 12  # that are shown unless told otherwise
MOST_REQUESTS = 200
MOST_STEPS = 20_000  # that are written down
MOST_FILMS = 3  # side by side
SHOTS = 120  # moments of a picture that moves
SECONDS = 15.0  # that it takes
MOST_SEATS = 32  # rows
MOST_WAITING = 12  # named
CELLS = 60  # of the KV cache

Seat = tuple[int, int, str, int]
"""Row, request, what it does (prefill, decode, done or held), and tokens: of its chunk, or so far
of its answer."""


@dataclass(slots=True)
class Frame:
    """One step: who sits where, who waits and why, and whose KV blocks are taken as it runs."""

    start: float  # s
    end: float
    seats: list[Seat]
    waiting: list[int]
    blocks: dict[int, int]  # by request
    free: int  # blocks
    why: str  # the first that waits does
    events: list[str]


@dataclass(slots=True)
class Film:
    """The steps of one run."""

    label: str
    prompts: list[int]  # tokens, by request
    outputs: list[int]
    seats: int
    blocks: int  # that there are
    frames: list[Frame]

    @property
    def end(self) -> float:
        """When the last step ended, in s."""
        return self.frames[-1].end if self.frames else 0.0

    def at(self, time: float) -> Frame | None:
        """Return the step under way at a time, or the last before it."""
        place = np.searchsorted([frame.start for frame in self.frames], time, "right") - 1
        return self.frames[place] if place >= 0 else None


def record(label: str, scenario: Scenario, requests: int = REQUESTS) -> Film:
    """Simulate the first `requests` requests step by step, and write each step down.

    Raises HeadwayError for a cluster, of whose replicas none is the one to show, and for more steps
    than a film can hold.
    """
    if not 1 <= requests <= MOST_REQUESTS:
        raise HeadwayError(f"a film is of 1 to {MOST_REQUESTS} requests, not {requests}")
    if scenario.cluster is not None:
        raise HeadwayError("cluster: a film shows one engine; leave the cluster out")
    spec = resolve(scenario)
    load = scenario.make_workload()
    load = load.rows(np.arange(min(requests, len(load))))
    scheduler = make_scheduler(spec, load.segments is not None)
    replica = make_replica(FastEnvironment(), scheduler, spec.cost, leap=False)
    camera = _Camera(replica)
    play(scenario, spec, load, replica)
    prompts, outputs = load.prompt_tokens.tolist(), load.output_tokens.tolist()
    seats = camera.seats_used
    return Film(label, prompts, outputs, seats, scheduler.blocks.usable, camera.frames)


class _Camera:
    """Looks at a replica as it decides; changes nothing."""

    def __init__(self, replica: Replica) -> None:
        self.scheduler = replica.scheduler
        self.frames: list[Frame] = []
        self.seats_used = 0
        self._seen: dict[int, Request] = {}
        self._seat_of: dict[int, int] = {}
        self._open: list[Frame] = []  # steps that have not ended
        self._preempted: dict[int, int] = {}
        self._submit, self._begin, self._commit = replica.submit, replica.begin, replica.commit
        for name in ("submit", "begin", "commit"):
            setattr(replica, name, getattr(self, name))

    def submit(self, request: Request) -> None:
        """Take note of a request that joins the queue."""
        if self.scheduler.fits(request):
            self._seen[request.id] = request
        self._submit(request)

    def begin(self, now: float, start: float) -> InFlight | None:
        """Write down what is decided."""
        batch = self._begin(now, start)
        if batch is not None:
            if len(self.frames) >= MOST_STEPS:
                raise HeadwayError(f"a film holds {MOST_STEPS:,} steps: show fewer requests")
            step: Step = batch.scheduled[0]
            frame = self._frame(step, now)
            self.frames.append(frame)
            self._open.append(frame)
        return batch

    def commit(self, scheduled: Any, decided: float, start: float, ends: list[float]) -> None:
        """Write down when it was over."""
        if self._open and scheduled is not None:
            frame = self._open.pop(0)
            place = len(self.frames) - len(self._open) - 2
            # An engine may decide a step while the one before runs.
            last_end = self.frames[place].end if place >= 0 else 0.0
            frame.start, frame.end = max(frame.start, last_end), ends[-1]
        self._commit(scheduled, decided, start, ends)

    def _frame(self, step: Step, now: float) -> Frame:
        running = {request.id: request for request in self.scheduler.running}
        events = self._events(running)
        for name in [name for name in self._seat_of if name not in running]:
            del self._seat_of[name]
        for name in running:
            if name not in self._seat_of:
                taken = {*self._seat_of.values()}
                self._seat_of[name] = next(k for k in range(len(taken) + 1) if k not in taken)
        self.seats_used = max(self.seats_used, *(seat + 1 for seat in self._seat_of.values()))
        chunks = {chunk.request.id: chunk.tokens for chunk in step.prefills}
        singles = {chunk.request.id for chunk in step.singles or ()}
        seats = [
            (self._seat_of[name], name, *self._doing(request, step, chunks, singles))
            for name, request in running.items()
        ]
        waiting = [name for name, r in self._seen.items() if name not in running and r.finish < 0]
        size, decodes = self.scheduler.blocks.block_size, self.scheduler.decodes
        blocks = {
            name: -(-(decodes.computed(request) + (request.joined >= 0)) // size)
            for name, request in running.items()
            if request.computed
        }
        why = self._why(step, running) if waiting and self.scheduler.waiting else ""
        free = self.scheduler.blocks.free
        return Frame(now, now, sorted(seats), waiting, blocks, free, why, events)

    def _doing(
        self, request: Request, step: Step, chunks: dict[int, int], singles: set[int]
    ) -> tuple[str, int]:
        """Say what a running request does in a step, and its tokens."""
        said = self.scheduler.decodes.generated(request)
        if request.id in chunks:
            return "prefill", chunks[request.id]
        if request.finish >= 0:
            return "done", said
        if request.id in singles or (request.joined >= 0 and step.decodes):
            return "decode", said + 1
        return "held", said

    def _events(self, running: dict[int, Request]) -> list[str]:
        """Tell who has come and gone since the last step."""
        out = [
            name for name, r in self._seen.items() if r.preemptions > self._preempted.get(name, 0)
        ]
        self._preempted |= {name: self._seen[name].preemptions for name in out}
        new = [name for name in running if name not in self._seat_of]
        gone = [n for n in self._seat_of if n not in running and self._seen[n].finish >= 0]
        told = (("done", gone), ("preempted", out), ("admitted", new))
        return [f"{word}: {', '.join(map(str, names))}" for word, names in told if names]

    def _why(self, step: Step, running: dict[int, Request]) -> str:
        """Say why the first of the queue was not admitted."""
        scheduler = self.scheduler
        head = scheduler.waiting.head()
        if isinstance(scheduler, Static):
            return f"{head.id} waits: nobody boards until the whole batch is done"
        if len(running) >= scheduler.max_num_seqs:
            return f"{head.id} waits: all {scheduler.max_num_seqs} seats are taken"
        if scheduler.preempted:
            return f"{head.id} waits: blocks are short, a request was just preempted"
        left = scheduler.max_num_batched_tokens - step.tokens
        if left <= 0:
            spent = scheduler.max_num_batched_tokens
            return f"{head.id} waits: the step's {spent:,} tokens are spent"
        plain = type(scheduler).lacks_blocks in (
            Scheduler.lacks_blocks,
            ContinuousBatching.lacks_blocks,
        )
        if plain and not scheduler.reserves:
            hits = scheduler.blocks.match(head)
            tokens = min(head.known, len(hits) * scheduler.blocks.block_size + left)
            lacking = scheduler.admission.lacking(head, hits, tokens, len(running))
            if lacking:
                return f"{head.id} waits: {lacking:,} blocks short"
        return f"{head.id} waits: the policy does not admit it yet"


def as_json(films: Sequence[Film]) -> str:
    """Return films as JSON, for the player of a page."""
    text = json.dumps([asdict(film) for film in films], separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


# Pictures that move.

Shape = tuple[Any, ...]
"""("rect", x, y, width, height, fill, stroke), or ("text", x, y, size, fill, anchor, words)."""
WIDTH, ROW, HEAD = 440, 22, 96
INK, FAINT, LINE = "#1b1f24", "#5b6470", "#c8ced6"
GOLDEN_ANGLE = 137.508  # degrees from one request's hue to the next: none comes twice


def size_of(films: Sequence[Film]) -> tuple[int, int]:
    """Return the picture's width and height, in pixels."""
    rows = min(max(film.seats for film in films), MOST_SEATS)
    return WIDTH * len(films) + 20, HEAD + ROW * rows + 104


def shots(films: Sequence[Film]) -> list[list[Shape]]:
    """Draw moments evenly over the time of the longest run, all runs in each."""
    if not any(film.frames for film in films):
        raise HeadwayError("no step to show: no request could be served")
    end = max(film.end for film in films)
    rows = min(max(film.seats for film in films), MOST_SEATS)
    times = np.linspace(0.0, end, SHOTS)
    return [
        [
            shape
            for k, film in enumerate(films)
            for shape in _scene(film, float(time), end, 14 + WIDTH * k, rows)
        ]
        for time in times
    ]


def _scene(film: Film, time: float, end: float, left: int, rows: int) -> list[Shape]:
    """Draw a run at a time."""
    frame = film.at(time)
    wide = WIDTH - 28
    over = time > film.end
    state = "all done" if over else f"{time:,.2f} s" if end < 100 else f"{time:,.0f} s"
    shapes: list[Shape] = [
        ("text", left, 24, 16, INK, "start", film.label),
        ("text", left + wide, 24, 13, FAINT, "end", state),
        ("text", left, 50, 12, FAINT, "start", "waiting"),
    ]
    waiting = [] if frame is None or over else frame.waiting
    for k, name in enumerate(waiting[:MOST_WAITING]):
        shapes += _chip(left + 58 + 26 * k, 36, name)
    if len(waiting) > MOST_WAITING:
        more = f"+{len(waiting) - MOST_WAITING}"
        shapes.append(("text", left + 60 + 26 * MOST_WAITING, 50, 12, FAINT, "start", more))
    why = "" if frame is None or over else frame.why
    shapes.append(("text", left, 76, 12, INK, "start", why))
    seats = {} if frame is None or over else {seat: rest for seat, *rest in frame.seats}
    for row in range(rows):
        shapes += _seat(film, seats.get(row), left, HEAD + ROW * row, wide)
    shapes += _cache(film, None if over else frame, left, HEAD + ROW * rows + 12, wide)
    events = "" if frame is None or over else ", ".join(frame.events)
    shapes.append(("text", left, HEAD + ROW * rows + 92, 12, INK, "start", events))
    return shapes


def _hue_of(request: int) -> str:
    """Return a request's colour, as the page's player does; every other eight are darker."""
    light = 0.2 if request // 8 % 2 else 0.31  # the eighth from here has nearly this hue
    red, green, blue = hls_to_rgb(request * GOLDEN_ANGLE % 360 / 360, light, 0.45)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _chip(x: float, y: float, name: int) -> list[Shape]:
    hue = _hue_of(name)
    middle = ("text", x + 11, y + 14, 12, ink(hue), "middle", str(name))
    return [("rect", x, y, 22, 18, hue, ""), middle]


def _seat(film: Film, found: Any, left: int, top: int, wide: int) -> list[Shape]:
    """Draw a seat: whose it is, what it does, and how far the answer is."""
    high = ROW - 4
    if found is None:
        return [("rect", left, top, wide, high, "#ffffff", LINE)]
    name, doing, tokens = found
    words = {
        "prefill": f"prefill {tokens:,} of {film.prompts[name]:,} tokens",
        "decode": f"decode: token {tokens:,}",
        "done": "done, keeps its seat",
        "held": "no turn in this step",
    }[doing]
    hue = {**PHASES, "done": PALE_HEX}.get(doing, "#ffffff")
    shapes: list[Shape] = [("rect", left + 26, top, wide - 26, high, hue, LINE)]
    if doing == "decode":
        share = min(tokens / max(film.outputs[name], 1), 1.0)
        shapes.append(("rect", left + 26, top, round((wide - 26) * share), high, DECODED, ""))
    shapes += _chip(left, top, name)
    letters = ink(hue) if doing != "decode" else "#000000"
    shapes.append(("text", left + 34, top + 13, 12, letters, "start", words))
    return shapes


def _cache(film: Film, frame: Frame | None, left: int, top: int, wide: int) -> list[Shape]:
    """Draw the KV cache as cells, each of some blocks, in the colours of requests."""
    each = -(-film.blocks // CELLS)
    taken = {} if frame is None else frame.blocks
    used = film.blocks - (film.blocks if frame is None else frame.free)
    unit = f" (a cell: {each:,} blocks)" if each > 1 else ""
    told = f"KV cache: {used:,} of {film.blocks:,} blocks{unit}"
    shapes: list[Shape] = [("text", left, top + 12, 12, FAINT, "start", told)]
    owners = [name for name, count in taken.items() for _ in range(round(count / each))]
    columns, size = 30, wide / 30
    for cell in range(-(-film.blocks // each)):
        x, y = left + size * (cell % columns), top + 20 + size * (cell // columns)
        owned = cell < len(owners)
        hue = _hue_of(owners[cell]) if owned else "#ffffff"
        shapes.append(
            ("rect", round(x, 1), round(y, 1), round(size - 2, 1), round(size - 2, 1), hue, LINE)
        )
    return shapes


PALE_HEX = f"#{round(float(PALE) * 255):02x}" + f"{round(float(PALE) * 255):02x}" * 2
DECODED = "#a18fce"


def svg(films: Sequence[Film]) -> bytes:
    """Return an animated SVG (SMIL), each shape once, shown at its moments; it repeats."""
    wide, high = size_of(films)
    every = shots(films)
    when: dict[Shape, list[int]] = {}
    for number, shapes in enumerate(every):
        for shape in shapes:
            when.setdefault(shape, []).append(number)

    def layer(shape: Shape) -> tuple[bool, float]:
        """Return what lies below first: rectangles before texts, large before small."""
        return (True, 0.0) if shape[0] == "text" else (False, -float(shape[3] * shape[4]))

    body = "".join(_svg_shape(one, when[one], len(every)) for one in sorted(when, key=layer))
    title = escape(", ".join(film.label for film in films))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="DejaVu Sans, Verdana, sans-serif" role="img">'
        f"<title>Batching step by step: {title}</title>"
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>{body}</svg>\n'
    ).encode()


def _svg_shape(shape: Shape, shown: list[int], count: int) -> str:
    moves = _visibility(shown, count)
    if shape[0] == "rect":
        _, x, y, wide, high, fill, stroke = shape
        edge = f' stroke="{stroke}"' if stroke else ""
        look = f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="2" fill="{fill}"{edge}'
        return f"{look}>{moves}</rect>" if moves else f"{look}/>"
    _, x, y, size, fill, anchor, words = shape
    if not words:
        return ""
    look = f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
    return f"{look}{escape(words)}{moves}</text>"


def _visibility(shown: list[int], count: int) -> str:
    """Show a shape at some of the moments; nothing is said of one that always is."""
    there = np.zeros(count, bool)
    there[shown] = True
    if there.all():
        return ""
    changes = [0, *(np.flatnonzero(np.diff(there)) + 1).tolist()]
    values = ";".join("visible" if there[k] else "hidden" for k in changes)
    times = ";".join(f"{k / count:.4g}" for k in changes)
    return (
        f'<animate attributeName="visibility" dur="{SECONDS:g}s" repeatCount="indefinite" '
        f'calcMode="discrete" values="{values}" keyTimes="{times}"/>'
    )


def gif(films: Sequence[Film]) -> bytes:
    """Return an animated GIF; it repeats."""
    from PIL import Image, ImageDraw

    wide, high = size_of(films)
    pages = []
    for shapes in shots(films):
        image = Image.new("RGB", (wide, high), "#ffffff")
        draw = ImageDraw.Draw(image)
        for shape in shapes:
            if shape[0] == "rect":
                _, x, y, w, h, fill, stroke = shape
                if w >= 1:
                    draw.rectangle((x, y, x + w, y + h), fill=fill, outline=stroke or None)
            else:
                _, x, y, size, fill, anchor, words = shape
                place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
                draw.text((x, y), words, fill=fill, font=_font(size), anchor=place)
        pages.append(image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64))
    file = BytesIO()
    each = round(1000 * SECONDS / len(pages))
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:], duration=each, loop=0)
    return file.getvalue()


@cache
def _font(size: int) -> "FreeTypeFont":
    from pathlib import Path

    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)
