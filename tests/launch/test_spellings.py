"""Launch commands as people write them: scripts, containers, manifests, calls of Python."""

import json
import re
from pathlib import Path

import pytest

from headway.cli.main import main
from simulator.launch.keys import LaunchCommand, read_launch
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

SCRIPT = """#!/bin/bash
MODEL=${MODEL:-m}
SEQS=8
EXTRA="--enforce-eager --port 1"
exec vllm serve "$MODEL" \\
  --max-num-seqs ${SEQS} $EXTRA  # it's enough
"""
KUBERNETES = """kind: Pod
spec:
  containers:
  - image: vllm/vllm-openai:v0.30.0-cu129
    command: ["/bin/sh", "-c"]
    args:
    - >
      vllm serve m --max-num-seqs $(SEQS)
      --enforce-eager
    env:
    - {name: SEQS, value: "8"}
"""
COMPOSE = """services:
  llm:
    image: vllm/vllm-openai
    command: ["${MODEL:-m}", --max-num-seqs=8, --enforce-eager]
"""
CALL = """from vllm import LLM
SEQS = 8
llm = LLM("m", max_num_seqs=SEQS, enforce_eager=True, quantization=None)
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (SCRIPT, None),
        (KUBERNETES, "0.30.0"),
        (COMPOSE, None),
        (CALL, None),
        (json.dumps(["vllm", "serve", "m", "--max-num-seqs", "8", "--enforce-eager"]), None),
        ("docker run -e A=b vllm/vllm-openai m --max-num-seqs 8 --enforce-eager", None),
        (
            "docker run --entrypoint vllm docker.io/vllm/vllm-openai:v0.31.0-cu130 serve m "
            "--max-num-seqs 8 --enforce-eager",
            "0.31.0",
        ),
        ("python3 -m vllm.entrypoints.cli.main serve m --max-num-se 8 --enforce-e", None),
    ],
    ids=["script", "kubernetes", "compose", "call", "words", "docker", "entrypoint", "short"],
)
def test_a_command_is_read_as_people_write_it(text, version, tmp_path):
    file = tmp_path / "the launch"
    file.write_text(text)
    for given in (text, str(file)):
        launch = read_launch(given)
        engine = {"name": "vllm", "max_num_seqs": 8, "enforce_eager": True}
        assert launch.model == "m"
        assert launch.engine == engine | ({"version": version} if version else {})


def test_sglang_reads_a_file_of_options_and_shortened_ones(tmp_path, monkeypatch):
    """ConfigArgumentMerger of 0.5.23: what the command says goes over the file."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "model-path: m\ntp_size: 2\nchunked-prefill-size: 4096\nenable-metrics: false\n"
    )
    launch = read_launch("python -m sglang.launch_server --config s.yaml --tensor-par 4")
    assert launch.model == "m"
    keys = {"tensor_parallel_size": 4, "max_num_batched_tokens": 4096}
    assert launch.engine == {"name": "sglang"} | keys
    engine = read_launch('sgl.Engine(model_path="m", tp_size=4, disable_radix_cache=False)').engine
    assert engine == {"name": "sglang", "tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("gpu", "tokens", "served"),
    [
        ("H100", 16384, 8192),
        ("A100-80GB", 8192, 2048),
        ("L40S", 8192, 2048),
        ("B200", 16384, 16384),
    ],
)
def test_a_call_of_llm_has_the_sizes_of_an_offline_engine(gpu, tokens, served, tmp_path):
    """EngineArgs.get_batch_defaults: UsageContext.LLM_CLASS."""

    def load(command, *sets):
        return load_scenario({"gpu": "T4"}, [LaunchCommand(command), f"gpu={gpu}", *sets]).engine

    call = 'LLM(model="Qwen/Qwen3-8B")'
    assert load(call).max_num_batched_tokens == tokens
    assert load("vllm serve Qwen/Qwen3-8B").max_num_batched_tokens == served
    assert load(call, "engine.max_num_batched_tokens=99").max_num_batched_tokens == 99
    file = tmp_path / "s.yaml"
    assert main(["init", str(file), "--yes", "--gpu", gpu, "--command", call]) == 0
    assert load_scenario(file).engine.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("vllm serve m -tp2", "-tp2: vllm takes it with a space: -tp 2"),
        ("vllm serve m --max-num-s 2", "--max-num-s: may be --max-num-scheduled-tokens or "),
        ('LLM(model="m"', "is no Python"),
        ("LLM(model=name)", "LLM: model=name: is no literal"),
        ('LLM("m", **options)', "LLM: **=options: is no literal"),
        ('LLM("a")\nLLM("b")', "has 2 calls"),
        ('LLM("m", max_model_len="8k")', "--max-model-len: must be a whole number in Python"),
        ('{"model": "m", "max_num_batched_tokens": "16K"}', "must be a whole number in Python"),
        ('{"model": "m", "max_num_se": 3}', "--max-num-se: is no option of vllm"),
        ('["vllm", "serve"', "is no JSON"),
        ("launch.sh", "launch.sh: no such file"),
        ("sglang serve m --config none.yaml", "none.yaml: no such file"),
    ],
)
def test_what_is_misspelled_is_one_line(command, what):
    with pytest.raises(HeadwayError) as raised:
        read_launch(command)
    (line,) = raised.value.messages
    assert what in line


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--kv-cache-dtype int4", "int4: vLLM 0.11.2 has none of that name: auto, bfloat16, fp8"),
        ("--kv-cache-dtype fp8_inc", "--kv-cache-dtype fp8_inc: is not simulated"),
    ],
)
def test_values_that_a_release_does_not_have_are_refused(options, why):
    with pytest.raises(HeadwayError, match=re.escape(why)):
        read_launch(f"vllm serve m {options}", "0.11.2")


