"""Load generators, an SDK and a proxy that people use, against `headway serve`.

They are heavy, and do not install beside each other: `make test-clients` makes an environment for
each, in the folder that HEADWAY_CLIENTS names. Without it these tests are skipped.
"""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from headway.twin.api.tokenizers import train
from tests.support.twins import twin

pytestmark = pytest.mark.clients

SCENARIO = """
name: clients
model: llama-3.1-8b
gpu: {name: A100-80GB}
engine: {name: vllm, max_model_len: 16384}
"""
REQUESTS, ISL, OSL = 30, 2000, 60
TPOT, E2EL = 0.03, 0.1
"""How far, relatively, the client's means may be from the simulation's."""


def program(package: str, name: str) -> str:
    folder = os.environ.get("HEADWAY_CLIENTS")
    path = Path(folder or "/") / package / "bin" / name
    if folder is None or not path.exists():
        pytest.skip(f"HEADWAY_CLIENTS names no folder with {package}/bin/{name}")
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


def compare(name: str, url: str, *, tpot: float, e2el: float, ttft: float, requests: int) -> None:
    """Hold a client's figures, ms, against the simulation of the requests that it has sent."""
    report = get(f"{url}/report")
    assert report["completed"] == requests
    assert report["total_output_tokens"] == requests * OSL
    ours = {key: report[f"mean_{key}_ms"] for key in ("tpot", "e2el", "ttft")}
    print(
        f"\n{name}: TPOT {tpot:.2f} ms, simulated {ours['tpot']:.2f}; E2EL {e2el:.1f}, "
        f"{ours['e2el']:.1f}; TTFT {ttft:.1f}, {ours['ttft']:.1f}; answers late by "
        f"{report['served']['late_ms']['p99']:.1f} ms (P99)"
    )
    assert tpot == pytest.approx(ours["tpot"], rel=TPOT)
    assert e2el == pytest.approx(ours["e2el"], rel=E2EL)


def test_vllm_bench_serve(tmp_path: Path) -> None:
    python = program("vllm", "python")
    (tmp_path / "vbench.py").write_text(VBENCH)
    with served(tmp_path) as (url, tokenizer):
        call(
            *(python, "vbench.py", "--backend", "openai", "--base-url", url, "--model", "twin"),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--ignore-eos"),
            *("--random-input-len", str(ISL), "--random-output-len", str(OSL)),
            *("--num-prompts", str(REQUESTS), "--request-rate", "2", "--percentile-metrics"),
            *("ttft,tpot,itl,e2el", "--save-result", "--result-filename", "vllm.json"),
            cwd=tmp_path,
            offline=True,
        )
        found = json.loads((tmp_path / "vllm.json").read_text())
        assert found["completed"] == REQUESTS
        means = {key: found[f"mean_{key}_ms"] for key in ("tpot", "e2el", "ttft")}
        compare("vllm bench serve", url, **means, requests=REQUESTS)


VBENCH = """
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the rest of vLLM's commands, which want all that a server needs."""


def test_aiperf(tmp_path: Path) -> None:
    aiperf = program("aiperf", "aiperf")
    with served(tmp_path) as (url, tokenizer):
        call(
            *(aiperf, "profile", "-m", "twin", "--url", url, "--endpoint-type", "completions"),
            *("--streaming", "--tokenizer", str(tokenizer), "--request-rate", "2"),
            *("--request-count", str(REQUESTS), "--isl", str(ISL), "--osl", str(OSL)),
            *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", "found"),
            cwd=tmp_path,
        )
        found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
        assert found["input_sequence_length"]["avg"] == ISL
        names = {
            "tpot": "inter_token_latency",
            "e2el": "request_latency",
            "ttft": "time_to_first_token",
        }
        means = {key: found[name]["avg"] for key, name in names.items()}
        compare("AIPerf", url, **means, requests=REQUESTS)


