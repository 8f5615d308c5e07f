"""What comes from outside, be it a body, a page of another site or a foreign server's answer."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import numpy as np
import pytest

from headway.common.http_server import is_foreign
from headway.twin import remote
from headway.twin.api.refusals import openapi
from headway.twin.options import ServeOptions
from headway.twin.replay import replay
from headway.twin.server import Server
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload
from tests.support.twins import served_by
from tests.support.wire import described

NUMBERS = (None, True, -1, 0, 1.5, 10**20, 1e308, float("nan"))
TEXTS = ("", "a", "\u00b2", "\ud800", "9" * 50)
PARTS = ([], ["buy"], [[]], [None], [{}], {}, {"a": 1}, {"text": "a", "type": "text"})
WRONG: tuple[Any, ...] = NUMBERS + TEXTS + PARTS
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
COMPLETION = {"prompt": "a", "max_tokens": 2}
ITEM = ("content", "type", "call_id", "arguments", "output", "name")
PATHS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {**CHAT, "model": "llama-3-8b"},
    "/tokenize": COMPLETION,
    "/admin/slow": {"factor": 1},
    "/admin/hang": {"seconds": 0},
    "/admin/restart": {"delay": 0},
    "/admin/failures": {},
}


@pytest.mark.parametrize("path", PATHS)
def test_no_wrong_type_of_a_field_is_a_fault_of_the_server(path: str) -> None:
    async def play(client: aiohttp.ClientSession, server: Server) -> None:
        fields = described(openapi(server.routes(), "0"))[f"POST {path}"]
        bodies: list[Any] = [{**PATHS[path], name: value} for name in fields for value in WRONG]
        messages = [{"role": "user", "content": one} for one in WRONG]
        messages += [{"role": one, "content": "a"} for one in WRONG]
        bodies += [{**CHAT, "messages": [one]} for one in messages if "messages" in fields]
        items = [{"role": "user", key: one} for key in ITEM for one in WRONG]
        bodies += [{"input": [one]} for one in items if "input" in fields]
        more = [{key: one} for key in ("predicted_output_tokens", "client") for one in WRONG]
        bodies += [{**PATHS[path], "vllm_xargs": one} for one in more if "vllm_xargs" in fields]
        for body in [*bodies, *WRONG]:
            data, head = json.dumps(body), {"Content-Type": "application/json"}
            async with client.post(path, data=data, headers=head) as answer:
                assert answer.status < 500, body
        async with client.post("/admin/failures", data="{}") as answer:
            assert answer.status == 200

    served_by(play, admin=True, speed=1000)


def test_no_page_of_another_site_is_answered() -> None:
    """Neither by its Origin, nor by a name of its own for this machine."""

    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        own = f"{client._base_url}".rstrip("/")
        for head, status in (
            ({}, 200),
            ({"Origin": own}, 200),
            ({"Host": "localhost:9"}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "http://127.0.0.1:1"}, 403),
            ({"Origin": "null"}, 403),
            ({"Host": "evil.example"}, 403),
        ):
            for path in ("/admin/slow", "/v1/completions"):
                body = {"factor": 1} if "admin" in path else COMPLETION
                async with client.post(path, json=body, headers=head) as answer:
                    assert answer.status == status, (path, head)
            async with client.get("/health", headers=head) as answer:
                assert answer.status == status

    served_by(play, admin=True)


SITE = "http://app.example:3000"


@pytest.mark.parametrize(
    ("origins", "told"), [([], None), ([SITE], SITE), (["http://other"], None), (["*"], "*")]
)
def test_pages_of_allowed_origins_may_ask(origins: list[str], told: str | None) -> None:
    """As with vLLM's `--allowed-origins`; another name of this machine is refused all the same."""

    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        head = {"Origin": SITE}
        async with client.options("/v1/completions", headers=head | asks) as answer:
            assert answer.status == (400 if told is None else 200)
            assert await answer.text() == ("Disallowed CORS origin" if told is None else "OK")
            assert answer.headers.get("Access-Control-Allow-Origin") == told
            assert answer.headers["Access-Control-Allow-Headers"] == "x-a"
        for more in ({}, {"stream": True}):
            body = {**COMPLETION, **more}
            async with client.post("/v1/completions", json=body, headers=head) as answer:
                assert answer.status == (403 if told is None else 200)
                assert answer.headers.get("Access-Control-Allow-Origin") == told
        renamed = head | {"Host": "app.example"}
        async with client.get("/health", headers=renamed) as answer:
            assert answer.status == 403
        async with client.options("/v1/completions") as answer:  # no browser asks so
            assert answer.status == 405

    served_by(play, allowed_origins=origins)


@pytest.mark.parametrize("origin", ["{}", "localhost", ""])
def test_an_origin_has_a_scheme(origin: str) -> None:
    with pytest.raises(HeadwayError, match=f"--allowed-origins: {origin}: is not like http"):
        ServeOptions(allowed_origins=[SITE, "*", origin]).check()


def test_a_server_for_others_may_have_any_name() -> None:
    """But a page of another site has none."""
    from aiohttp.test_utils import make_mocked_request

    for origin, foreign in (("", False), ("https://gpu:80", False), ("http://evil", True)):
        head = {"Host": "gpu:80"} | ({"Origin": origin} if origin else {})
        assert is_foreign(make_mocked_request("GET", "/", head), None) == foreign


def test_a_client_that_vanishes_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def play(client: aiohttp.ClientSession, _: Server) -> None:
        body = json.dumps({**COMPLETION, "stream": True, "max_tokens": 50}).encode()
        url = client._base_url
        assert url is not None
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}"
        for _ in range(20):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
            writer.transport.abort()
        await asyncio.sleep(0.5)

    with caplog.at_level(logging.WARNING):
        served_by(play)
    assert [record for record in caplog.records if record.exc_info] == []


class Hostile(BaseHTTPRequestHandler):
    """A server whose /metrics is `metrics`, again and again, and whose answers are right."""

    metrics: tuple[bytes, ...] = ()

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Name a model; tell metrics without end."""
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            first, *rest = self.metrics
            self.wfile.write(first)
            begin = time.monotonic()
            while rest and time.monotonic() < begin + 20:
                try:
                    self.wfile.write(rest[0])
                except OSError:
                    return
        else:
            self.wfile.write(b'{"data": [{"id": "m"}], "version": "1"}')

    def do_POST(self) -> None:
        """Answer with one token."""
        self.send_response(200)
        self.end_headers()
        chunk = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.fixture
def hostile() -> Iterator[str]:
    """Run such a server; give its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.mark.parametrize(
    "metrics",
    [
        (b"vllm:num_requests_running 1\n\xff\n",),
        (b"vllm:num_requests_running one\nvllm:kv_cache_usage_perc 0.0.0\n",),
        (b"#", b"#" * 2**16),
        (b'vllm:cache_config_info{block_size="' + b"9" * 5000 + b'",num_gpu_blocks="1"} 1\n',),
    ],
    ids=["bytes", "words", "endless", "long"],
)
def test_what_metrics_say_costs_no_answer(
    hostile: str, metrics: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hostile, "metrics", metrics)
    monkeypatch.setattr(remote, "MOST_BYTES", 2**20)
    ones = np.ones(3, np.int64)
    found = replay(Workload(np.arange(3) / 10, 5 * ones, ones), hostile)
    assert [(one.tokens, one.error) for one in found.requests] == [(1, "")] * 3