@pytest.mark.parametrize(
    ("script", "seqs"),
    [
        ("#!/bin/bash\nvllm serve M --max-num-seqs 64\necho done", 64),
        ("vllm serve M \\\n  --max-num-seqs 64 \\\n  --enforce-eager\nsleep 1\n", 64),
        ("vllm serve M\n\n  --max-num-seqs 64\nwait", 64),
        ("vllm serve M --speculative-config '{\"method\": \"ngram\",\n"
         "\"num_speculative_tokens\": 3}' --max-num-seqs 64\necho", 64),
    ],
)  # fmt: skip
def test_an_end_of_a_line_ends_a_command(script: str, seqs: int) -> None:
    """Unless an option follows, or the shell joins the lines."""
    launch = read_launch(script)
    assert (launch.model, launch.engine["max_num_seqs"]) == ("M", seqs)


@pytest.mark.parametrize(
    ("manifest", "replicas"),
    [
        ("apiVersion: v1\nspec: {{replicas: 2, a: {{spec: {{containers: [{one}]}}}}}}", 2),
        ("services:\n  a: {{deploy: {{replicas: 4}}, {rest}}}", 4),
        ("services:\n  a: {{{rest}}}", 1),
    ],
)  # fmt: skip
def test_replicas_of_a_manifest_are_told(manifest: str, replicas: int) -> None:
    rest = "image: 'vllm/vllm-openai:v0.24.0', command: [--model, M]"
    launch = read_launch(manifest.format(rest=rest, one=f"{{{rest}}}"))
    told = f"1 of the manifest's {replicas} replicas is simulated: cluster.replicas"
    assert launch.told == ([told] if replicas > 1 else [])


POD = "apiVersion: v1\nspec: {{containers: [{{{container}, env: [{{name: LEN, {given}}}]}}]}}"
COMPOSE = "services:\n  a: {{{container}, environment: {given}}}"


@pytest.mark.parametrize(
    ("manifest", "given", "longest"),
    [
        (POD, "value: '4096'", 4096),
        (POD, "valueFrom: {configMapKeyRef: {name: c, key: len}}", None),
        (COMPOSE, "{LEN: 4096}", 4096),
        (COMPOSE, "{LEN: }", None),
        (COMPOSE, "[LEN=4096]", 4096),
        (COMPOSE, "[LEN]", None),
    ],
)
def test_a_variable_whose_value_is_elsewhere_has_none(
    manifest: str, given: str, longest: int | None
) -> None:
    """An option is not left out for it."""
    container = "image: 'vllm/vllm-openai:v0.24.0', args: [--model, M, --max-model-len, $(LEN)]"
    text = manifest.format(container=container, given=given)
    if longest is not None:
        assert read_launch(text).engine["max_model_len"] == longest
        return
    with pytest.raises(HeadwayError, match=r"--max-model-len: must be a number.*, not '\$\(LEN\)'"):
        read_launch(text)


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve deepseek-v3 -tp 8 --eplb-config '{\"num_redundant_experts\": 32}'",
        "vllm serve deepseek-v3 -dp 8 --eplb-config.num_redundant_experts 32",
        "sglang serve --model-path deepseek-v3 --tp 8 --ep-num-redundant-experts 32",
    ],
)
def test_copies_of_experts_are_told_with_their_bytes(command: str) -> None:
    """4 x 58 layers x 44 MB."""
    what = "4 more experts on each GPU take 9.5 GiB, which is not counted"
    assert what in read_launch(command).told
    none = read_launch(f"{command} --tensor-parallel-size 0").told  # refused where it is checked
    assert what not in none
    dense = read_launch(command.replace("deepseek-v3", "llama-3-8b")).told
    assert not any("experts on each GPU" in line for line in dense)


