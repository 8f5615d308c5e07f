"""What a live server of vLLM decided is what Headway schedules: every field of every step.

A server records its steps (`headway.vllm.RecordedScheduler`) under loads that make it hard;
Headway's engine is given the same arrivals and durations.
"""

import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headway.conformance.compare import conform, report
from headway.conformance.live import read_live
from tests.support.live_vllm import RECORDER, live_server

pytestmark = [pytest.mark.engine, pytest.mark.engine_all]

ASYNCHRONOUS = "tests.support.async_on_cpu.AsynchronousScheduler"
STEPS = 20_000
"""In all."""


@dataclass(frozen=True)
class Load:
    """A server's flags and what is sent to it."""

    flags: tuple[str, ...] = ()
    asynchronous: bool = False
    count: int = 450
    rate: float = 40.0  # requests a second
    answer: float = 80.0  # tokens, mean
    stops: bool = False  # answers end by a stop token
    hard: tuple[str, ...] = field(default=("new", "finished"))  # fields that must not stay empty


SEATS = ("--max-num-seqs", "8")
SMALL = ("--num-gpu-blocks-override", "80")
LOADS = {
    "prefixes": Load(SEATS),
    "prefixes, async": Load(SEATS, asynchronous=True),
    "priority, few blocks": Load(
        (*SMALL, "--scheduling-policy", "priority"), hard=("preempted", "resumed")
    ),
    "priority, few blocks, async": Load(
        (*SMALL, "--scheduling-policy", "priority"),
        asynchronous=True,
        hard=("preempted", "resumed"),
    ),
    "fcfs, few blocks, stop tokens, async": Load(
        SMALL, asynchronous=True, stops=True, hard=("preempted", "resumed")
    ),
    "no prefix cache": Load((*SEATS, "--no-enable-prefix-caching")),
}


def send(url: str, model: Path, load: Load, seed: int) -> None:
    """Send it all, in threads; raise where a request fails."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, 4096) for _ in range(200)] for _ in range(4)]
    failures: list[str] = []

    def post(body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                json.load(answer)
        except (OSError, ValueError) as error:
            failures.append(repr(error))

    threads = []
    for _ in range(load.count):
        time.sleep(rng.expovariate(load.rate))
        size = int(rng.choice([5, 40, 150, 400, 900]) * rng.uniform(0.5, 1.5))
        prompt = [rng.randrange(2, 4096) for _ in range(size)]
        if rng.random() < 0.5:
            prompt = rng.choice(prefixes)[: rng.choice([64, 150, 200])] + prompt
        body: dict[str, Any] = {"model": str(model), "prompt": prompt, "ignore_eos": True}
        body["max_tokens"] = 1 + int(rng.expovariate(1 / load.answer))
        if "priority" in load.flags:
            body["priority"] = rng.randrange(4)
        if load.stops:
            body |= {"stop_token_ids": [*range(2, 70)], "temperature": 1.0, "max_tokens": 500}
        threads.append(threading.Thread(target=post, args=(body,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_headway_schedules_what_live_servers_scheduled(
    models: Callable[[str], Path], tmp_path: Path, show: Callable[[str], None]
) -> None:
    """At least 20,000 steps over all loads."""
    small = models("small")  # decisions know no sizes
    table, total = [f"{'live steps that agree':<40} {'steps':>7} {'preempting':>10}"], 0
    for seed, (name, load) in enumerate(LOADS.items()):
        steps = tmp_path / f"{seed}.jsonl"
        scheduler = ASYNCHRONOUS if load.asynchronous else RECORDER
        flags = ("--enforce-eager", "--scheduler-cls", scheduler, *load.flags)
        log, told = tmp_path / f"{seed}.log", {"HEADWAY_STEPS": str(steps)}
        with live_server(small, log, *flags, env=told) as server:
            send(server.url, small, load, seed)
            time.sleep(1)  # the last outcome is written down after its answer is sent
        outcomes = conform(steps)
        assert all(one.agrees for one in outcomes), f"{name}: {report(outcomes)}"
        rows = read_live(steps).steps
        for key in load.hard:
            assert any(row[key] for row in rows), f"{name}: no step has {key}"
        total += outcomes[0].steps
        preempting = sum(bool(row["preempted"]) for row in rows)
        table.append(f"{name:<40} {outcomes[0].steps:>7,} {preempting:>10,}")
    show("\n".join([*table, f"{'in all':<40} {total:>7,}"]))
    assert total >= STEPS
