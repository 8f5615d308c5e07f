"""The same clients against the real server and against its twin: figures side by side.

`headway serve` answers from the calibrated scenario on the core that vLLM has, in turns with it.
They want a machine of their own, so CI leaves them out: docs/live-engine.md has what was measured.
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.live_engine.test_time import LIMITS
from tests.support.live_calibration import KINDS, Calibrated, Means, noise_of_mean
from tests.support.live_vllm import (
    CLIENT_CORE,
    SERVER_CORE,
    VOCABULARY,
    LiveServer,
    command,
    environment,
)
from tests.support.twins import twin

pytestmark = [pytest.mark.engine, pytest.mark.engine_all]

COUNT, ROUNDS, SHARE = 80, 3, 0.4
PROMPT, ANSWER = KINDS["short"]


def bench(url: str, model: Path, rate: float, seed: int, out: Path) -> Means:
    """Run `vllm bench serve` with random prompts; return its means, in ms."""
    words = ["bench", "serve", "--backend", "openai", "--base-url", url, "--model", "tiny"]
    words += ["--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos"]
    words += ["--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)]
    words += ["--num-prompts", str(COUNT), "--request-rate", f"{rate:.3f}", "--seed", str(seed)]
    words += ["--percentile-metrics", "ttft,tpot,e2el", "--save-result"]
    words += ["--result-filename", str(out)]
    run(command("vllm", *words))
    found = json.loads(out.read_text())
    assert found["completed"] == COUNT
    return {name: found[f"mean_{name}_ms"] for name in LIMITS}


SDK = """
import asyncio, json, sys, time
from openai import AsyncOpenAI
url, lengths, arrivals, words = (json.loads(word) for word in sys.argv[1:])

async def ask(client, at, number, sizes):
    await asyncio.sleep(at)
    prompt, answer = sizes
    text = " ".join(words[(7919 * number + 31 * k * k) % len(words)] for k in range(prompt))
    begin, times = time.perf_counter(), []
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=answer, stream=True,
        temperature=0.0, extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter() - begin)
    return [times[0], times[-1]]

async def main():
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
        await ask(client, 0.0, 10**6, [20, 5])
        given = zip(arrivals, range(len(arrivals)), lengths)
        print(json.dumps(await asyncio.gather(*(ask(client, *one) for one in given))))

asyncio.run(main())
"""


def sdk(url: str, model: Path, rate: float, seed: int, out: Path) -> Means:
    """Stream chats with the openai SDK; return means, in ms."""
    random = np.random.default_rng(seed)
    lengths = [[int(random.integers(PROMPT // 2, PROMPT * 3 // 2)), ANSWER] for _ in range(COUNT)]
    arrivals = np.cumsum(random.exponential(1 / rate, COUNT)).tolist()
    words = random.permutation(VOCABULARY[100:]).tolist()
    given = (json.dumps(one) for one in (url, lengths, arrivals, words))
    out.write_text(SDK)
    ends = np.array(json.loads(run([*command("python"), str(out), *given])))
    ttft, e2el = 1e3 * ends.T
    values = ttft, (e2el - ttft) / (ANSWER - 1), e2el
    return {name: float(v.mean()) for name, v in zip(("ttft", "tpot", "e2el"), values, strict=True)}


def run(words: list[str]) -> str:
    """Run a client on its core; return the last line that it prints."""
    bound = ["taskset", "-c", str(CLIENT_CORE), *words]
    done = subprocess.run(bound, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


CLIENTS = {"vllm bench serve": bench, "openai SDK, chat": sdk}


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_measure_the_same_of_the_twin(
    name: str,
    live: LiveServer,
    calibrated: Calibrated,
    models: Callable[[str], Path],
    tmp_path: Path,
    show: Callable[[str], None],
) -> None:
    """To LIMITS, or to what the mean of repeats on the real server is known to."""
    client, model, rate = CLIENTS[name], models("llama"), SHARE * calibrated.limits["short"]
    scenario = calibrated.write(tmp_path)
    found: Mapping[str, list[Means]] = {"live": [], "twin": []}
    options = "--port", "0", "--tokenizer", str(model), "--served-model-name", "tiny"
    with twin(str(scenario), *options) as ((url,), process):
        os.sched_setaffinity(process.pid, {SERVER_CORE})
        for seed in range(ROUNDS):
            for kind, at in (("live", live.url), ("twin", url)):
                found[kind].append(client(at, model, rate, seed, tmp_path / f"{kind}-{seed}.py"))
    lines, wrong = [f"{name:<22}{'twin':>22}{'live':>26}{'error':>8}{'floor':>8}"], []
    for metric, limit in LIMITS.items():
        twins, lives = ([one[metric] for one in found[kind]] for kind in ("twin", "live"))
        error, floor = np.mean(twins) / np.mean(lives) - 1, noise_of_mean([lives])
        told = (", ".join(f"{value:.1f}" for value in values) for values in (twins, lives))
        lines.append("{:>10}{:>34}{:>26}{:>+8.1%}{:>8.1%}".format(metric, *told, error, floor))
        if abs(error) > max(limit, floor):
            wrong.append(metric)
    show("\n".join(lines))
    assert not wrong
