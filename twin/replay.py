"""Send a workload to a real server, with its arrivals and lengths, and measure what comes back.

What is written is a measured run: `headway validate --measured` and `headway calibrate
--from-requests` read it as it stands.
"""

import asyncio
import json
import os
import re
import secrets
import signal
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.request import Segments
from simulator.planning.runs import encode_csv
from simulator.results.metrics import PERCENTILES, Sample, describe
from simulator.scenario.engine_spec import EngineSpec
from simulator.scenario.scenario import Scenario
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError
from simulator.util.files import write_together
from simulator.workload.describe import shared_prefix_tokens
from simulator.workload.workload import Floats, Workload

FIRST_TOKEN, LAST_TOKEN = 100, 30_000
"""Prompts are made of tokens from here to there: words, in any vocabulary of today."""
JSON = {"Content-Type": "application/json"}
READY = 0.02  # s before its time at which a request is written
LATE = 5.0  # ms, P99, beyond which a client or a simulated server measures itself, too
POLL = 0.5  # s between two looks at /metrics
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
CACHED = 4096  # segments whose tokens are kept
HITS = ("prefix_cache_hits_total", "prefix_cache_queries_total")  # tokens
UNASKED = 0.05  # share of the prompts' tokens that may hit without the workload's doing
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
    stopped: bool = False  # by Ctrl-C or SIGTERM, before all were answered

    @property
    def failed(self) -> int:
        """Requests without an answer, those apart whose client was to hang up."""
        return sum(bool(one.error) and not one.error.startswith(HUNG_UP) for one in self.requests)


def replay(
    workload: Workload,
    url: str,
    model: str | None = None,
    *,
    timeout: float = 600.0,
    prompt_seed: int | None = None,
    vocab_size: int = LAST_TOKEN,
) -> Replayed:
    """Send every request at its time to an OpenAI-compatible server; wait for all, or for Ctrl-C.

    `timeout` is the longest that a request may take, s. The same `prompt_seed` draws the same
    prompts; None: others each time, which no server has in its prefix cache. A server that wants a
    key gets that of the environment variable OPENAI_API_KEY, as from `vllm bench serve`. No token
    of a prompt is beyond `vocab_size`. Raises HeadwayError where the server cannot be reached, or
    names no model.
    """
    seed = secrets.randbelow(2**31) if prompt_seed is None else prompt_seed
    need_package("replay", "serve", "aiohttp")
    import aiohttp

    async def run() -> Replayed:
        limits = aiohttp.ClientTimeout(total=timeout)
        connector = aiohttp.TCPConnector(limit=0)
        key = os.environ.get("OPENAI_API_KEY")
        head = {"Authorization": f"Bearer {key}"} if key else None
        async with aiohttp.ClientSession(
            timeout=limits, connector=connector, headers=head
        ) as session:
            try:
                last = min(vocab_size, LAST_TOKEN)
                sender = _Replay(session, workload, url.rstrip("/"), model, seed, last_token=last)
                return await sender.run()
            except aiohttp.ClientError as error:
                raise HeadwayError(f"--url: {url}: {error}") from None

    return asyncio.run(run())


