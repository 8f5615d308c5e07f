"""Send a workload to a real server, with its arrivals and lengths, and measure what comes back."""

import asyncio
import json
import secrets
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import isnan, nan
from typing import Any

import numpy as np

from headway.common.http_server import on_interrupt
from headway.twin.remote import MOST_BYTES, Scrape, read_text, with_session
from simulator.core.request import Segments
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload

FIRST_TOKEN, LAST_TOKEN = 100, 30_000
"""Prompts are made of tokens from here to there: words, in any vocabulary of today."""
JSON = {"Content-Type": "application/json"}
READY = 0.02  # s before its time at which a request is written
POLL = 0.5  # s between two looks at /metrics
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
CACHED = 4096  # segments whose tokens are kept
HITS = ("prefix_cache_hits_total", "prefix_cache_queries_total")  # tokens
STOPPED = "not answered when the replay was stopped"
HUNG_UP = "the client hung up"


@dataclass(slots=True)
class Answered:
    """What came of one request; times in s from the first one sent. NaN: there is none."""

    sent: float = nan
    late: float = nan  # s, after its time
    first: float = nan
    end: float = nan
    tokens: int = 0
    cached: int = 0
    gaps: "array[float]" = field(default_factory=lambda: array("d"))  # s, between its chunks
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether there is no answer, for another reason than that its client was to hang up."""
        return bool(self.error) and not self.error.startswith(HUNG_UP)


@dataclass(slots=True)
class Replayed:
    """What came of a workload."""

    model: str
    version: str
    requests: list[Answered]
    gauges: list[tuple[float, ...]] = field(default_factory=list)  # time, s, and GAUGES
    kv_capacity_tokens: int | None = None
    server_late: float = nan  # s, P99: what a server of `headway serve` says of itself
    prompt_seed: int = 0
    hits: tuple[float, float] = (nan, nan)  # HITS, from the first look at /metrics to the last
    unseen: str = ""  # why /metrics told nothing, when last asked
    stopped: bool = False  # by Ctrl-C or SIGTERM, before all were answered

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(one.failed for one in self.requests)


def replay(
    workload: Workload,
    url: str,
    model: str | None = None,
    *,
    timeout: float = 600.0,
    prompt_seed: int | None = None,
    vocab_size: int = LAST_TOKEN,
    ended: Callable[[int, Answered], None] | None = None,
) -> Replayed:
    """Send every request at its time to an OpenAI-compatible server; wait for all, or for Ctrl-C.

    `timeout` is the longest that a request may take, s. The same `prompt_seed` draws the same
    prompts; None: others each time, which no server has in its prefix cache. A server that wants a
    key gets that of the environment variable OPENAI_API_KEY, as from `vllm bench serve`. No token
    of a prompt is beyond `vocab_size`. `ended` is called with a request's row of the workload and
    its answer, as the answer ends or fails. Raises HeadwayError where the server cannot be reached,
    or names no model.
    """
    sender = _Replay(workload, url.rstrip("/").removesuffix("/v1"), model)
    sender.seed = secrets.randbelow(2**31) if prompt_seed is None else prompt_seed
    sender.last_token, sender.on_end = min(vocab_size, LAST_TOKEN), ended
    return with_session("--url", url, timeout, sender.run)


class _Replay:
    """One workload on its way."""

    session: Any
    seed: int
    last_token: int
    on_end: Callable[[int, Answered], None] | None

    def __init__(self, workload: Workload, root: str, model: str | None) -> None:
        self.workload, self.root, self.model = workload, root, model
        self.answers = [Answered() for _ in range(len(workload))]
        self.ended = [asyncio.Event() for _ in range(len(workload))]
        self.slots = asyncio.Semaphore(workload.max_concurrency or len(workload) + 1)
        self.first_hits: tuple[float, float] | None = None  # HITS, before the first request

    async def run(self, session: Any) -> Replayed:
        """Ask who is there, send all, look at the gauges meanwhile."""
        import aiohttp

        self.failures = aiohttp.ClientError, TimeoutError
        self.session = session
        self.model = model = self.model or await self._first_model()
        found = Replayed(model, await self._version(), self.answers, prompt_seed=self.seed)
        self.loop = asyncio.get_running_loop()
        self.start = self.loop.time() + 0.1
        watch = asyncio.create_task(self._watch(found))
        plays = asyncio.gather(*(self._play(number) for number in range(len(self.workload))))
        on_interrupt(plays.cancel)
        try:
            await plays
        except asyncio.CancelledError:
            found.stopped = True
            for answer, ended in zip(self.answers, self.ended, strict=True):
                if not ended.is_set():
                    answer.error, answer.end = STOPPED, self.loop.time() - self.start
        watch.cancel()
        try:
            await self._look(found)
        except (*self.failures, ValueError) as error:
            found.unseen = _plain(error)
        return found

    async def _first_model(self) -> str:
        status, found = await self._told("/v1/models")
        where = f"--url: {self.root}/v1/models"
        if status in {401, 403}:
            raise HeadwayError(f"{where}: {status}: the server wants a key: set OPENAI_API_KEY")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            raise HeadwayError(f"{where}: names no model") from None

    async def _version(self) -> str:
        status, found = await self._told("/version")
        return str(found.get("version", "")) if status == 200 and isinstance(found, dict) else ""

    async def _told(self, path: str) -> tuple[int, Any]:
        """Return the status at an address, and the JSON; None: it is none."""
        async with self.session.get(self.root + path) as response:
            try:
                return response.status, json.loads(await read_text(response))
            except (ValueError, RecursionError):
                return response.status, None

    async def _watch(self, found: Replayed) -> None:
        """Look at /metrics until all is over, or there is nothing to see.

        Whatever comes back costs no answer.
        """
        with suppress(*self.failures, ValueError):
            while await self._look(found):
                await asyncio.sleep(POLL)

    async def _look(self, found: Replayed) -> bool:
        """Read gauges and counters of /metrics, summed over engines; say whether there are any."""
        async with self.session.get(f"{self.root}/metrics") as response:
            found.unseen = "" if response.status == 200 else f"HTTP {response.status}"
            if found.unseen:
                return False
            scrape = Scrape(await read_text(response))
        if isnan(scrape.total(GAUGES[0])):
            found.unseen = f"no {GAUGES[0]} in it"
            return False
        now = self.loop.time() - self.start
        found.gauges.append((now, *map(scrape.total, GAUGES)))
        for labels, _ in scrape.values["vllm:cache_config_info"]:
            with suppress(KeyError, ValueError):
                size = int(labels["block_size"]) * int(labels["num_gpu_blocks"])
                found.kv_capacity_tokens = found.kv_capacity_tokens or size
        for labels, seconds in scrape.values["headway:late_seconds"]:
            found.server_late = seconds if labels["quantile"] == "99" else found.server_late
        hits, queries = map(scrape.total, HITS)
        self.first_hits = self.first_hits or (hits, queries)
        found.hits = hits - self.first_hits[0], queries - self.first_hits[1]
        return True

    async def _play(self, number: int) -> None:
        """Send a request at its time, or after the turn before it."""
        load = self.workload
        patience = None  # s after it is sent, when its client hangs up; None: never
        if load.cancel_after is not None and not isnan(load.cancel_after[number]):
            patience = float(load.cancel_after[number])
        if load.after is not None and (before := int(load.after[number])) >= 0:
            await self.ended[before].wait()
            due = self.loop.time() + (0.0 if load.delay is None else float(load.delay[number]))
        else:
            due = self.start + float(load.arrival[number])
        await asyncio.sleep(max(due - self.loop.time() - READY, 0.0))
        body = self._body(number)
        await asyncio.sleep(max(due - self.loop.time(), 0.0))
        async with self.slots:
            answer = self.answers[number]
            begin = self.loop.time()
            answer.sent, answer.late = begin - self.start, begin - due
            try:
                async with asyncio.timeout(patience):
                    await self._ask(body, answer)
            except TimeoutError:
                what = "no end" if patience is None else HUNG_UP
                answer.error = f"{what} after {self.loop.time() - begin:.3f} s"
            except Exception as error:  # whatever it was: the request failed, the others go on
                answer.error = _plain(error)
            if answer.error:
                answer.end = self.loop.time() - self.start
        self.ended[number].set()
        if self.on_end is not None:
            self.on_end(number, answer)

    def _body(self, number: int) -> bytes:
        """Write what asks for a request."""
        load = self.workload
        length = int(load.output_tokens[number])
        if load.max_tokens is not None and load.max_tokens[number]:
            length = min(length, int(load.max_tokens[number]))
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt_of(load, number, self.seed, self.last_token),
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.client is not None:
            body["user"] = load.client[number]
        if load.priority is not None:
            body["priority"] = int(load.priority[number])
        return json.dumps(body).encode()

    async def _ask(self, body: bytes, answer: Answered) -> None:
        """Send a request, and note when its tokens come."""
        url = f"{self.root}/v1/completions"
        async with self.session.post(url, data=body, headers=JSON) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await read_text(response))[:160]}"
                return
            size = 0
            async for line in response.content:
                if (size := size + len(line)) > MOST_BYTES:
                    raise ValueError(f"the answer has more than {MOST_BYTES:,} bytes")
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = self.loop.time() - self.start
                chunk = json.loads(line[6:])
                if wrong := chunk.get("error"):
                    answer.error = f"the stream broke off: {json.dumps(wrong)[:160]}"
                    return
                if usage := chunk.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    answer.tokens = int(usage["completion_tokens"])
                    answer.cached = int(details.get("cached_tokens") or 0)
                if any(choice.get("text") for choice in chunk.get("choices", ())):
                    if answer.first != answer.first:
                        answer.first = now
                    else:
                        answer.gaps.append(now - answer.end)
                    answer.end = now
        if answer.first != answer.first:
            answer.error = "the stream had no token"


def _plain(error: Exception) -> str:
    """Say what became of a connection."""
    import aiohttp

    what = type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        what = "the server takes no connections"
    elif isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError):
        what = "the server broke the connection"
    return f"{what}: {getattr(error, 'strerror', None) or error}"[:200]


def prompt_of(
    workload: Workload, number: int, seed: int = 0, last_token: int = LAST_TOKEN
) -> list[int]:
    """Return a prompt's tokens: equal where the workload says that they are, else drawn."""
    size = int(workload.prompt_tokens[number])
    segments: Segments | None = None if workload.segments is None else workload.segments[number]
    tokens: list[int] = []
    for name, count in segments or ((("in", number), size),):
        tokens += _tokens(repr(name), count, seed, last_token)
    return tokens


@lru_cache(CACHED)
def _tokens(name: str, count: int, seed: int, last_token: int) -> list[int]:
    """Draw a segment's tokens; the first of a longer one are those of a shorter one."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    first = min(FIRST_TOKEN, last_token // 2)
    found: list[int] = random.integers(first, last_token, count).tolist()
    return found
