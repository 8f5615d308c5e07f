"""A live server beside the simulation of its own traffic: when do they part?

The traffic is read off the server's counters: how many requests came between two polls, and the
histograms of the lengths of those that ended. What prompts share is what the scenario's workload
says. The simulation is then polled at the same times, and both are compared window by window.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan, nan
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from headway.common.http_server import on_interrupt
from headway.twin.options import Watched
from headway.twin.polled_gauges import polled_gauges
from headway.twin.remote import Scrape, read_text, with_session
from simulator import run
from simulator.core.log import Log
from simulator.core.request import Segments
from simulator.scenario.draw import make_workload
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Floats, Ints, Workload

HISTORY = 30  # windows that are simulated
SILENT = 10.0  # s without an answer, after which the server is taken for gone
ROWS = {"running": 1.0, "waiting": 1.0, "kv_usage": 2.0, "hit_rate": 5.0, "preemptions": 3.0}
"""What is compared, and what may differ at least: requests, percent, preemptions."""
METRICS = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "finished": "request_success_total",
    "queries": "prefix_cache_queries_total",
    "hits": "prefix_cache_hits_total",
    "preemptions": "num_preemptions_total",
}
GAUGES = ("running", "waiting", "kv_usage")

Histogram = tuple[Floats, Floats, float]
"""Upper bounds, counts in each bucket (not cumulative), sum."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What /metrics said, summed over engines."""

    time: float  # s
    values: Mapping[str, float]  # by METRICS, and kv_usage: percent, mean over engines
    prompt: Histogram
    output: Histogram

    @property
    def finished(self) -> float:
        """Requests that have ended so far."""
        return self.values["finished"]

    @property
    def seen(self) -> float:
        """Requests that have come so far."""
        return self.finished + self.there

    @property
    def there(self) -> float:
        """Requests that are there."""
        return self.values["running"] + self.values["waiting"]


@dataclass(frozen=True, slots=True)
class Window:
    """One window: what the server says, and what the simulation does."""

    start: float  # s
    end: float
    requests: float  # that came
    server: Mapping[str, float]
    simulation: Mapping[str, float]
    apart: Mapping[str, int]  # 1: the server has more; -1: the simulation


@dataclass(slots=True)
class Verdict:
    """What became of a comparison."""

    windows: list[Window] = field(default_factory=list)
    parted: dict[str, Window] = field(default_factory=dict)  # where each began to differ
    requests: float = 0.0  # that came while it watched


def read_poll(text: str, time: float) -> Poll:
    """Read vLLM's /metrics; raise HeadwayError where they are not vLLM's."""
    try:
        found = Scrape(text)
    except ValueError as error:
        raise HeadwayError(f"--url: no metric of Prometheus: {error}") from None
    if isnan(found.total("num_requests_running")):
        raise HeadwayError("--url: no vllm:num_requests_running: are these vLLM's /metrics?")
    for _, speed in found.values["headway:speed"]:
        if speed != 1:
            raise HeadwayError(f"--url: headway serve has --speed {speed:g}: shadow needs 1")
    usage = [value for _, value in found.values["vllm:kv_cache_usage_perc"]]
    values = {name: found.total(metric, 0.0) for name, metric in METRICS.items()}
    values["kv_usage"] = 100 * sum(usage) / len(usage) if usage else nan
    sizes = (_histogram(found, f"request_{what}_tokens") for what in ("prompt", "generation"))
    return Poll(time, values, *sizes)


def _histogram(found: Scrape, name: str) -> Histogram:
    counts: defaultdict[float, float] = defaultdict(float)
    for labels, count in found.values[f"vllm:{name}_bucket"]:
        counts[float(labels.get("le", "inf"))] += count
    bounds = np.array(sorted(counts))
    upto = np.array([counts[bound] for bound in bounds.tolist()])
    return bounds, np.diff(upto, prepend=0.0), found.total(f"{name}_sum", 0.0)


def lengths(before: Histogram, after: Histogram) -> Ints:
    """Get lengths that a histogram has seen between two polls: their buckets and sum are right."""
    bounds, counts, total = after
    new = counts - before[1] if len(before[1]) == len(counts) else counts
    times, total = new.astype(np.int64), total - before[2]
    if not times.any():
        return np.zeros(0, np.int64)
    last = bounds[-2] if len(bounds) > 1 else 1.0
    high = np.where(np.isinf(bounds), 10 * last, bounds)
    low = np.append(0.0, high[:-1]) + 1
    lows, highs = np.repeat(low, times), np.repeat(high, times)
    room = float((highs - lows).sum())
    part = min(max((total - float(lows.sum())) / room, 0.0), 1.0) if room else 0.0
    upto = np.round(np.cumsum(lows + part * (highs - lows)))
    found: Ints = np.maximum(np.diff(upto, prepend=0.0), 1).astype(np.int64)
    return found