class _Replay:
    """One workload on its way."""

    def __init__(
        self,
        session: Any,
        workload: Workload,
        url: str,
        model: str | None,
        seed: int,
        *,
        last_token: int,
    ) -> None:
        self.last_token = last_token
        self.session, self.workload, self.seed = session, workload, seed
        self.root = url.removesuffix("/v1")
        self.model = model
        self.answers = [Answered() for _ in range(len(workload))]
        self.ended = [asyncio.Event() for _ in range(len(workload))]
        self.slots = asyncio.Semaphore(workload.max_concurrency or len(workload) + 1)
        self.first_hits: tuple[float, float] | None = None  # HITS, before the first request
        import aiohttp

        self.failures = aiohttp.ClientError, TimeoutError

    async def run(self) -> Replayed:
        """Ask who is there, send all, look at the gauges meanwhile."""
        model = self.model or await self._first_model()
        self.model = model
        found = Replayed(model, await self._version(), self.answers, prompt_seed=self.seed)
        self.loop = asyncio.get_running_loop()
        self.start = self.loop.time() + 0.1
        watch = asyncio.create_task(self._watch(found))
        plays = asyncio.gather(*(self._play(number) for number in range(len(self.workload))))
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
                self.loop.add_signal_handler(number, plays.cancel)
        try:
            await plays
        except asyncio.CancelledError:
            found.stopped = True
            for answer, ended in zip(self.answers, self.ended, strict=True):
                if not ended.is_set():
                    answer.error = STOPPED
        watch.cancel()
        with suppress(*self.failures):
            await self._look(found)
        return found

    async def _first_model(self) -> str:
        async with self.session.get(f"{self.root}/v1/models") as response:
            if response.status in {401, 403}:
                raise HeadwayError(
                    f"--url: {self.root}/v1/models: {response.status}: the server wants a key: "
                    "set OPENAI_API_KEY"
                )
            try:
                model: str = (await response.json(content_type=None))["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise HeadwayError(f"--url: {self.root}/v1/models: names no model") from None
            return model

    async def _version(self) -> str:
        async with self.session.get(f"{self.root}/version") as response:
            if response.status != 200:
                return ""
            try:
                found = await response.json(content_type=None)
            except ValueError:
                return ""
            return str(found.get("version", "")) if isinstance(found, dict) else ""

    async def _watch(self, found: Replayed) -> None:
        """Look at /metrics until all is over, or there is nothing to see."""
        while await self._look(found):
            await asyncio.sleep(POLL)

    async def _look(self, found: Replayed) -> bool:
        """Read gauges and counters of /metrics, summed over engines; say whether there are any."""
        async with self.session.get(f"{self.root}/metrics") as response:
            if response.status != 200:
                return False
            text = await response.text()
        now = self.loop.time() - self.start
        found.gauges.append((now, *(_sum(text, name) for name in GAUGES)))
        found.kv_capacity_tokens = found.kv_capacity_tokens or _capacity(text)
        if told := re.search(r'^headway:late_seconds\{quantile="99"\} (\S+)$', text, re.M):
            found.server_late = float(told[1])
        hits, queries = (_sum(text, name) for name in HITS)
        self.first_hits = self.first_hits or (hits, queries)
        found.hits = hits - self.first_hits[0], queries - self.first_hits[1]
        return True

    async def _play(self, number: int) -> None:
        """Send a request at its time, or after the turn before it."""
        load = self.workload
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
                async with asyncio.timeout(self._patience(number)):
                    await self._ask(body, answer)
            except TimeoutError:
                what = "no end" if self._patience(number) is None else HUNG_UP
                answer.error = f"{what} after {self.loop.time() - begin:.3f} s"
            except Exception as error:  # whatever it was: the request failed, the others go on
                answer.error = _plain(error)
        self.ended[number].set()

    def _patience(self, number: int) -> float | None:
        """Return when a request's client hangs up, s after it is sent; None: never."""
        cancels = self.workload.cancel_after
        return None if cancels is None or np.isnan(cancels[number]) else float(cancels[number])

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
                answer.error = f"{response.status}: {(await response.text())[:160]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = self.loop.time() - self.start
                chunk = json.loads(line[6:])
                if wrong := chunk.get("error"):
                    answer.error = f"the stream broke off: {json.dumps(wrong)[:160]}"
                    return
                if usage := chunk.get("usage"):
                    answer.tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    answer.cached = details.get("cached_tokens") or 0
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

    if isinstance(error, aiohttp.ClientConnectorError):
        what = "the server takes no connections"
    elif isinstance(
        error,
        aiohttp.ClientPayloadError | aiohttp.ClientOSError | aiohttp.ServerDisconnectedError,
    ):
        what = "the server broke the connection"
    else:
        what = type(error).__name__
    return f"{what}: {error}"[:200]


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
    found: list[int] = random.integers(
        min(FIRST_TOKEN, last_token // 2), last_token, count
    ).tolist()
    return found


def _sum(text: str, name: str) -> float:
    values = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in values) if values else nan


def _capacity(text: str) -> int | None:
    """Read the size of the KV cache, tokens, from vLLM's cache_config_info."""
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    if line is None:
        return None
    size, blocks = (
        re.search(rf'{name}="(\d+)"', line[1]) for name in ("block_size", "num_gpu_blocks")
    )
    return None if size is None or blocks is None else int(size[1]) * int(blocks[1])


# Files and words.


def write_measured(
    found: Replayed,
    workload: Workload,
    out: Path,
    engine: tuple[Scenario, EngineSpec] | None = None,
) -> list[Path]:
    """Write what was measured: requests.csv, summary.json, errors.csv, metrics.csv.

    With `engine`, of which the server is, runs.csv makes a measured run of it.
    """
    good = [k for k, one in enumerate(found.requests) if not one.error]
    if not good:
        first = next((one.error for one in found.requests), "the workload is empty")
        raise HeadwayError(f"--url: no request was answered, no file is written: {first}")
    start = min(found.requests[number].sent for number in good)
    rows: list[dict[str, object]] = []
    for number in good:
        one = found.requests[number]
        row: dict[str, object] = {
            "arrival_s": f"{one.sent - start:.6f}",
            "prompt_tokens": int(workload.prompt_tokens[number]),
            "output_tokens": one.tokens,
            "ttft_s": f"{one.first - one.sent:.6f}",
            "e2e_s": f"{one.end - one.sent:.6f}",
        }
        if workload.client is not None:
            row["client_id"] = workload.client[number]
        rows.append(row)
    rows.sort(key=lambda row: float(str(row["arrival_s"])))
    files = {"requests.csv": encode_csv(rows)}
    files["summary.json"] = json.dumps(summary(found, workload), indent=1).encode()
    if engine is not None:
        files["runs.csv"] = encode_csv([_run(found, workload, good, *engine)])
    if len(good) < len(found.requests):
        wrong: list[dict[str, object]] = [
            {
                "sent_s": f"{one.sent - start:.6f}" if one.sent == one.sent else "",
                "error": one.error,
            }
            for one in found.requests
            if one.error
        ]
        files["errors.csv"] = encode_csv(wrong)
    if found.gauges:
        names = ("time_s", *GAUGES)
        polls = [(f"{time - start:.6f}", *values) for time, *values in found.gauges]
        files["metrics.csv"] = encode_csv([dict(zip(names, row, strict=True)) for row in polls])
    return write_together(out, files)


def _run(
    found: Replayed, workload: Workload, good: list[int], scenario: Scenario, spec: EngineSpec
) -> dict[str, object]:
    """Return the row of runs.csv: the engine as the scenario says, or rather as the server does."""
    engine = scenario.engine
    prompts = sum(int(workload.prompt_tokens[number]) for number in good)
    hits = sum(found.requests[number].cached for number in good) / prompts
    return {
        "run_id": scenario.name or "replay",
        "gpu": spec.gpu.name,
        "tp": engine.tensor_parallel_size,
        "pp": engine.pipeline_parallel_size,
        "model": scenario.model,
        "engine_version": found.version,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": spec.max_model_len,
        "kv_capacity_tokens": found.kv_capacity_tokens or spec.num_gpu_blocks * engine.block_size,
        "prefix_caching": engine.enable_prefix_caching,
        "prefix_hit_frac": f"{hits:.6f}" if hits else "",
        "clock": "client",
        "n_requests": len(good),
        "per_request_file": "requests.csv",
    }


def summary(found: Replayed, workload: Workload) -> dict[str, Any]:
    """Tell what was measured by the keys of `vllm bench serve`'s result; times in ms."""
    done = [
        (one, int(size))
        for one, size in zip(found.requests, workload.prompt_tokens, strict=True)
        if not one.error
    ]
    good = [one for one, _ in done]
    span = max(one.end for one in good) - min(one.sent for one in good)
    asked, tokens = sum(size for _, size in done), sum(one.tokens for one in good)
    told: dict[str, Any] = {
        "backend": "openai",
        "model_id": found.model,
        "engine_version": found.version,
        "num_prompts": len(found.requests),
        "max_concurrency": workload.max_concurrency,
        "duration": span,
        "completed": len(good),
        "failed": len(found.requests) - len(good),
        "total_input_tokens": asked,
        "total_output_tokens": tokens,
        "total_cached_tokens": sum(one.cached for one in good),
        "request_throughput": len(good) / span,
        "output_throughput": tokens / span,
        "total_token_throughput": (asked + tokens) / span,
    }
    for name, values in _latencies(good).items():
        told |= describe(name, Sample(values), PERCENTILES)
    late = np.percentile([one.late for one in good], 99)
    told["p99_sent_late_ms"] = float(late) * 1e3
    if found.server_late == found.server_late:
        told["p99_server_late_ms"] = found.server_late * 1e3
    told["prompt_seed"] = found.prompt_seed
    hits, queries = found.hits
    if queries > 0:
        told["prefix_hit_share"] = hits / queries
        told["implied_hit_share"] = (shared_prefix_tokens(workload) or 0) / workload.total_input
    return told


def lateness_notes(summary: Mapping[str, Any]) -> list[str]:
    """Say by how much a measurement is off by itself, where that is more than a little."""
    notes = []
    for key, words in (
        ("p99_sent_late_ms", "the client sent requests {:.1f} ms after their time (P99)"),
        ("p99_server_late_ms", "the simulated server answered {:.1f} ms late (P99)"),
    ):
        late = summary.get(key)
        if isinstance(late, int | float) and late > LATE:
            notes.append(f"{words.format(late)}: latencies may be off by as much")
    hits, implied = (summary.get(f"{name}_hit_share") for name in ("prefix", "implied"))
    if isinstance(hits, float) and isinstance(implied, float) and hits > implied + UNASKED:
        notes.append(
            f"{hits:.0%} of the prompts' tokens hit the server's prefix cache, {implied:.0%} at "
            "most by what the workload shares: it has seen these prompts before (another "
            "--prompt-seed draws others), or others use it"
        )
    return notes


def _latencies(good: list[Answered]) -> dict[str, Floats]:
    """Return latencies, s; those that no request has are left out."""
    several = [one for one in good if one.tokens > 1]
    columns = {
        "ttft": np.array([one.first - one.sent for one in good]),
        "tpot": np.array([(one.end - one.first) / (one.tokens - 1) for one in several]),
        "itl": np.concatenate([np.asarray(one.gaps) for one in good]),
        "e2el": np.array([one.end - one.sent for one in good]),
    }
    return {name: values for name, values in columns.items() if len(values)}


def table(found: Replayed, workload: Workload) -> str:
    """Tell what was measured, in the words of `vllm bench serve`."""
    told = summary(found, workload)
    lines = [
        f"{found.model}{f', vLLM {found.version}' if found.version else ''}: "
        f"{told['completed']:,} of {told['num_prompts']:,} requests answered in "
        f"{told['duration']:.1f} s, {told['request_throughput']:.2f} requests/s, "
        f"{told['output_throughput']:,.0f} output tokens/s",
        f"{'ms':>8}{'mean':>11}{'median':>11}{'P99':>11}",
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        keys = [f"{word}_{name}_ms" for word in ("mean", "median", "p99")]
        if keys[0] in told:
            lines.append(f"{name.upper():>8}" + "".join(f"{told[key]:>11,.2f}" for key in keys))
    lines.append(
        f"sent {told['p99_sent_late_ms']:.1f} ms after their time (P99); prompts drawn with "
        f"--prompt-seed {told['prompt_seed']}"
    )
    lines += [f"warning: {note}" for note in lateness_notes(told)]
    if causes := [one.error for one in found.requests if one.error]:
        lines.append(
            f"{len(causes):,} requests failed, and are not in these figures; the first: {causes[0]}"
        )
    return "\n".join(lines)
