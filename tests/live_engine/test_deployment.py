"""What `--deploy` writes is taken by the real `vllm serve`, by its parser: it asks for GPUs."""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.deploy.deployment import deployment
from simulator import load_scenario
from tests.support.live_vllm import command, environment

pytestmark = pytest.mark.engine

WORKLOAD = "workload: {num_prompts: 10, request_rate: 1, input_len: 100, output_len: 10}\n"
SCENARIOS = {
    "defaults": "model: meta-llama/Llama-3.1-8B\ngpu: H100-80GB\nengine: vllm\n",
    "small and by priority": """
model: llama-3-8b
gpu: A100-80GB
engine:
  name: vllm
  scheduling_policy: priority
  max_num_seqs: 64
  max_num_batched_tokens: 16384
  max_model_len: 8192
  block_size: 32
  num_gpu_blocks_override: 9000
  gpu_memory_utilization: 0.85
  long_prefill_token_threshold: 1024
  enable_prefix_caching: false
  enable_chunked_prefill: false
  async_scheduling: false
""",
    "Headway's policy": """
model: llama-3-8b
gpu: A100-80GB
engine: {name: vllm, scheduling_policy: {policy: sjf, by: hint, ageing: 20}}
predictor: {kind: oracle}
""",
    "a MoE in eight bits on eight GPUs": """
model: mixtral-8x7b
gpu: {name: H100-80GB, count: 8}
engine:
  name: vllm
  tensor_parallel_size: 2
  data_parallel_size: 4
  enable_expert_parallel: true
  quantization: fp8
  kv_cache_dtype: fp8
""",
    "prefill and decode apart": """
model: llama-3-8b
gpu: {name: H100-80GB, count: 2}
engine: {name: vllm, tensor_parallel_size: 2}
cluster:
  kv_transfer: {}
  groups: {prefill: {kv_role: kv_producer, replicas: 2}, decode: {kv_role: kv_consumer}}
""",
    "two kinds that scale": """
model: llama-3-70b
gpu: {name: H100-80GB, count: 4}
engine: {name: vllm, tensor_parallel_size: 4, dtype: bfloat16}
cluster:
  router: session_affinity
  groups:
    old: {replicas: 1, gpu: {name: A100-80GB, count: 4}, engine: {max_num_seqs: 64}}
    new: {replicas: 1}
  autoscaling: {group: new, max_replicas: 4}
""",
}
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

def taken(words):
    args = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(words)
    validate_parsed_serve_args(args)
    return {"model": args.model_tag, "max_num_seqs": args.max_num_seqs}

found = []
for words in json.load(sys.stdin):
    try:
        found.append(taken(words))
    except (Exception, SystemExit) as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""
"""As `vllm serve` parses its command line; a line that is refused gives the reason in its place."""


def parsed(lines: list[list[str]]) -> list[Any]:
    done = subprocess.run(
        command("python", "-c", PARSE),
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines_of(files: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what each file has a server started with: a model and what follows it."""
    for line in files["vllm_serve.sh"].splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield "vllm_serve.sh", words[words.index("serve") + 1 :]
    for manifest in yaml.safe_load_all(files["kubernetes.yaml"]):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            yield "kubernetes.yaml", container["args"]
    for name in sorted(name for name in files if name.startswith("llm-d-values")):
        values = yaml.safe_load(files[name])
        for part in ("prefill", "decode"):
            for container in values[part].get("containers", ()):
                yield name, container["args"]


def test_every_command_line_is_taken(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Model and seats arrive as the scenario says; a line with a wrong option is refused."""
    told: list[tuple[str, str, list[str]]] = []
    models: dict[str, str] = {}
    for number, (name, text) in enumerate(SCENARIOS.items()):
        path = tmp_path / f"s{number}.yaml"
        path.write_text(text + WORKLOAD)
        scenario = load_scenario(path)
        models[name] = scenario.model
        files = {file: data.decode() for file, data in deployment(scenario).items()}
        told += [(name, file, words) for file, words in lines_of(files)]
        assert {file for case, file, _ in told if case == name} > {
            "vllm_serve.sh",
            "kubernetes.yaml",
        }
    *found, refused, wrong = parsed(
        [*(words for *_, words in told), ["m", "--no-such-option"], ["m", "--max-num-seqs", "few"]]
    )
    assert isinstance(refused, str)
    assert isinstance(wrong, str)
    assert not [
        (name, file, shlex.join(words), why)
        for (name, file, words), why in zip(told, found, strict=True)
        if isinstance(why, str)
    ]
    for (name, _, words), taken in zip(told, found, strict=True):
        assert taken["model"] == models[name]
        assert str(taken["max_num_seqs"]) == words[words.index("--max-num-seqs") + 1]
    files_of = {name: len({file for case, file, _ in told if case == name}) for name in SCENARIOS}
    show(
        f"vllm serve takes what --deploy writes: {len(told)} command lines\n"
        + "\n".join(f"{name:36}{count} files" for name, count in files_of.items())
    )
