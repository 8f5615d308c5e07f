"""How far what clients of `headway serve` measure is from the simulation, and how late it is.

    python benchmarks/serve.py [RUNS]

A server in a process, an open-loop client in another, both on this machine. Each line is a run:
tokens/s, by how much the server's steps came late, the client's means against those of the
simulation of the same requests, and the CPU time of the server. Nothing else should run meanwhile:
the load average is told.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "model: llama-3.1-8b\ngpu: {name: H100-80GB}\nengine: {name: vllm}\n"
LOADS = {"below saturation": (5.0, 500, 100, 150), "10,000 tokens/s": (50.0, 100, 200, 750)}
"""Requests/s, prompt and output tokens, requests."""
MARK = b'"text":" '


class Stream(asyncio.Protocol):
    """One request; notes when tokens come, at the cost of counting a word in the bytes."""

    def __init__(self, body: bytes, rows: list[tuple[float, ...]], left: asyncio.Semaphore) -> None:
        self.body, self.rows, self.left = body, rows, left
        self.first, self.last, self.count, self.tail = 0.0, 0.0, 0, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.begin = time.perf_counter()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        size = b"Content-Length: %d\r\n\r\n" % len(self.body)
        transport.write(head + size + self.body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if tokens := data.count(MARK):
            self.first, self.last = self.first or now, now
            self.count += tokens
        if b"[DONE]" in self.tail + data:
            self.rows.append((self.begin, self.first, self.last, self.count))
            self.transport.close()
            self.left.release()
        self.tail = data[-8:]


async def load(port: int, rate: float, prompt: int, output: int, count: int) -> dict[str, float]:
    """Send requests at random times; give means in ms, and tokens/s."""
    random = np.random.default_rng(0)
    loop, left = asyncio.get_running_loop(), asyncio.Semaphore(0)
    rows: list[tuple[float, ...]] = []
    at = time.perf_counter()
    for _ in range(count):
        tokens = random.integers(100, 30_000, prompt).tolist()
        asked = {"prompt": tokens, "max_tokens": output, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        at += random.exponential(1 / rate)
        await asyncio.sleep(max(at - time.perf_counter(), 0.0))
        await loop.create_connection(lambda body=body: Stream(body, rows, left), "127.0.0.1", port)
    for _ in range(count):
        await left.acquire()
    begin, first, last, tokens = np.array(rows).T
    assert (tokens == output).all(), "tokens are missing"
    return {
        "tokens": float(tokens.sum() / (last.max() - begin.min())),
        "ttft": 1e3 * float((first - begin).mean()),
        "tpot": 1e3 * float(((last - first) / (tokens - 1)).mean()),
        "e2el": 1e3 * float((last - begin).mean()),
    }


def cpu_seconds(process: int) -> float:
    """Return a process's CPU time so far, the kernel's for it included.

    From Linux's scheduler: the counts of ticks in `stat` are wrong for who wakes up with the tick.
    """
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


def measure(name: str, sizes: tuple[float, int, int, int]) -> None:
    """Serve and load once; tell a line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(MODEL)
        command = [sys.executable, "-m", "simulator", "serve", str(path), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[2].removesuffix(";").removesuffix("/v1")
            before = cpu_seconds(server.pid)
            client = [sys.executable, __file__, "--load", url.rsplit(":", 1)[1]]
            done = subprocess.run(
                [*client, *map(str, sizes)], stdout=subprocess.PIPE, text=True, check=True
            )
            spent = cpu_seconds(server.pid) - before
            with urllib.request.urlopen(f"{url}/report", timeout=60) as response:
                report = json.load(response)
            server.send_signal(signal.SIGINT)
            server.communicate()
    found = json.loads(done.stdout)
    ours = {key: report[f"mean_{key}_ms"] for key in ("ttft", "tpot", "e2el")}
    late = report["served"]["late_ms"]
    print(
        f"{name:18}{found['tokens']:>8,.0f} tokens/s; late by {late['p50']:.1f} ms (median), "
        f"{late['p99']:.1f} ms (P99); TPOT {100 * (found['tpot'] / ours['tpot'] - 1):+.1f} %, "
        f"E2EL {100 * (found['e2el'] / ours['e2el'] - 1):+.1f} %, "
        f"TTFT {found['ttft'] - ours['ttft']:+.1f} ms; "
        f"{1e6 * spent / report['total_output_tokens']:.1f} us of CPU a token; "
        f"load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        port, rate, prompt, output, count = sys.argv[2:]
        sizes = int(prompt), int(output), int(count)
        print(json.dumps(asyncio.run(load(int(port), float(rate), *sizes))))
        return
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        for name, sizes in LOADS.items():
            measure(name, sizes)


if __name__ == "__main__":
    main()
