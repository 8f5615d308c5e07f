"""The studio's server: the page, and the runs that it asks for, on this machine alone.

Whatever comes from a page is checked: knobs against their table, a trace by its size. No scenario
that a page could name is read, and no code of its own is run.
"""

import asyncio
import gzip
import json
import re
import secrets
import tempfile
import threading
import warnings
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.common.http_server import is_foreign, on_interrupt, running
from headway.report.html.page import frame, read_asset
from headway.studio.columns import columns_of, columns_used, unknown_columns
from headway.studio.knobs import KEYS, Knob, knobs_of, overrides
from headway.studio.plan import QUESTIONS, command, plan
from headway.studio.worker import Job, Kind, Worker
from simulator.scenario.draw import TRACE_OPTION, settle_models
from simulator.scenario.load import load_scenario
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces.read import read_measured

need_package("studio", "serve", "aiohttp")
from aiohttp import web  # noqa: E402

HOST = "127.0.0.1"  # and no other: who reaches the page may have this machine compute
MOST_BYTES = 32 * 2**20  # of a trace
MOST_UNPACKED = 256 * 2**20
MOST_JSON = 2**16  # of what the page asks for
MOST_TRACES = 8  # that are kept
MOST_NAME = 255  # characters of an uploaded file's name
PATIENCE = 10.0  # s that a worker may take to notice that its job is not wanted any more
ENDED = "the simulation was ended: it took too long, or too much memory"
ASSETS = Path(__file__).parent / "assets"
GZIP = b"\x1f\x8b"
PACKED = (b"PK", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # which no reader knows
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a page asks for: settings here and elsewhere, where an upload has its own name."""

    settings: list[str]
    told: list[str]
    trace: str  # the name that an uploaded trace came with; "": none is played
    path: str  # where it is here
    question: object  # that a plan is to answer

    def elsewhere(self, text: str) -> str:
        """Name an uploaded trace in JSON as it is called where it comes from."""
        return text.replace(self.path, json.dumps(self.trace)[1:-1]) if self.path else text


class Studio:
    """A scenario, its page, and the worker that simulates it."""

    def __init__(self, scenario: str, settings: list[str], folder: Path) -> None:
        self.scenario, self.settings, self.folder = scenario, settings, folder
        # A log asks about a server and levels of its own, not about the demo's textbook engine.
        self.served = ['engine={"name": "vllm"}', "goodput=null"] if scenario == "demo" else []
        loaded = load_scenario(scenario, settings, own_code=False)
        self.name = loaded.name
        self.traces: dict[str, tuple[Path, str, str]] = {}  # uploads: place, name, columns
        self.knobs: dict[str, list[Knob]] = {"": knobs_of(loaded)}
        self.worker = Worker()
        self.port = 0
        self._ticket = 0
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._plans, self._planning = 0, False  # how many there were; whether one is under way
        self._done = 0  # the last job that the worker is done with

    # The worker.

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand on what the worker says, from a thread, as long as it lives."""
        worker = self.worker

        def listen() -> None:
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._heard, worker.pipe.recv())
            with suppress(RuntimeError):  # the loop is closed: all is over
                loop.call_soon_threadsafe(self._lost, worker)

        threading.Thread(target=listen, daemon=True).start()

    def _heard(self, answer: dict[str, Any]) -> None:
        if answer.get("last"):
            self._done = answer["ticket"]
        queue = self._answers.get(answer["ticket"])
        if queue is not None:
            queue.put_nowait(answer)

    def _lost(self, worker: Worker) -> None:
        """Start another worker: this one has died, of memory or by our hand."""
        for queue in self._answers.values():
            queue.put_nowait({"errors": [ENDED], "last": True})
        if worker is self.worker:
            self.worker = Worker()
            self.listen(asyncio.get_running_loop())

    def _submit(self, settings: list[str], trace: str, kind: Kind) -> int:
        """Ask the worker for a job; any other gives way."""
        self._ticket += 1
        for ticket, queue in self._answers.items():
            queue.put_nowait({"cancelled": True, "last": True})
            self._watch(ticket)
        self._answers = {self._ticket: asyncio.Queue()}
        self.worker.submit(Job(self._ticket, self.scenario, tuple(settings), kind, trace))
        return self._ticket

    def _watch(self, ticket: int) -> None:
        """End a worker that does not notice in time that nobody waits for its job any more."""
        worker = self.worker

        def look() -> None:
            if worker is self.worker and self._done < ticket:
                worker.close()

        asyncio.get_running_loop().call_later(PATIENCE, look)

    # The page.

    def application(self) -> web.Application:
        """Return the addresses."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/favicon.ico", self._icon),
                web.post("/run", partial(self._stream, kind="run")),
                web.post("/page", partial(self._stream, kind="page")),
                web.post("/plan", self._plan),
                web.post("/trace", self._trace),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse pages of other sites, which a browser lets talk to this machine, too."""
        if is_foreign(request, {f"{HOST}:{self.port}", f"localhost:{self.port}"}):
            return _errors(["this page is for this machine alone"], 403)
        try:
            response = await handler(request)
        except HeadwayError as error:
            return _errors(error.messages, 400)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page(), content_type="text/html", charset="utf-8")

    async def _icon(self, request: web.Request) -> web.Response:
        """There is none, which is no error."""
        return web.Response(status=204)

    def page(self) -> str:
        """Return the page."""
        start = {
            "name": self.name,
            "command": ["headway", "run", self.scenario]
            + [word for setting in self.settings for word in ("--set", setting)],
            "knobs": [asdict(knob) for knob in self.knobs[""]],
            "keys": KEYS,
            "most_bytes": MOST_BYTES,
            "questions": {name: label for name, (label, _) in QUESTIONS.items()},
        }
        data = json.dumps(start).replace("<", "\\u003c")
        body = (ASSETS / "studio.html").read_text("utf-8")
        style = (ASSETS / "studio.css").read_text("utf-8")
        script = (ASSETS / "studio.js").read_text("utf-8")
        parts = (read_asset("uPlot.iife.min.js"), read_asset("sort.js"), script)
        scripts = "".join(f"<script>{part}</script>" for part in parts)
        start_data = f'<script type="application/json" id="start">{data}</script>'
        return frame(f"{self.name}, studio", f"<style>{style}</style>{body}", start_data + scripts)

    async def _asked(self, request: web.Request) -> Asked:
        """Read what the page asks for; HeadwayError for what it may not."""
        text = await request.content.read(MOST_JSON + 1)
        while text and len(text) <= MOST_JSON and (more := await request.content.read(MOST_JSON)):
            text += more
        if len(text) > MOST_JSON:
            raise HeadwayError(f"more than {MOST_JSON:,} bytes")
        try:
            asked = json.loads(text)
        except (ValueError, RecursionError):
            raise HeadwayError("the request is not JSON") from None
        if not isinstance(asked, Mapping):
            raise HeadwayError("the request is no mapping")
        trace = asked.get("trace") or ""
        if not isinstance(trace, str) or trace not in self.knobs:
            raise HeadwayError("trace: is not one that was uploaded")
        own = overrides(self.knobs[trace], asked.get("knobs", {}))
        question = asked.get("question", "")
        if not trace:
            return Asked([*self.settings, *own], [*self.settings, *own], "", "", question)
        path, called, columns = self.traces[trace]
        own = [f"name={json.dumps(_name(called), ensure_ascii=False)}", 'description=""', *own]
        here, there = _as_workload(path, columns), _as_workload(called, columns)
        before = [*self.served, *self.settings]
        settings = [*before, here, *own], [*before, there, *own]
        return Asked(*settings, called, str(path), question)

    async def _plan(self, request: web.Request) -> web.StreamResponse:
        """Send what a plan says, a line of JSON each; a page that leaves ends it."""
        asked = await self._asked(request)
        if not isinstance(asked.question, str) or asked.question not in QUESTIONS:
            raise HeadwayError(f"question: {str(asked.question)[:40]!r} is none that is answered")
        if self._planning:
            raise HeadwayError("a plan is under way: cancel it first")
        self._planning = True
        self._plans += 1
        told = command(self.scenario, asked.told, asked.question)
        words = command(self.scenario, asked.settings, asked.question)
        response = _lines_of_json()
        try:
            await response.prepare(request)
            async with aclosing(plan(words, self.folder / f"plan-{self._plans}")) as lines:
                async for line in lines:
                    text = asked.elsewhere(json.dumps(line | {"command": ["headway", *told]}))
                    await response.write(text.encode() + b"\n")
        except ConnectionResetError:
            pass  # the page has left
        finally:
            self._planning = False
        return response

    async def _stream(self, request: web.Request, *, kind: Kind) -> web.StreamResponse:
        """Send what the worker says, a line of JSON each; a page that leaves ends the job."""
        asked = await self._asked(request)
        ticket = self._submit(asked.settings, asked.trace, kind)
        queue = self._answers[ticket]
        response = _lines_of_json()
        last = False
        try:
            await response.prepare(request)
            while not last:
                answer = await queue.get()
                last = bool(answer.get("last"))
                text = asked.elsewhere(json.dumps(answer | {"settings": asked.told}))
                await response.write(text.encode() + b"\n")
        except ConnectionResetError:
            last = False  # the page has left
        finally:
            if self._answers.pop(ticket, None) is not None and not last:
                self.worker.cancel()
                self._watch(ticket)
        return response

    async def _trace(self, request: web.Request) -> web.Response:
        """Offer the knobs of a trace, or say what is wrong with the file."""
        try:
            return web.json_response(await self._take(request))
        except HeadwayError as error:  # no failure of the request, which a browser would log
            return web.json_response({"errors": error.messages})

    async def _take(self, request: web.Request) -> dict[str, Any]:
        """Keep a trace, if its file is not too large and can be read; return its knobs, and which
        columns are used as what.

        Where it is not known which column holds what: the names of the columns, and a guess.
        """
        called = Path(request.query.get("name", "")).name[:MOST_NAME] or "trace.jsonl"
        columns = request.query.get("columns", "")
        text = bytearray()
        async for part in request.content.iter_chunked(2**16):
            text += part
            if len(text) > MOST_BYTES:
                raise HeadwayError(f"{called}: has more than {MOST_BYTES // 2**20} MiB")
        if any(text.startswith(magic) for magic in PACKED):
            raise HeadwayError(f"{called}: is packed, and not by gzip: unpack it first")
        name = secrets.token_hex(8)
        path = self.folder / f"{name}.trace"
        path.write_bytes(text)
        names: list[str] = []
        try:
            await asyncio.to_thread(_check_unpacked, path)
            try:
                loaded, used = await asyncio.to_thread(self._read, path, columns)
            except HeadwayError:
                look = columns_of if columns else unknown_columns
                names, guess = await asyncio.to_thread(look, path)
                raise
        except HeadwayError as error:
            path.unlink()
            told = [message.replace(str(path), called) for message in error.messages]
            if not names:
                raise HeadwayError(told) from None
            return {"errors": told if columns else [], "names": names, "columns": columns or guess}
        self.traces[name], self.knobs[name] = (path, called, columns), loaded
        while len(self.traces) > MOST_TRACES:
            old = next(iter(self.traces))
            del self.traces[old], self.knobs[old]
            (self.folder / f"{old}.trace").unlink()
        knobs = [asdict(knob) for knob in loaded]
        return {"trace": name, "name": _name(called), "knobs": knobs} | used

    def _read(self, path: Path, columns: str) -> tuple[list[Knob], dict[str, Any]]:
        """Read a trace, once: its knobs, and which of its columns are used as what."""
        settings = [*self.served, *self.settings, _as_workload(path, columns)]
        scenario = load_scenario(self.scenario, settings, own_code=False)
        given = {"columns": columns} if columns else {}
        load, table = read_measured(path, None, given, TRACE_OPTION)
        settle_models(scenario, load)
        return knobs_of(scenario, load), columns_used(path, table)


