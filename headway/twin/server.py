"""The addresses of a vLLM server, answered by a simulation.

It is long since each address is a method; what they answer is made in other files.
"""

import asyncio
import gc
import io
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from errno import EACCES, EADDRINUSE
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

from headway.common.http_server import LOOPBACK, is_foreign, on_interrupt, running
from headway.planning.runs import encode_csv
from headway.twin.admin import Admin
from headway.twin.api.answers import SHAPES
from headway.twin.api.bodies import DetokenizeBody, TokenizeBody, refuse
from headway.twin.api.chat_template import own_template, read_template
from headway.twin.api.generate import ANSWERS, MOST_BYTES, ApiServer
from headway.twin.api.messages import CountTokensBody
from headway.twin.api.openai import Reader
from headway.twin.api.prompts import MediaLaws
from headway.twin.api.refusals import Route, allow, openapi, preflight, refusals_in_json, web
from headway.twin.api.tokenizers import BpeTokens, TokenCounter
from headway.twin.kv_events import publishers, read_config
from headway.twin.live_engine import LiveEngine
from headway.twin.live_metrics import LiveMetrics
from headway.twin.options import ServeOptions
from simulator.core.request import Request
from simulator.features.images.images import Images
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError
from simulator.util.files import Writer
from simulator.util.yaml_lines import dump_yaml
from simulator.workload.traces.write import write_timed_trace
from simulator.workload.unused import has_media

VERSION = "0.33.0"  # of vLLM, whose rules are the newest that are simulated
MOST_CONNECTIONS = 12_000  # idle ones and those of slow clients included
LATE = 0.005  # s, P99 of the delays, beyond which clients' figures are off