@pytest.mark.parametrize("nodes", [0, 2])
def test_nodes_of_a_command_are_no_replicas_of_a_manifest(nodes: int) -> None:
    assert read_launch(f"vllm serve M --nnodes {nodes}").told == []


def test_partial_prefills_are_refused_as_by_vllm() -> None:
    for option in ("--max-num-partial-prefills", "--max-long-partial-prefills"):
        with pytest.raises(HeadwayError, match="Concurrent Partial Prefill is not supported"):
            read_launch(f"vllm serve M {option} 2", "0.14.0")
        assert read_launch(f"vllm serve M {option} 1", "0.14.0").told == []


def test_whole_prompts_of_sglang_need_no_long_step() -> None:
    command = LaunchCommand("sglang serve --model-path llama-3.1-8b --chunked-prefill-size -1")
    workload = {"num_prompts": 2, "request_rate": 1, "input_len": 9000, "output_len": 2}
    scenario = load_scenario({"gpu": {"name": "H100"}, "workload": workload}, [command])
    assert scenario.engine.enable_chunked_prefill is False


def test_options_of_drafts_went_before_the_releases_that_are_known() -> None:
    """By the wheels of vLLM 0.8.2 and 0.8.3."""
    with pytest.raises(HeadwayError) as told:
        read_launch("vllm serve M --speculative-model D --num-speculative-tokens 3")
    assert str(told.value).count("has no such option: it went after 0.8.2") == 2


@pytest.mark.parametrize(
    ("option", "version", "keys"),
    [
        ("--disable-prefix-caching", None, {"enable_prefix_caching": False}),
        ("--enable_hybrid_kv_cache_manager", None, {"disable_hybrid_kv_cache_manager": False}),
        ("--disable-log-requests", None, {}),
        ("--disable-log-requests", "0.16.0", {"version": "0.16.0"}),
        ("--hf-token hf_x --grpc --middleware a.b", None, {}),
        ("--hf-token --allowed-origins '[\"*\"]'", None, {}),
        ("--device-memory-utilization 0.8", None, {"gpu_memory_utilization": 0.8}),
    ],
)
def test_other_names_of_options_are_read_as_vllm_reads_them(option, version, keys) -> None:
    """`EnableDisableAction` of vLLM 0.33; `--hf-token` may have a value, `--middleware` one."""
    launch = read_launch(f"vllm serve {option} --port 1 m", version)
    assert (launch.model, launch.engine) == ("m", {"name": "vllm"} | keys)


def test_pairs_of_options_came_with_0_33() -> None:
    for command, version, why in (
        ("vllm serve m --disable-prefix-caching", "0.32.0", "it came with 0.33"),
        ("vllm serve m --disable-log-requests", "0.32.0", "it went after 0.16"),
        ('LLM("m", disable_prefix_caching=True)', None, "is no option of vllm"),
    ):
        with pytest.raises(HeadwayError, match=why):
            read_launch(command, version)


ARRAYS = """: "${MODEL:=m}"
ARGS=(
  --max-num-seqs ${SEQS:=8}  # seats
)
ARGS+=(--hf-overrides '{"max_position_embeddings": 9}')
vllm serve "$MODEL" "${ARGS[@]}"
"""


def test_arrays_and_defaults_of_a_shell_are_put_in_their_places() -> None:
    launch = read_launch(ARRAYS)
    keys = {"max_num_seqs": 8, "hf_overrides": {"max_position_embeddings": 9}}
    assert (launch.model, launch.engine) == ("m", {"name": "vllm"} | keys)


@pytest.mark.parametrize(
    ("command", "version"),
    [
        ("uv run --with vllm==0.30.0 vllm serve m", "0.30.0"),
        ("pip install 'vllm[audio]==0.25.1' && vllm serve m", "0.25.1"),
        ("pip install 'vllm>=0.25.1' && vllm serve m", None),
    ],
)
def test_a_pinned_package_says_the_release(command: str, version: str | None) -> None:
    assert read_launch(command).engine.get("version") == version


@pytest.mark.parametrize("server", ["vllm serve", "python -m sglang.launch_server"])
def test_a_command_may_be_longer_than_the_name_of_a_file(server: str) -> None:
    """It ended by OSError where no slash was among the first 255 bytes."""
    assert read_launch(f"{server} {'--port 1 ' * 40} --model m").model == "m"


@pytest.mark.parametrize(
    "script",
    [
        "TP=2; vllm serve m -tp $TP",
        "export TP=2;vllm serve m -tp $TP; echo done",
        "vllm serve m -tp 2;",
        "N='a;b'; vllm serve m --served-model-name \"x;y\" -tp 2 ; wait",
    ],
)
def test_a_semicolon_ends_a_command(script):
    """Also one that follows a word without a space."""
    assert read_launch(script).engine == {"name": "vllm", "tensor_parallel_size": 2}