def test_guidellm(tmp_path: Path) -> None:
    guidellm = program("guidellm", "guidellm")
    with served(tmp_path) as (url, tokenizer):
        call(
            *(guidellm, "run", "--backend", f"kind=openai_http,target={url},model=twin"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={ISL},output_tokens={OSL}"),
            *("--profile", "kind=constant,rate=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            cwd=tmp_path,
        )
        (found,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
        names = ("prompt_token_count", "output_token_count", "inter_token_latency_ms")
        names += ("request_latency", "time_to_first_token_ms")
        mean = {name: found["metrics"][name]["successful"]["mean"] for name in names}
        assert (mean["prompt_token_count"], mean["output_token_count"]) == (ISL, OSL)
        compare(
            "guidellm",
            url,
            tpot=mean["inter_token_latency_ms"],
            e2el=1e3 * mean["request_latency"],
            ttft=mean["time_to_first_token_ms"],
            requests=REQUESTS,
        )


SDK = f"""
import asyncio, json, statistics, sys, time
from openai import AsyncOpenAI

async def ask(client, number):
    await asyncio.sleep(0.5 * number)
    begin, times = time.perf_counter(), []
    stream = await client.chat.completions.create(
        model="twin", messages=[{{"role": "user", "content": f"{{number}} " + "word " * 1500}}],
        max_tokens={OSL}, stream=True, stream_options={{"include_usage": True}},
        extra_body={{"ignore_eos": True}})
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
        usage = chunk.usage
    assert usage.completion_tokens == len(times) == {OSL}
    return times[0] - begin, (times[-1] - times[0]) / {OSL - 1}, times[-1] - begin

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="sk-none", max_retries=0)
    await client.models.list()
    rows = await asyncio.gather(*(ask(client, number) for number in range({REQUESTS})))
    print(json.dumps([1e3 * statistics.mean(column) for column in zip(*rows)]))

asyncio.run(main())
"""


def test_the_openai_sdk(tmp_path: Path) -> None:
    python = program("openai", "python")
    with served(tmp_path) as (url, _):
        ttft, tpot, e2el = json.loads(call(python, "-c", SDK, f"{url}/v1", cwd=tmp_path))
        compare("openai SDK", url, tpot=tpot, e2el=e2el, ttft=ttft, requests=REQUESTS)


def test_a_litellm_proxy_before_two_twins(tmp_path: Path) -> None:
    litellm = program("openai", "litellm")
    (tmp_path / "clients.yaml").write_text(SCENARIO + "cluster: {replicas: 2}\n")
    options = "--replica-ports", "--port", "0", "--served-model-name", "twin"
    with (
        twin(str(tmp_path / "clients.yaml"), *options, ports=2) as (urls, _),
        proxy(litellm, urls, tmp_path) as address,
    ):
        python = program("openai", "python")
        _, _, e2el = json.loads(call(python, "-c", SDK, address, cwd=tmp_path))
        reports = [get(f"{url}/report") for url in urls]
        counts = [report["completed"] for report in reports]
        simulated = float(np.average([one["mean_e2el_ms"] for one in reports], weights=counts))
        print(f"\nlitellm: {counts} requests; E2EL {e2el:.1f} ms, simulated {simulated:.1f}")
        assert sum(counts) == REQUESTS
        assert min(counts) > 3
        assert e2el > simulated  # by what the proxy takes, which is the machine's affair


@contextmanager
def proxy(litellm: str, urls: Any, folder: Path) -> Iterator[str]:
    """Run a litellm proxy that shuffles requests over some servers; give its address."""
    models = [
        {
            "model_name": "twin",
            "litellm_params": {
                "model": "hosted_vllm/twin",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in urls
    ]
    config = {"model_list": models, "general_settings": {"master_key": "sk-none"}}
    (folder / "litellm.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [litellm, "--config", "litellm.json", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "litellm.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            for _ in range(240):
                try:
                    get(f"http://127.0.0.1:{port}/health/liveliness")
                    break
                except OSError:
                    assert process.poll() is None, (folder / "litellm.log").read_text()[-2000:]
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(30)
