"""The addresses of a vLLM server, answered by a simulation.

It is long since each address is a method; what they answer is made in other files.
"""

import asyncio
import gc
import io
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES, EADDRINUSE
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.twin.admin import admin_routes
from headway.twin.bodies import BadRequestError, parse_json
from headway.twin.chat_template import own_template, read_template
from headway.twin.fault_injection import FailureRates
from headway.twin.kv_events import KvEvents, KvEventsConfig
from headway.twin.live_engine import LOST, LiveEngine, Stream
from headway.twin.live_metrics import LiveMetrics
from headway.twin.openai import MOST_TOKENS, Answer, Wanted, client_name, name_blocks, read_body
from headway.twin.responses import error_response, refusals_in_json, refuse, web
from headway.twin.tokenizers import BpeTokens, SplitAtSpaces, TokenCounter
from simulator.core.request import Request
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.util.errors import HeadwayError
from simulator.util.files import Writer
from simulator.util.http_log import LOOPBACK, is_foreign, leave_out_bad_requests
from simulator.util.yaml_lines import dump_yaml
from simulator.workload.traces.write import write_timed_trace

VERSION = "0.33.0"  # of vLLM, whose rules are the newest that are simulated
MOST_BYTES = 16 * 2**20  # of a body
MOST_UNSENT = 2**20  # bytes that a client may leave unread: then it is taken for gone
LOOK = 16  # tokens from one look at what a client has left unread to the next
MOST_REQUESTS = 10_000  # at once
MOST_CONNECTIONS = 12_000  # idle ones and those of slow clients included
READ_SECONDS = 60.0  # that a body may take
ANSWERED = ("stop", "length")
UNAVAILABLE = "ServiceUnavailableError"
REFUSED = "The request does not fit into the engine's KV cache, or was refused by the cluster."
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
PERMISSION = {
    "id": "modelperm-headway",
    "object": "model_permission",
    "created": 0,
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""What vLLM's list of models says of each."""
LATE = 0.005  # s, P99 of the delays, beyond which clients' figures are off


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a scenario is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    speed: float = 1.0
    model: str = ""  # name that clients use; "": the scenario's
    admin: bool = False  # whether /admin is there
    startup_delay: float = 0.0  # simulated s until replicas are up
    kv_events: KvEventsConfig | None = None  # where to tell what the prefix cache holds
    first_core: int = 0  # number of the first engine core among all that are served


class Server:
    """A live engine behind HTTP."""

    def __init__(self, scenario: Scenario, options: ServeOptions, counter: TokenCounter) -> None:
        self.scenario, self.options, self.counter = scenario, options, counter
        self.engine = LiveEngine(
            scenario, options.speed, faults=options.admin, startup_delay=options.startup_delay
        )
        self.failures = FailureRates(scenario.seed)
        self.model = options.model or str(scenario.model)
        self.version = scenario.engine.version or VERSION
        self.fingerprint = f"vllm-{self.version}-headway"
        self.metrics = LiveMetrics(self.engine, self.model)
        self._said: dict[int, tuple[Sequence[int], int]] = {}  # by id: prompt, first word
        if options.kv_events is not None:
            told = options.kv_events, self.engine.cores, self._tokens, options.first_core
            self.engine.kv_events = KvEvents(*told)
            self._words = [counter.encode(word)[0] for word in counter.words]
        self._lengths = scenario.make_workload().output_tokens
        self._random = np.random.default_rng(scenario.seed)
        self._serial = 0
        self._open = 0  # requests that are being answered
        self._frontend = scenario.frontend()
        self._free = 0.0  # simulated s, when the frontend has passed on all requests so far

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.engine.spec.max_model_len

    def application(self) -> web.Application:
        """Return the addresses."""
        middlewares = [refusals_in_json, self._guard]
        app = web.Application(client_max_size=MOST_BYTES, middlewares=middlewares)
        if self.options.admin:
            app.add_routes(admin_routes(self.engine, self.failures))
        app.add_routes(
            [
                web.post("/v1/completions", partial(self._answer, chat=False)),
                web.post("/v1/chat/completions", partial(self._answer, chat=True)),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.post("/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/report", self._report),
                web.get("/report/requests", self._requests),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse pages of other sites, which a browser lets talk to this machine, too."""
        if is_foreign(request, LOOPBACK if self.options.host in LOOPBACK else None):
            return error_response("pages of other sites are refused", "Forbidden", 403)
        return await handler(request)

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set; raise HeadwayError where the port is not to be had."""
        leave_out_bad_requests()
        runner = web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await runner.setup()
        clock = asyncio.create_task(self.engine.clock.run())
        stopped = asyncio.create_task(stop.wait())
        socket: asyncio.Server | None = None
        events = self.engine.kv_events
        try:
            if events is not None:
                events.open()
            try:
                socket = await _listen(runner, self.options.host, self.options.port)
            except OSError as error:
                where = f"{self.options.host}:{self.options.port}"
                option = "--port" if error.errno in {EADDRINUSE, EACCES} else "--host"
                raise HeadwayError(f"{option}: {where}: {error.strerror or error}") from None
            gc.collect()
            gc.freeze()  # what is here stays: the collector need not look at it again
            host, port = socket.sockets[0].getsockname()[:2]
            ready(f"http://{host}:{port}")
            await asyncio.wait({clock, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if clock.done():
                clock.result()  # the engine is broken: so is the server
        finally:
            self.engine.clock.stop()
            clock.cancel()
            stopped.cancel()
            if socket is not None:
                socket.close()
            if events is not None:
                events.close()
            await runner.cleanup()

    def result(self) -> Result:
        """Return the run so far."""
        return self.engine.result()

    # Requests.

    def _turned_away(self) -> web.Response | None:
        """Refuse a request whatever it asks for; None: there is no reason to."""
        if self._open >= MOST_REQUESTS:
            return error_response(f"more than {MOST_REQUESTS:,} requests at once", UNAVAILABLE, 503)
        self.engine.clock.advance()
        if not self.engine.is_open():
            return error_response("no replica is up", UNAVAILABLE, 503)
        if (full := self._kept_out()) is not None:
            return full
        failure = self.failures.draw()
        return None if failure is None else error_response(*failure)

    def _kept_out(self) -> web.Response | None:
        """Refuse a request beyond the limits of the queue, as `AsyncLLM.check_admission`."""
        door = self.engine.cores[0].door
        why = "" if door is None else door.refuses(self.engine.clock.now)
        return error_response(f"{why} is reached", UNAVAILABLE, 503) if why else None

    async def _read(self, request: web.Request, *, chat: bool) -> Wanted:
        """Understand a request; raise BadRequestError where it cannot be."""
        _check_type(request)
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = parse_json(await request.read())
        except TimeoutError:
            raise BadRequestError("the body did not come in time", 408) from None
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {MOST_BYTES:,} bytes"
            raise BadRequestError(text, 413) from None
        vocab_size = self.engine.spec.model.vocab_size
        images = self.scenario.engine.multimodal_config
        wanted = read_body(
            *(body, chat, self.model, self.counter, self.max_model_len),
            vocab_size=vocab_size,
            limits={} if images is None else images.limit_mm_per_prompt,
        )
        wanted.request_id = request.headers.get("X-Request-Id", wanted.request_id)
        if "X-Client" in request.headers:
            wanted.client = client_name(request.headers["X-Client"], "X-Client")
        return wanted

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        if (refusal := self._turned_away()) is not None:
            return refusal
        came = self.engine.clock.now
        try:
            wanted = await self._read(request, chat=chat)
        except BadRequestError as error:
            return refuse(error)
        wanted.length = self._length(wanted)
        words = self.counter.words
        caches = self.scenario.engine.enable_prefix_caching
        answer = Answer(
            wanted,
            chat,
            self.model,
            self._serial,
            words,
            fingerprint=self.fingerprint,
            cached_block=self.engine.block_size if caches else MOST_TOKENS,
        )
        self._serial += 1
        self._open += 1
        number = -1
        try:
            await self._pass_frontend(came, len(wanted.tokens))
            if self._frontend is not None and (full := self._kept_out()) is not None:
                return full
            number = self.engine.next_id
            if self.engine.kv_events is not None:
                self._said[number] = wanted.tokens, answer.offset
            if wanted.stream:
                return await self._stream(request, wanted, answer)
            return await self._whole(request, wanted, answer)
        finally:
            self._open -= 1
            self._said.pop(number, None)

    async def _pass_frontend(self, came: float, prompt_tokens: int) -> None:
        """Wait as long as the scenario's frontend takes, less what reading the request took."""
        if self._frontend is None:
            return
        delay, self._free = self._frontend.delay(came, self._free, prompt_tokens)
        clock = self.engine.clock
        await asyncio.sleep(max(came + delay - clock.now, 0.0) / clock.speed)

    def _tokens(self, request: Request, first: int, last: int) -> list[int] | None:
        """Return tokens of a request, prompt and answer; None: its client has gone."""
        if (said := self._said.get(request.id)) is None:
            return None
        prompt, offset = said
        size, words = len(prompt), self._words
        answer = range(offset + max(first - size, 0), offset + max(last - size, 0))
        return [*prompt[first:last], *(words[number % len(words)] for number in answer)]

    def _length(self, wanted: Wanted) -> int:
        """Say after how many tokens an answer ends by itself: the client's, or drawn."""
        if wanted.ignore_eos:
            return wanted.max_tokens + 1
        return max(int(self._random.choice(self._lengths)), wanted.min_tokens, 1)

    def _submit(
        self, wanted: Wanted, on_tokens: Callable[[int, int], None]
    ) -> tuple[Stream, asyncio.Future[tuple[Request, str]]]:
        """Hand a request to the engine, with the length that `_length` has found.

        The future becomes the request and why it has ended.
        """
        over: asyncio.Future[tuple[Request, str]] = asyncio.get_running_loop().create_future()

        def end(ended: Request, reason: str) -> None:
            if not over.done():
                over.set_result((ended, reason))

        stream = self.engine.submit(
            len(wanted.tokens),
            wanted.length,
            on_tokens,
            end,
            max_tokens=wanted.max_tokens,
            segments=name_blocks(wanted.tokens, self.engine.block_size, wanted.salt),
            client=wanted.client,
            priority=wanted.priority,
            hint=wanted.hint,
        )
        return stream, over

    async def _whole(
        self, request: web.Request, wanted: Wanted, answer: Answer
    ) -> web.StreamResponse:
        stream, over = self._submit(wanted, lambda *_: None)  # the client waits for the whole
        try:
            ended, reason = await over
        except asyncio.CancelledError:  # the client has hung up
            self.engine.cancel(stream)
            raise
        if reason not in ANSWERED:
            return self._refused(request, reason)
        return web.Response(
            body=answer.whole(ended, reason),
            content_type="application/json",
            headers=_notes(wanted),
        )

    async def _stream(
        self, request: web.Request, wanted: Wanted, answer: Answer
    ) -> web.StreamResponse:
        early: list[bytes] = []  # what came before the head of the answer was out
        transport: asyncio.Transport | None = None  # where the rest goes

        def tokens(new: int, count: int) -> None:
            """Write to the socket: a task that wakes up per token costs half as much again."""
            if transport is None:
                early.append(answer.chunk(new, count))
            elif not transport.is_closing():
                transport.write(answer.framed(new, count))
                if not count % LOOK and transport.get_write_buffer_size() > MOST_UNSENT:
                    transport.abort()

        stream, over = self._submit(wanted, tokens)
        chunked = request.version >= (1, 1)
        try:
            if not chunked:
                await over
            if over.done() and over.result()[1] not in ANSWERED:
                return self._refused(request, over.result()[1])
            response = web.StreamResponse(headers=STREAM_HEADERS | _notes(wanted))
            if chunked:
                response.enable_chunked_encoding()
            await response.prepare(request)  # at once, as vLLM: tokens may take their time
            while early:
                data = b"".join(early)
                early.clear()
                await response.write(data)
            if chunked:
                transport = request.transport
            ended, reason = await over
            if reason == LOST:
                return self._refused(request, reason)
            if reason in ANSWERED:
                await response.write(answer.end(ended))
            else:
                await response.write(answer.error_chunk(REFUSED))
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):  # the client has hung up
            self.engine.cancel(stream)
            raise
        return response

    def _refused(self, request: web.Request, reason: str) -> web.Response:
        if reason == LOST and request.transport is not None:
            request.transport.abort()  # as the connections of a server that is killed
        return error_response(REFUSED, "BadRequestError", 400)

    # The rest.

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            _check_type(request)
            body = parse_json(await request.read())
            chat = isinstance(body, dict) and "messages" in body
            body = {**body, "max_tokens": None} if isinstance(body, dict) else body
            wanted = read_body(body, chat, self.model, self.counter, 2**31 - 1)
        except BadRequestError as error:
            return refuse(error)
        found = {
            "count": len(wanted.tokens),
            "max_model_len": self.max_model_len,
            "tokens": list(wanted.tokens),
            "token_strs": None,
        }
        return web.json_response(found, headers=_notes(wanted))

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "headway",
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [PERMISSION | {"created": int(time.time())}],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        """Say 503 as long as no replica has started, or none is left."""
        self.engine.clock.advance()
        return web.Response(status=200 if self.engine.is_open() else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.engine.clock.advance()
        return web.Response(text=self.metrics.text(), content_type="text/plain")

    async def _report(self, request: web.Request) -> web.Response:
        """Return the run so far: JSON, or the HTML report to a browser."""
        result = self.result()
        if not len(result.workload):
            return error_response("no request has come yet", "NotFoundError", 404)
        if "text/html" in request.headers.get("Accept", ""):
            from headway.figures.data import Run
            from headway.report.html.page import page

            run = Run.of(self.scenario.name or "served", result)
            return web.Response(text=page([run]), content_type="text/html")
        return web.json_response(result.summary() | {"served": self.served()})

    async def _requests(self, request: web.Request) -> web.Response:
        """Return the requests of the report as a trace that plays them again."""
        text = io.BytesIO()
        write_timed_trace(self.result().workload, self.engine.block_size, text)
        return web.Response(body=text.getvalue(), content_type="application/jsonl")

    def write(self, out: Path) -> list[Path]:
        """Write the files of the run, and what plays it again: replay.yaml and its trace."""

        from simulator.simulation.write import write_run

        result = self.result()
        load = {"trace": {"path": "served.jsonl", "format": "timed_trace"}}
        again = result.scenario.resolved() | {"workload": load}
        text = dump_yaml(again).encode()
        more: dict[str, Writer] = {
            "served.jsonl": partial(write_timed_trace, result.workload, self.engine.block_size),
            "replay.yaml": lambda file: file.write(text),
        }
        return write_run(result, out, more=more)

    def served(self) -> dict[str, Any]:
        """Say how far what clients measure may be trusted."""
        late = self.engine.clock.lateness()
        return {
            "speed": self.options.speed,
            "late_ms": late,
            "on_time": late["p99"] <= LATE * 1e3,
        }


def token_counter(folder: Path | None, template: Path | None = None) -> TokenCounter:
    """Return the tokenizer of a folder, or words between spaces.

    Chats become prompts by the `template`, else by the folder's own.
    """
    counter: TokenCounter = SplitAtSpaces() if folder is None else BpeTokens(folder)
    if template is not None:
        counter.template = read_template(template)
    elif folder is not None and folder.is_dir():
        counter.template = own_template(folder)
    return counter


def serve(servers: Sequence[Server], ready: Callable[[Server, str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `ready` is told each server's address."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):  # Windows: Ctrl-C ends the loop
                loop.add_signal_handler(number, stop.set)
        tasks = [asyncio.create_task(one.run(stop, partial(ready, one))) for one in servers]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # one that is broken ends all
        await asyncio.gather(*tasks)

    _allow_open_files()
    asyncio.run(run())


async def _listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Take connections, so many at once; others are closed as they come."""

    def accept() -> asyncio.Protocol:
        assert runner.server is not None
        full = len(runner.server.connections) >= MOST_CONNECTIONS
        return _Closed() if full else runner.server()

    return await asyncio.get_running_loop().create_server(accept, host, port, backlog=1024)


class _Closed(asyncio.Protocol):
    """A connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _allow_open_files() -> None:
    """Raise the limit of open files, one of which each connection takes, to the highest allowed."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_type(request: web.Request) -> None:
    """Refuse a body that does not say that it is JSON, as vLLM does."""
    if request.content_type != "application/json":
        why = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise BadRequestError(why, kind="Bad Request")


def _notes(wanted: Wanted) -> dict[str, str]:
    """Return headers that tell what of a request is not simulated, and what is estimated."""
    found = {"X-Headway-Ignored": ", ".join(wanted.notes)} if wanted.notes else {}
    return found | ({"X-Headway-Estimated": "prompt_tokens"} if wanted.estimated else {})
