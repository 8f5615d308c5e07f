"""Load generators and a proxy that people use, against `headway serve` (make test-clients)."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from tests.support.clients import (
    GIVEN,
    HARNESS,
    ISL,
    OPENAI,
    OSL,
    REQUESTS,
    SCENARIO,
    call,
    compare,
    get,
    program,
    served,
)
from tests.support.twins import twin

pytestmark = pytest.mark.clients


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
        compare("vllm bench serve", url, REQUESTS, **means)


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
        compare("AIPerf", url, REQUESTS, **means)


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
            *("guidellm", url, REQUESTS),
            tpot=mean["inter_token_latency_ms"],
            e2el=1e3 * mean["request_latency"],
            ttft=mean["time_to_first_token_ms"],
        )


INFERENCE_PERF = {
    "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": 2, "duration": 15}]},
    "api": {"type": "completion", "streaming": True},
    "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": False}},
    "storage": {"local_storage": {"path": "found"}},
}


def test_inference_perf(tmp_path: Path) -> None:
    """It wants Python 3.12."""
    inference_perf = program("inference-perf", "inference-perf")
    with served(tmp_path) as (url, tokenizer):
        lengths = {
            f"{name}_distribution": {"min": n, "max": n, "mean": n, "std_dev": 0, "total_count": 30}
            for name, n in (("input", ISL), ("output", OSL))
        }
        more = {
            "server": {"type": "vllm", "model_name": "twin", "base_url": url, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
            "data": {"type": "random", **lengths},
        }
        (tmp_path / "config.json").write_text(json.dumps(INFERENCE_PERF | more))
        call(inference_perf, "--config_file", "config.json", cwd=tmp_path, offline=True)
        found = json.loads((tmp_path / "found" / "summary_lifecycle_metrics.json").read_text())
        names = {
            "tpot": "time_per_output_token",
            "e2el": "request_latency",
            "ttft": "time_to_first_token",
        }
        latency = found["successes"]["latency"]
        means = {key: 1e3 * latency[name]["mean"] for key, name in names.items()}
        compare("inference-perf", url, found["successes"]["count"], **means)


def test_evalscope(tmp_path: Path) -> None:
    evalscope = program("evalscope", "evalscope")
    with served(tmp_path) as (url, tokenizer):
        call(
            *(evalscope, "perf", "--url", f"{url}/v1/chat/completions", "--api", "openai"),
            *("--model", "twin", "--dataset", "random", "--tokenizer-path", str(tokenizer)),
            *("--number", str(REQUESTS), "--parallel", "4", "--stream", "--prefix-length", "0"),
            *("--min-tokens", str(OSL), "--max-tokens", str(OSL), "--outputs-dir", "found"),
            *("--min-prompt-length", str(ISL), "--max-prompt-length", str(ISL)),
            *("--extra-args", '{"ignore_eos": true}', "--no-test-connection"),
            cwd=tmp_path,
            offline=True,
        )
        (path,) = (tmp_path / "found").rglob("benchmark_summary.json")
        found = json.loads(path.read_text())
        assert found["Avg Output Tokens"] == OSL
        assert found["Avg Input Tokens"] == pytest.approx(ISL, rel=1e-3)  # drawn as text
        means = {key: found[f"Avg {key.upper()} (ms)"] for key in ("tpot", "ttft")}
        compare("evalscope", url, REQUESTS, e2el=1e3 * found["Avg Latency (s)"], **means)


LOCUST = f"""
from locust import HttpUser, constant_pacing, task

class Chat(HttpUser):
    wait_time = constant_pacing(1)

    @task
    def ask(self):
        said = [{{"role": "user", "content": "word " * {ISL}}}]
        body = {{"model": "twin", "messages": said, "max_tokens": {OSL}, "ignore_eos": True}}
        self.client.post("/v1/chat/completions", json=body)
"""


def test_locust(tmp_path: Path) -> None:
    locust = program("locust", "locust")
    (tmp_path / "locustfile.py").write_text(LOCUST)
    with served(tmp_path) as (url, _):
        out = call(
            *(locust, "--headless", "--host", url, "--users", "2", "--spawn-rate", "2"),
            *("--run-time", "12s", "--stop-timeout", "10", "--json", "--only-summary"),
            cwd=tmp_path,
        )
        (found,) = json.loads(out)
        assert found["num_failures"] == 0
        count = found["num_requests"]
        compare("locust", url, count, e2el=found["total_response_time"] / count)


def test_a_litellm_proxy_before_two_twins(tmp_path: Path) -> None:
    litellm = program("openai", "litellm")
    (tmp_path / "clients.yaml").write_text(SCENARIO + "cluster: {replicas: 2}\n")
    options = "--replica-ports", "--port", "0", "--served-model-name", "twin"
    with (
        twin(str(tmp_path / "clients.yaml"), *options, ports=2) as (urls, _),
        proxy(litellm, urls, tmp_path) as address,
    ):
        python = program("openai", "python")
        given = address.removesuffix("/v1"), str(REQUESTS), str(OSL)
        _, _, e2el = json.loads(call(python, "-c", GIVEN + OPENAI + HARNESS, *given, cwd=tmp_path))
        reports = [get(f"{url}/report") for url in urls]
        counts = [report["completed"] for report in reports]
        simulated = float(np.average([one["median_e2el_ms"] for one in reports], weights=counts))
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