def traffic(polls: Sequence[Poll], like: Workload, seed: int) -> Workload:
    """Return the requests that a server has had since the first poll; those there then come first.

    They end in the order in which they come. What nobody has seen the end of is as long as some
    other. `like` says what prompts share, who sends them, and with which priority.
    """
    random = np.random.default_rng(seed)
    start = polls[0]
    times = [0.0] * round(start.there)
    count, pairs = float(len(times)), list[tuple[int, int]]()
    for before, after in pairwise(polls):
        new = round(after.seen - start.finished - count)
        if new > 0:
            span = after.time - before.time
            times += [before.time - start.time + span * (k + 0.5) / new for k in range(new)]
            count += new
        prompts = lengths(before.prompt, after.prompt)
        outputs = lengths(before.output, after.output)
        random.shuffle(prompts)
        pairs += zip(prompts.tolist(), outputs.tolist(), strict=False)
    del pairs[len(times) :]
    if not pairs:
        raise NoTrafficError("no request has ended yet")
    drawn = random.integers(0, len(pairs), len(times) - len(pairs))
    pairs += [pairs[k] for k in drawn.tolist()]
    load = like.part(np.arange(len(times)) % len(like))
    load.arrival = np.array(times)
    load.prompt_tokens = np.array([prompt for prompt, _ in pairs], np.int64)
    load.output_tokens = np.array([output for _, output in pairs], np.int64)
    load.max_tokens = load.hint = load.cancel_after = load.max_concurrency = load.frontend = None
    if like.segments is not None:
        load.segments = _segments(like.segments, load.prompt_tokens.tolist())
    load.source = "requests that a server's counters show"
    return load


class NoTrafficError(Exception):
    """There is nothing to compare as yet."""


def _segments(like: Sequence[Segments | None], sizes: Sequence[int]) -> list[Segments | None]:
    """Let prompts share what those of a workload do, each cut or extended to its length."""
    uses = Counter(name for row in like for name in {name for name, _ in row or ()})
    found: list[Segments | None] = []
    for k, size in enumerate(sizes):
        turn, row = divmod(k, len(like))
        parts: list[tuple[object, int]] = []
        left = size
        for name, tokens in like[row] or ():
            if taken := min(tokens, left):
                own = turn and uses[name] == 1  # what only one prompt says comes but once
                parts.append((("again", turn, name) if own else name, taken))
            left -= taken
        if left:
            parts.append((("own", k), left))
        found.append(tuple(parts))
    return found


def simulated_polls(logs: Sequence[Log], load: Workload, times: Floats) -> dict[str, Floats]:
    """Return gauges and counters of a simulation as of these times, s."""
    gauges = [polled_gauges(log, times).columns for log in logs if len(log.steps)]
    found = {name: np.sum([one[name] for one in gauges], axis=0) for name in GAUGES}
    found["kv_usage"] = found["kv_usage"] / len(logs)
    requests = np.concatenate([log.requests for log in logs])
    begun = requests[~np.isnan(requests["first_token"])]
    begun = begun[np.argsort(begun["first_token"])]
    upto = np.searchsorted(begun["first_token"], times, side="right")
    found["queries"] = np.append(0, np.cumsum(load.prompt_tokens[begun["id"]]))[upto]
    found["hits"] = np.append(0, np.cumsum(begun["cached"]))[upto]
    steps = np.sort(np.concatenate([log.steps for log in logs]), order="end")
    over = np.searchsorted(steps["end"], times, side="right")
    found["preemptions"] = np.append(0, np.cumsum(steps["preempted"]))[over]
    return found


