"""The server itself: it is a real vLLM, it answers, and nothing of it is left behind."""

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from tests.support.engine_environment import RELEASE
from tests.support.live_vllm import live_server

pytestmark = pytest.mark.engine


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_it_is_the_release_and_it_answers_and_it_ends(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    with live_server(models("llama"), tmp_path / "log", "--max-num-seqs", "4") as server:
        assert fetch(f"{server.url}/version") == {"version": RELEASE}
        (card,) = fetch(f"{server.url}/v1/models")["data"]
        assert card["max_model_len"] == 2048
        asked = {"model": card["id"], "prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True}
        answer = fetch(f"{server.url}/v1/completions", asked)
        assert answer["usage"]["completion_tokens"] == 5
        assert len(answer["choices"][0]["text"].split()) == 5
        port = server.url.rpartition(":")[2]
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and port in words_of(pid)]
    with pytest.raises(URLError):
        fetch(f"{server.url}/version")


def words_of(pid: str) -> list[str]:
    """Return the command line of a process; nothing of one that has just gone."""
    try:
        return (Path("/proc") / pid / "cmdline").read_text().split("\0")
    except OSError:
        return []
