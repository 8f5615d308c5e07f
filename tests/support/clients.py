"""Real clients of `headway serve`, each in an environment of its own, and their figures.

`make test-clients` makes the environments, in the folder that HEADWAY_CLIENTS names. A test whose
client is not there is skipped, and says so.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.twin.api.tokenizers import train
from tests.support.twins import twin

SCENARIO = """
name: clients
model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {name: vllm, max_model_len: 16384}
"""
REQUESTS, ISL, OSL = 30, 2000, 60
TPOT, E2EL = 0.03, 0.1
"""How far, relatively, the client's means may be from the simulation's."""


GIVEN = """
import sys

URL, COUNT, OSL, EXTRA = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), {"ignore_eos": True}
"""
"""What a script is given."""
OPENAI = """
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="sk-none", max_retries=0)

async def stream(text):
    chunks = await client.chat.completions.create(
        model="twin", messages=[{"role": "user", "content": text}], max_tokens=OSL,
        stream=True, stream_options={"include_usage": True}, extra_body=EXTRA)
    async for chunk in chunks:
        if chunk.choices:
            yield chunk.choices[0].delta.content
    assert chunk.usage.completion_tokens == OSL
"""
"""What streams the pieces of an answer by the openai SDK."""
HARNESS = """
import asyncio, json, statistics, time

async def ask(number):
    await asyncio.sleep(0.25 * number)
    begin, times = time.perf_counter(), []
    async for piece in stream(f"{number} " + "word " * 1500):
        if piece:
            times.append(time.perf_counter())
    assert len(times) == OSL, f"{len(times)} pieces of {OSL}"
    return times[0] - begin, (times[-1] - times[0]) / (OSL - 1), times[-1] - begin

async def main():
    rows = await asyncio.gather(*(ask(number) for number in range(COUNT)))
    print(json.dumps([1e3 * statistics.median(column) for column in zip(*rows)]))

asyncio.run(main())
"""
"""What asks for COUNT answers of OSL tokens and prints the medians of TTFT, TPOT and E2EL, ms."""


def program(package: str, name: str) -> str:
    """Return the path of a client's program, or skip the test: `package` has it in bin."""
    folder = os.environ.get("HEADWAY_CLIENTS")
    path = Path(folder or "/") / package / "bin" / name
    if folder is None or not path.exists():
        note = Path(folder or "/") / f"{package}.txt"
        why = f": {note.read_text('utf-8')}" if folder and note.exists() else ""
        pytest.skip(f"make test-clients has not installed {package}/bin/{name}{why}")
    return str(path)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def call(*command: str, cwd: Path, offline: bool = False) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    more = {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        command, cwd=cwd, env=env | more, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Path]]:
    """Serve with a tokenizer of its own; give the address and the tokenizer's folder."""
    (folder / "clients.yaml").write_text(SCENARIO)
    tokenizer = folder / "tok"
    train(tokenizer)
    options = "--port", "0", "--tokenizer", str(tokenizer), "--served-model-name", "twin"
    with twin(str(folder / "clients.yaml"), *options) as ((url,), _):
        yield url, tokenizer


def compare(name: str, url: str, requests: int, *, of: str = "mean", **found: float) -> None:
    """Hold a client's figures, ms, against the simulation of the requests that it has sent.

    TTFT is told alone: it has the client's own time, and the machine's. Where times differ and the
    server itself was late, the test is skipped, and says so: nothing was measured.
    """
    report = get(f"{url}/report")
    assert report["completed"] == requests
    assert report["total_output_tokens"] == requests * OSL
    ours = {key: report[f"{of}_{key}_ms"] for key in found}
    pairs = (f"{key.upper()} {found[key]:.2f} ms, simulated {ours[key]:.2f}" for key in found)
    late = report["served"]["late_ms"]["p99"]
    print(f"\n{name}: {'; '.join(pairs)}; answers late by {late:.1f} ms (P99)")
    most = {"tpot": TPOT, "e2el": E2EL}
    apart = [k for k in most if k in found and found[k] != pytest.approx(ours[k], rel=most[k])]
    if apart and not report["served"]["on_time"]:
        pytest.skip(
            f"{name}: counts agree, but this machine is busy: answers are {late:.1f} ms late"
        )
    assert not apart