def _as_workload(trace: Path | str, columns: str) -> str:
    """Write the setting by which a trace is the workload; `columns`: "" where it names its own."""
    load = {"trace": {"path": str(trace)}} | ({"columns": columns} if columns else {})
    return f"workload={json.dumps(load, ensure_ascii=False)}"


def _name(called: str) -> str:
    """Name a scenario after an upload: its file's name without ending, as names may be."""
    return re.sub(r"^\W+|[^\w .,+=-]", "", Path(called).stem)[:100] or "trace"


def _check_unpacked(path: Path) -> None:
    """Refuse a file packed by gzip that is too large inside; its reader tells a damaged one."""
    with path.open("rb") as file:
        if file.read(2) != GZIP:
            return
    size = 0
    with gzip.open(path) as file, suppress(OSError, EOFError, zlib.error):
        while part := file.read(2**20):
            size += len(part)
            if size > MOST_UNPACKED:
                raise HeadwayError(f"{path}: has more than {MOST_UNPACKED // 2**20} MiB, unpacked")


def _lines_of_json() -> web.StreamResponse:
    return web.StreamResponse(headers=HEADERS | {"Content-Type": "application/x-ndjson"})


def _errors(messages: list[str], status: int) -> web.Response:
    return web.json_response({"errors": messages}, status=status, headers=HEADERS)


def studio(scenario: str, settings: list[str], port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C or SIGTERM; `ready` is told its address.

    Raises HeadwayError for what is wrong in the scenario, or a port that is not to be had.
    """

    async def serve(folder: Path) -> None:
        stop = asyncio.Event()
        on_interrupt(stop.set)
        page = Studio(scenario, settings, folder)
        warnings.simplefilter("ignore", HeadwayWarning)  # of a trace: the page says it
        page.listen(asyncio.get_running_loop())
        try:
            async with running(page.application()) as runner:
                try:
                    await web.TCPSite(runner, HOST, port).start()
                except OSError as error:
                    where = f"{HOST}:{port}"
                    raise HeadwayError(f"--port: {where}: {error.strerror or error}") from None
                page.port = runner.addresses[0][1]
                ready(f"http://{HOST}:{page.port}/")
                await stop.wait()
        finally:
            page.worker.close()

    with tempfile.TemporaryDirectory(prefix="headway-studio-") as folder:
        asyncio.run(serve(Path(folder)))