def judge(polls: Sequence[Poll], scenario: Scenario, window: float, tolerance: float) -> Verdict:
    """Simulate what a server has had, and compare window by window, `window` s each.

    Windows in which those are still there that were so at the first poll are left out.
    """
    load = traffic(polls, make_workload(scenario), scenario.seed)
    result = run(scenario, workload=load).whole()
    start = polls[0]
    warm = next((one.time for one in polls if one.finished >= start.seen), np.inf)
    times = np.array([one.time for one in polls]) - start.time
    ours = simulated_polls(result.logs, load, times)
    theirs: dict[str, Floats] = {
        name: np.array([one.values[name] for one in polls]) for name in ours
    }
    verdict = Verdict()
    places = (times // window).astype(int)
    for place in range(int(places[-1])):
        inside = np.flatnonzero(places == place)
        if not len(inside) or times[inside[0]] + start.time < warm:
            continue
        first, last = inside[0], min(inside[-1] + 1, len(times) - 1)
        server, simulation = (_values(each, inside, first, last) for each in (theirs, ours))
        came = polls[last].seen - polls[first].seen
        begin = start.time + place * window
        apart = _apart(server, simulation, tolerance)
        verdict.windows.append(
            Window(begin, begin + window, came, server, simulation=simulation, apart=apart)
        )
    for before, after in pairwise(verdict.windows):
        for name in ROWS:
            if before.apart.get(name, 0) * after.apart.get(name, 0) > 0:  # the same way in both
                verdict.parted.setdefault(name, before)
    return verdict


def _values(polled: Mapping[str, Floats], inside: Ints, first: int, last: int) -> dict[str, float]:
    """Return means of gauges over some polls, and what counters have counted between two."""
    found = {name: float(polled[name][inside].mean()) for name in GAUGES}
    grown = {name: float(polled[name][last] - polled[name][first]) for name in polled}
    found["hit_rate"] = 100 * grown["hits"] / grown["queries"] if grown["queries"] else nan
    return found | {"preemptions": grown["preemptions"]}


def _apart(
    server: Mapping[str, float], simulation: Mapping[str, float], tolerance: float
) -> dict[str, int]:
    """Say what differs, and who has more."""
    found = {}
    for name, least in ROWS.items():
        difference = server[name] - simulation[name]
        if abs(difference) > max(least, tolerance * max(server[name], simulation[name])):
            found[name] = 1 if difference > 0 else -1
    return found


def shadow(
    scenario: Scenario, url: str, watched: Watched, tell: Callable[[str], object]
) -> Verdict:
    """Watch a server for a while, or until Ctrl-C; `tell` a line of each window as it is compared.

    The first line is the heading, when the server has answered for the first time.

    Raises HeadwayError where the server cannot be reached, or is not vLLM's.
    """

    page = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    interval, length = watched.interval, watched.window
    polls: list[Poll] = []
    verdict = Verdict()

    async def compare() -> None:
        polls[:] = [one for one in polls if one.time >= polls[-1].time - HISTORY * length]
        try:
            found = await asyncio.to_thread(judge, [*polls], scenario, length, watched.tolerance)
        except NoTrafficError:
            return
        for window in found.windows:
            if not verdict.windows or window.start >= verdict.windows[-1].end:
                verdict.windows.append(window)
                tell(line(window))
        for name, window in found.parted.items():
            verdict.parted.setdefault(name, window)

    async def watch(session: Any) -> Verdict:
        """Poll the server, and compare after each window: in a thread, as polls go on."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        on_interrupt(stop.set)
        begin, rounds = loop.time(), 0
        judging = asyncio.create_task(asyncio.sleep(0))
        while not stop.is_set() and (now := loop.time() - begin) < watched.duration + interval:
            async with session.get(page) as response:
                if response.status != 200:
                    raise HeadwayError(f"--url: {page}: status {response.status}")
                try:
                    text = await read_text(response)
                except (ValueError, TimeoutError) as error:
                    raise HeadwayError(f"--url: {page}: {error or 'no end'}") from None
                poll = read_poll(text, now)
            if not rounds and not polls:
                tell(heading())
            if polls and poll.finished < polls[-1].finished:
                polls.clear()  # the server has begun anew
            polls.append(poll)
            if now // length > rounds and judging.done():
                rounds = int(now // length)
                judging.result()
                judging = asyncio.create_task(compare())
            wait = begin + (int(now / interval) + 1) * interval - loop.time()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(wait, 0.0))
        await judging
        await compare()
        verdict.requests = polls[-1].seen - polls[0].seen
        return verdict

    return with_session("--url", url, SILENT, watch)


def heading() -> str:
    """Return the line over those of the windows."""
    names = "".join(f"{name.replace('_', ' '):>18}" for name in ROWS)
    return f"{'s':>14}{'requests':>10}{names}\n{'':>24}" + f"{'server / sim':>18}" * len(ROWS)


def line(window: Window) -> str:
    """Tell a window in a line; a star is at what differs."""
    cells = ""
    for name in ROWS:
        pair = f"{window.server[name]:.1f} / {window.simulation[name]:.1f}".replace("nan", "-")
        cells += f"{pair + ('*' if name in window.apart else ' '):>18}"
    return f"{window.start:>6.0f} - {window.end:<5.0f}{window.requests:>10.0f}{cells}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return all windows, with null where nothing is known, and since when what has parted, s."""
    parted = {name: window.start for name, window in verdict.parted.items()}
    told = {"requests": verdict.requests, "windows": verdict.windows, "parted": parted}
    return dict(to_jsonable_python(told, inf_nan_mode="null"))


def conclusion(verdict: Verdict) -> str:
    """Say whether they have parted, and since when."""
    if not verdict.windows and not verdict.requests:
        return "nothing to compare: no request came"
    if not verdict.windows:
        return (
            "nothing to compare: no whole window after the end of the requests that were there at "
            "the start; watch longer"
        )
    if not verdict.parted:
        count, starred = len(verdict.windows), sum(bool(one.apart) for one in verdict.windows)
        more = "; no two in a row have the same star" if starred else ""
        return f"server and simulation agree in {count - starred} of {count} windows{more}"
    told = [
        f"{name.replace('_', ' ')}, from {window.start:.0f} s on "
        f"(server {window.server[name]:.1f}, simulation {window.simulation[name]:.1f})"
        for name, window in sorted(verdict.parted.items(), key=lambda item: item[1].start)
    ]
    return f"server and simulation differ: {'; '.join(told)}"
