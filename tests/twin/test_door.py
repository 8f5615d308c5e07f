"""Limits of the queue behind HTTP: 503 beyond them, counted alike in all that tells of them."""

import asyncio
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.server import Server
from simulator import load_scenario, run
from simulator.diagnosis.rules import diagnosis_lines
from tests.support.twins import served_by

BODY = {"prompt": 1000 * "one two ", "max_tokens": 60, "ignore_eos": True}

WORDS = {
    "max_num_queued_reqs": "The engine is currently busy and cannot accept new requests.",
    "max_num_queued_tokens": "The engine has reached its prefill token backlog limit.",
}
"""As in `vllm/exceptions.py` of vLLM 0.33; `create_error_response` gives the type."""


async def ask(client: ClientSession, limit: str, **more: Any) -> int:
    response = await client.post("/v1/completions", json=BODY | more)
    text = await response.text()
    if response.status != 200:
        error = json.loads(text)["error"]
        told = f"{WORDS[limit]} Please try again later or on a different instance."
        kind = {"type": "Service Unavailable", "param": None, "code": 503}
        assert error == {"message": told} | kind
    return response.status


@pytest.mark.parametrize(
    ("limit", "most", "served", "ranks"),
    [
        ("max_num_queued_reqs", 2, 2, 1),
        ("max_num_queued_reqs", 2, 2, 2),
        ("max_num_queued_tokens", 2001, 2, 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_who_comes_beyond_a_limit_gets_503_and_is_counted(
    limit: str, most: int, served: int, ranks: int, stream: bool, tmp_path: Path
) -> None:
    """Those of a burst, too, whose bodies are read before any of them is in the engine."""

    async def play(client: ClientSession, server: Server) -> None:
        burst = await asyncio.gather(*(ask(client, limit, stream=stream) for _ in range(12)))
        assert Counter(burst) == {200: served, 503: 12 - served}
        assert await ask(client, limit) == 200  # the others have ended
        text = await (await client.get("/metrics")).text()
        counts = [line for line in text.splitlines() if "admission_rejections_total{" in line]
        [count] = [line.split()[-1] for line in counts if f'reason="{limit}"' in line]
        assert float(count) == 12 - served
        report = await (await client.get("/report")).json()
        assert (report["num_prompts"], report["headway"]["rejected"]) == (13, 12 - served)
        server.write(tmp_path)

    keys = f"engine.{limit}={most}", f"engine.data_parallel_size={ranks}"
    served_by(play, *keys, speed=1, admin=stream)
    with (tmp_path / "requests.csv").open() as file:
        reasons = Counter(row["finish_reason"] for row in csv.DictReader(file))
    assert reasons == {"length": served + 1, "rejected": 12 - served}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["headway"]["rejected"] == 12 - served
    again = run(load_scenario(tmp_path / "replay.yaml")).summary()
    assert again["headway"]["rejected"] == 12 - served
    first = next(iter(diagnosis_lines(again["headway"])))
    assert f"by engine.{limit} ({most:,}), limits of the queue (503)" in first
    assert f"set engine.{limit} to null" in first
    assert "kv_cache_dtype" not in first


def test_a_request_for_many_answers_is_let_in_or_kept_out_as_a_whole() -> None:
    limit = "max_num_queued_reqs"

    async def play(client: ClientSession, _: Server) -> None:
        for many in ({"n": 7}, {"prompt": ["a"] * 7}, {"prompt": ["a"] * 4, "n": 2}):
            assert await ask(client, limit, **many) == 503
            assert await ask(client, limit, **many, stream=True) == 503
        assert await ask(client, limit, n=6, max_tokens=5) == 200
        report = await (await client.get("/report")).json()
        assert (report["completed"], report["headway"]["rejected"]) == (6, 6)

    served_by(play, f"engine.{limit}=6", "engine.max_num_queued_tokens=1")