class Server:
    """A live engine behind HTTP."""

    def __init__(
        self, scenario: Scenario, options: ServeOptions, counter: TokenCounter, first_core: int = 0
    ) -> None:
        """Begin; `first_core` is the number of its first engine core among all that are served."""
        self.scenario, self.options, self.counter = scenario, options, counter
        self.engine = LiveEngine(scenario, options.speed, startup_delay=options.startup_delay)
        self.names = options.served_model_name or [str(scenario.model)]
        key = os.environ.get("VLLM_API_KEY")
        self.keys = options.api_key or ([key] if key else [])
        self.origins = frozenset(options.allowed_origins or ())
        self.version = scenario.engine.version or VERSION
        self.metrics = LiveMetrics(self.engine, self.names[0])
        spec, media = self.engine.spec, scenario.engine.multimodal_config
        features = self.engine.cores[0].scheduler.features
        largest = min((one.size for one in features if isinstance(one, Images)), default=0)
        drawn = scenario.workload.generator.multimodal or {}
        laws = None if media is None else MediaLaws(drawn, media.limit_mm_per_prompt, largest)
        counter.vocab_size = min(counter.vocab_size, spec.model.vocab_size)
        tools = options.parses_tools or spec.model.family == "gpt_oss"
        limits = spec.max_model_len, spec.model.vocab_size
        reader = Reader(self.names, counter, *limits, laws, parses_tools=tools)
        self.api = ApiServer(scenario, self.engine, reader, f"vllm-{self.version}-headway")
        self.admin = Admin(self.engine, self.api.failures) if options.admin else None
        if options.kv_events_config is not None:
            config = read_config(options.kv_events_config)
            if config.enable_kv_cache_events:
                cores = self.engine.cores
                self.engine.kv_events = publishers(config, cores, self._tokens, first_core)
            self._words = [counter.encode(word)[0] for word in counter.words]

    def routes(self) -> list[Route]:
        """Return the addresses: the body of each, and what answers it."""
        api = self.api
        return [
            *(self.admin.routes() if self.admin is not None else ()),
            *(
                Route("POST", path, partial(api.generate, *kinds), kinds[0])
                for path, kinds in ANSWERS.items()
            ),
            Route("GET", "/v1/responses/{id}", api.response),
            Route("POST", "/v1/responses/{id}/cancel", api.cancel_response),
            Route("POST", "/v1/messages/count_tokens", api.count_tokens, CountTokensBody),
            Route("POST", "/tokenize", api.tokenize, TokenizeBody),
            Route("POST", "/detokenize", api.detokenize, DetokenizeBody),
            _tells(
                "/v1/models", lambda: {"object": "list", "data": [*map(self._card, self.names)]}
            ),
            Route("GET", "/v1/models/{model}", self._model),
            Route("GET", "/health", self._health),
            Route("GET", "/ping", self._health),
            Route("POST", "/ping", self._health),
            _tells("/version", lambda: {"version": self.version}),
            _tells("/load", lambda: {"server_load": api.open}),
            Route("GET", "/server_info", self._server_info),
            _tells("/openapi.json", lambda: openapi(self.routes(), self.version)),
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/report", self._report),
            Route("GET", "/report/requests", self._requests),
        ]

    def application(self) -> web.Application:
        """Return what answers at the addresses."""
        middlewares = [refusals_in_json, self._guard]
        app = web.Application(client_max_size=MOST_BYTES, middlewares=middlewares)
        app.on_response_prepare.append(partial(allow, self.origins))
        app.add_routes([web.route(one.method, one.path, one.handler) for one in self.routes()])
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse pages of other sites, which a browser lets talk to this machine, too."""
        if (answer := preflight(self.origins, request)) is not None:
            return answer
        hosts = LOOPBACK if self.options.host in LOOPBACK else None
        foreign, origin = is_foreign(request, hosts, self.origins), request.headers.get("Origin")
        refuse({"foreign": foreign}, host=request.host, origin=origin)
        if request.path.startswith("/v1") and not self._has_key(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    def _has_key(self, request: web.Request) -> bool:
        """Say whether a request has one of the keys, if there are any, as vLLM."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        key = given.encode(errors="surrogateescape")
        fits = [compare_digest(key, one.encode()) for one in self.keys]
        return not fits or (scheme.lower() == "bearer" and any(fits))

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until `stop` is set; raise HeadwayError where the port is not to be had."""
        clock = asyncio.create_task(self.engine.clock.run())
        stopped = asyncio.create_task(stop.wait())
        async with AsyncExitStack() as stack:
            server = (await stack.enter_async_context(running(self.application()))).server
            assert server is not None
            server.request_factory = partial(self._came, server.request_factory)
            for last in (stopped.cancel, clock.cancel, self.engine.clock.stop):
                stack.callback(last)
            for publisher in self.engine.kv_events.values():
                stack.callback(publisher.close)
                publisher.open()
            try:
                socket = await _listen(server, self.options.host, self.options.port)
            except OSError as error:
                where = f"{self.options.host}:{self.options.port}"
                option = "--port" if error.errno in {EADDRINUSE, EACCES} else "--host"
                raise HeadwayError(f"{option}: {where}: {error.strerror or error}") from None
            stack.callback(socket.close)
            gc.collect()
            gc.freeze()  # what is here stays: the collector need not look at it again
            host, port = socket.sockets[0].getsockname()[:2]
            ready(f"http://{host}:{port}")
            await asyncio.wait({clock, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if clock.done():
                clock.result()  # the engine is broken: so is the server

    def _came(self, make: Callable[..., web.BaseRequest], *given: Any) -> web.BaseRequest:
        """Note when the head of a request was read: many at once wait for each other then."""
        request = make(*given)
        request["came"] = self.engine.clock.now
        return request

    def _tokens(self, request: Request, first: int, last: int) -> list[int] | None:
        """Return tokens of a request, prompt and answer; None: its client has gone."""
        if (said := self.api.said.get(request.id)) is None:
            return None
        prompt, offset = said
        size, words = len(prompt), self._words
        answer = range(offset + max(first - size, 0), offset + max(last - size, 0))
        return [*prompt[first:last], *(words[number % len(words)] for number in answer)]

    def _card(self, name: str) -> Any:
        shape, now = SHAPES["model"], {"created": int(time.time())}
        found = shape | now | {"id": name, "root": str(self.scenario.model)}
        found["max_model_len"] = self.engine.spec.max_model_len
        return found | {"permission": [shape["permission"] | now]}

    async def _model(self, request: web.Request) -> web.Response:
        self.api.reader.check_model(name := request.match_info["model"])
        return web.json_response(self._card(name))

    async def _server_info(self, request: web.Request) -> web.Response:
        """Tell the engine's settings, as vLLM with VLLM_SERVER_DEV_MODE=1 does."""
        config: Any = self.scenario.resolved()["engine"]
        if request.query.get("config_format") != "json":
            config = ", ".join(f"{key}={value!r}" for key, value in config.items())
        return web.json_response({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    async def _health(self, request: web.Request) -> web.Response:
        """Say 503 as long as no replica has started, or none is left."""
        self.engine.clock.advance()
        return web.Response(status=200 if self.engine.is_open() else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.engine.clock.advance()
        return web.Response(text=self.metrics.text(), content_type="text/plain")

    async def _report(self, request: web.Request) -> web.Response:
        """Return the run so far: JSON, or the HTML report to a browser."""
        result = self.engine.result()
        refuse({"no request": not len(result.workload)})
        if "text/html" in request.headers.get("Accept", ""):
            from headway.figures.data import Run
            from headway.report.html.page import page

            run = Run.of(self.scenario.name or "served", result)
            return web.Response(text=page([run]), content_type="text/html")
        return web.json_response(result.summary() | {"served": self.served()})

    async def _requests(self, request: web.Request) -> web.Response:
        """Return the requests of the report as a trace that plays them again."""
        text = io.BytesIO()
        write_timed_trace(self.engine.result().workload, self.engine.block_size, text)
        return web.Response(body=text.getvalue(), content_type="application/jsonl")

    def write(self, out: Path) -> list[Path]:
        """Write the files of the run, and what plays it again: replay.yaml and its trace."""

        from simulator.simulation.write import write_run

        result = self.engine.result()
        load = {"path": "served.jsonl", "format": "timed_trace"}  # in which images are text
        if has_media(result.workload):
            load = {"path": "requests.csv", "format": "requests"}
        text = dump_yaml(result.scenario.resolved() | {"workload": {"trace": load}}).encode()
        more: dict[str, Writer] = {
            "served.jsonl": partial(write_timed_trace, result.workload, self.engine.block_size),
            "replay.yaml": lambda file: file.write(text),
            "answers.csv": lambda file: file.write(encode_csv(self.engine.answers())),
        }
        return write_run(result, out, more=more)

    def served(self) -> dict[str, Any]:
        """Say how far what clients measure may be trusted."""
        late, first = self.engine.clock.lateness(), self.engine.clock.lateness(first=True)
        return {
            "speed": self.options.speed,
            "late_ms": late,
            "first_token_late_ms": first,
            "on_time": max(late["p99"], first["p99"]) <= LATE * 1e3,
        }


def _tells(path: str, value: Callable[[], Any]) -> Route:
    """Return the address of a value that no request changes."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(value())

    return Route("GET", path, answer)


def token_counter(folder: Path | None, template: str | None = None) -> TokenCounter:
    """Return the tokenizer of a folder, or words between spaces.

    Chats become prompts by the `template`, else by the folder's own.
    """
    counter = TokenCounter() if folder is None else BpeTokens(folder)
    if template is not None:
        counter.template = read_template(template)
    elif folder is not None and folder.is_dir():
        counter.template = own_template(folder)
    return counter


def serve(servers: Sequence[Server], ready: Callable[[Server, str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `ready` is told each server's address."""

    async def run() -> None:
        stop = asyncio.Event()
        on_interrupt(stop.set)
        tasks = [asyncio.create_task(one.run(stop, partial(ready, one))) for one in servers]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # one that is broken ends all
        await asyncio.gather(*tasks)

    _allow_open_files()
    asyncio.run(run())


async def _listen(server: web.Server, host: str, port: int) -> asyncio.Server:
    """Take connections, so many at once; others are closed as they come."""

    def accept() -> asyncio.Protocol:
        return _Closed() if len(server.connections) >= MOST_CONNECTIONS else server()

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
