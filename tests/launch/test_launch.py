"""Launch commands: what a scenario takes from them, and what they are refused for."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.report.vllm_serve import serve_command
from simulator.build.kv_room import engine_sizes
from simulator.launch.keys import LaunchCommand, read_launch
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.model_configs import write_config

SERVE = "vllm serve Qwen/Qwen3-8B"
OFFLOADING = (
    f'{SERVE} --kv-transfer-config \'{{{{"kv_connector": "OffloadingConnector", '
    '"kv_connector_extra_config": {{{}}}}}\''
)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("-tp 2 -pp=2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("--tensor_parallel_size 4", {"tensor_parallel_size": 4}),
        ("--max-model-len 64k", {"max_model_len": 64_000}),
        ("--max-model-len 64K", {"max_model_len": 65_536}),
        ("--max-num-batched-tokens 1.5k", {"max_num_batched_tokens": 1500}),
        ("--max-model-len auto", {"max_model_len": "auto"}),
        ("--max-model-len -1 --max-num-seqs 8", {"max_model_len": "auto", "max_num_seqs": 8}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-async-scheduling --async-scheduling", {"async_scheduling": True}),
        ("--scheduling-policy priority", {"scheduling_policy": "priority"}),
        ("-q fp8", {"quantization": "fp8"}),
        ("--kv-offloading-size 8", {"kv_offloading_size": 8.0}),
        ("--port 9000 --seed 3 -O3 --compilation-config.mode 3", {}),
        ("--api-server-count 4", {"api_server_count": 4}),
        ("--prefix-match-unit 16", {"prefix_match_unit": 16}),
        ("-O0", {"enforce_eager": True}),
        ('--compilation-config \'{"cudagraph_mode": "NONE"}\'', {"enforce_eager": True}),
        ("-cc.cudagraph_mode=NONE", {"enforce_eager": True}),
        ("-cc.cudagraph_mode none", {"enforce_eager": True}),
        ("--compilation-config.cudagraph_mode=0", {"enforce_eager": True}),
        ("--kv-cache-dtype fp8_ds_mla", {"kv_cache_dtype": "fp8"}),
        ("--compilation-config '{\"cudagraph_capture_sizes\": [1, 2]}'", {}),
        ("--enable-lora --lora-modules a=b c=d", {"enable_lora": True}),
        (
            "--language-model-only",
            {"multimodal_config": {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}},
        ),
        ("--limit-mm-per-prompt.video 0", {}),
        ("--no-language-model-only --limit-mm-per-prompt.image 4", {}),
        (
            '--limit-mm-per-prompt \'{"image": 0, "video": 0}\'',
            {"multimodal_config": {"limit_mm_per_prompt": {"image": 0, "video": 0}}},
        ),
    ],
)
def test_options_are_read_as_vllm_reads_them(options, keys):
    engine = read_launch(f"{SERVE} {options}").engine
    engine.pop("hicache_write_policy", None)
    assert engine == {"name": "vllm"} | keys


def test_limits_of_images_in_the_form_before_json():
    """vLLM 0.8.5 takes image=0,video=0 (nullable_kvs), 0.10 JSON alone; Headway took JSON alone."""
    options = "--limit-mm-per-prompt image=0,VIDEO=0"
    limits = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    for one in (options, options.replace(" image", "=image")):
        assert read_launch(f"{SERVE} {one}", "0.9.2").engine["multimodal_config"] == limits
    told = read_launch(f"{SERVE} --limit-mm-per-prompt image=4", "0.8.5").told
    assert told[0].startswith("--limit-mm-per-prompt image=4 is not simulated")
    with pytest.raises(HeadwayError, match=r"image=0,VIDEO=0: vLLM 0\.10\.0 takes JSON alone"):
        read_launch(f"{SERVE} {options}", "0.10.0")
    with pytest.raises(HeadwayError, match=r"must be JSON, as .* not 'image=x'"):
        read_launch(f"{SERVE} --limit-mm-per-prompt image=x", "0.9.2")


def test_dotted_keys_make_one_configuration():
    given = "--speculative-config.method ngram --speculative_config.num_speculative_tokens 4"
    for options in (given, "--spec_method=ngram --spec-tokens 4"):
        drafts = read_launch(f"{SERVE} {options}").engine["speculative_config"]
        assert drafts == {"method": "ngram", "num_speculative_tokens": 4, "acceptance": 0.7}


@pytest.mark.parametrize(
    ("draft", "method"),
    [("yuhuili/EAGLE3-LLaMA3", "eagle3"), ("x/EAGLE-llama", "eagle"), ("m-0.6b", "draft_model")],
)
def test_vllm_knows_eagle_by_the_name_of_its_draft(draft, method):
    given = json.dumps({"model": draft, "num_speculative_tokens": 3})
    launch = read_launch(f"{SERVE} --speculative-config '{given}'")
    assert launch.engine["speculative_config"]["method"] == method
    assert launch.engine["speculative_config"]["model"] == draft


AWQ, GPTQ = ({"quant_method": name, "bits": 4, "group_size": 128} for name in ("awq", "gptq"))
GPTQ_8 = GPTQ | {"bits": 8}
BNB_8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DIFFERS = r"the model config \({}\) does not match"


@pytest.mark.parametrize(
    ("formats", "asked", "word", "why"),
    [
        (AWQ, "fp8", "int4", DIFFERS.format("awq")),
        (AWQ, "gptq", "int4", DIFFERS.format("awq")),
        (AWQ, "awq_marlin", "int4", None),
        (None, "awq", None, "Cannot find the config file for awq"),
        (None, "fp8", "fp8", None),
        (GPTQ_8, "gptq_marlin", "int8", None),
        (BNB_8, "bitsandbytes", "int8", None),
        (NVFP4, "modelopt", "nvfp4", None),
    ],
)
def test_a_command_quantizes_as_its_checkpoint_does(tmp_path, formats, asked, word, why):
    """Headway gave figures of servers that vLLM does not start, and took loaders for formats."""
    path = write_config(tmp_path, quantization_config=formats)
    command = LaunchCommand(f"vllm serve {path.parent} --quantization {asked}")
    with pytest.raises(HeadwayError, match=why) if why else nullcontext():
        scenario = load_scenario(
            {"gpu": "H100-80GB", "cost": {"kind": "roofline"}}, [command], fits=False
        )
        sizes = engine_sizes(scenario.engine, model := load_model(path))
        assert model.weight_dtype(sizes.weight_dtype) == word


@pytest.mark.parametrize(
    ("model", "asked", "version", "why"),
    [
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8", "gptq_marlin", "0.33.0", None),
        ("nvidia/DeepSeek-R1-FP4", "modelopt", "0.33.0", None),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "modelopt_fp4", "0.33.0", None),
        ("RedHatAI/Qwen3-8B-FP8", "compressed-tensors", "0.33.0", None),
        ("someone/Qwen3-8B-AWQ-4bit", "compressed-tensors", "0.33.0", None),
        ("Qwen/Qwen3-8B-AWQ", "fp8", "0.33.0", DIFFERS.format("awq")),
        ("Qwen/Qwen3-8B-AWQ", "compressed-tensors", "0.33.0", DIFFERS.format("awq")),
        ("RedHatAI/Qwen3-8B-FP8", "awq", "0.33.0", DIFFERS.format("fp8")),
        ("openai/gpt-oss-20b", "fp8", "0.18.0", DIFFERS.format("mxfp4")),
        ("openai/gpt-oss-20b", "fp8", "0.33.0", None),
    ],
)
def test_a_loader_changes_no_checkpoint_of_the_hub(model, asked, version, why):
    """From 0.20 on vLLM takes the loader of gpt-oss, whatever is asked for."""
    command = f"vllm serve {model} --quantization {asked}"
    with pytest.raises(HeadwayError, match=why) if why else nullcontext():
        assert "quantization" not in read_launch(command, version).engine


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            "python3 -m sglang.launch_server --model-path m --tp 2 --mem-fraction-static 0.8 "
            "--schedule-policy lpm --page-size 16 --disable-overlap-schedule",
            {
                "tensor_parallel_size": 2,
                "gpu_memory_utilization": 0.8,
                "scheduling_policy": {"policy": "sglang", "order": "lpm"},
                "block_size": 16,
                "async_scheduling": False,
            },
        ),
        (
            "sglang serve --model m --chunked-prefill-size -1 --disable-radix-cache",
            {"enable_chunked_prefill": False, "enable_prefix_caching": False},
        ),
        ("trtllm-serve m --max_batch_size 64", {"max_num_seqs": 64}),
        ("trtllm-serve serve m --tp_size=2", {"tensor_parallel_size": 2}),
    ],
)
def test_other_engines_have_options_of_their_own(command, keys):
    launch = read_launch(command)
    assert launch.model == "m"
    assert {k: v for k, v in launch.engine.items() if k != "name"} == keys


def test_files_of_options_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("v.yaml").write_text("model: m\nmax-num-seqs: 7\nenable-prefix-caching: false\n")
    launch = read_launch("vllm serve --config v.yaml --max-num-seqs 9")
    assert launch.model == "m"
    assert launch.engine == {"name": "vllm", "max_num_seqs": 9, "enable_prefix_caching": False}
    Path("t.yaml").write_text(
        "kv_cache_config: {free_gpu_memory_fraction: 0.8, enable_block_reuse: false}\n"
        "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n"
    )
    engine = read_launch("trtllm-serve m --extra_llm_api_options t.yaml").engine
    assert engine["gpu_memory_utilization"] == 0.8
    assert engine["enable_prefix_caching"] is False
    policy = {"policy": "trtllm", "capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert engine["scheduling_policy"] == policy


KUBERNETES = """apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.19.1
          args: [m, --max-num-seqs, "8"]
        - name: proxy
          command: [nginx]
"""
COMPOSE = """services:
  llm:
    image: vllm/vllm-openai:v0.19.1
    command: --model m --max-num-seqs 8
"""
SHELL = """#!/bin/sh
# starts a server
export X=1
exec vllm serve m \\
  --max-num-seqs 8 > log.txt 2>&1 &
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (KUBERNETES, "0.19.1"),
        (COMPOSE, "0.19.1"),
        (SHELL, None),
        ("docker run -p 8000:8000 vllm/vllm-openai:v0.19.1 --model m --max-num-seqs 8", "0.19.1"),
        ("docker run vllm/vllm-openai-rocm:v0.19.1 --model m --max-num-seqs 8", "0.19.1"),
        ("bash -c 'vllm serve m --max-num-seqs 8'", None),
        (json.dumps({"model": "m", "max_num_seqs": 8, "quantization": None}), None),
    ],
    ids=["kubernetes", "compose", "script", "docker", "rocm", "bash", "keywords"],
)
def test_a_command_is_found_in_what_has_it(text, version, tmp_path):
    file = tmp_path / "launch"
    file.write_text(text)
    for given in (text, str(file)):
        launch = read_launch(given)
        assert (launch.model, launch.engine["max_num_seqs"]) == ("m", 8)
        assert launch.engine.get("version") == version


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("", "is empty"),
        ("nginx -g daemon", "nginx -g: is no command that starts a server"),
        ("vllm bench serve --model m", "vllm bench: is no command that starts a server"),
        ("python -m dynamo.vllm --model m", "python -m dynamo.vllm: is no command that starts"),
        ("vllm serve a b", "names 2 models: a, b"),
        ("vllm serve a --model b", "names 2 models: a, b"),
        ("vllm serve", "names no model; for example 'vllm serve meta-llama/Llama-3.1-8B"),
        ("vllm serve a && vllm serve b", "has 2 commands of servers"),
        ("vllm serve 'a", "no closing quotation"),
        ('{"model": "a"', "is no JSON"),
        (f"{SERVE} --max-num-seqz 4", "--max-num-seqz: is no option of vllm; did you mean"),
        (f"{SERVE} --max-num-seqs x", "--max-num-seqs: must be a whole number, not 'x'"),
        (f"{SERVE} --max-num-seqs", "--max-num-seqs: has no value"),
        (f"{SERVE} --max-model-len 1.5K", "has a decimal before K"),
        (f"{SERVE} --speculative-config '{{\"method\"'", "--speculative-config: must be JSON"),
        (f"{SERVE} --speculative-config '{{\"x\": 1}}'", "x: is no key of it"),
        (f"{SERVE} --speculative-config.method eagle", "num_speculative_tokens: is missing"),
        (OFFLOADING.format('"cpu_bytes_to_use": 8, "block_size": 4'), "block_size: is not simul"),
        (OFFLOADING.format('"cpu_bytes_to_use": "8"'), "OffloadingConnector with cpu_bytes_to_"),
        ("docker run vllm/vllm-openai:v0.19.1 m --spec-method mtp", "it came with 0.22"),
        (f"{SERVE} -cc 3 -cc.mode 3", "-cc.mode: is a key of what is no mapping"),
        (f"{SERVE} --spec-tokens 3 -sc.num_speculative_tokens.x 1", "a key of what is no mapping"),
        (f"{SERVE} -dcp 2", "-dcp 2: is not simulated: a context that GPUs share"),
        (f"{SERVE} --block-size 17", "--block-size 17: vLLM has no attention backend for it"),
        (f"{SERVE} --swap-space 8", "has no such option: it went after"),
        ("docker run vllm/vllm-openai:v0.19.1 m --watermark 0.1", "it came with 0.24"),
        ("sglang serve --model m --dp 2 --load-balance-method total_tokens", "cluster.router has"),
        ("sglang serve --model m --enable-dp-attention", "data-parallel ranks"),
    ],
)
def test_what_is_wrong_is_one_line(command, what):
    with pytest.raises(HeadwayError) as raised:
        read_launch(command)
    (line,) = raised.value.messages
    assert what in line
    assert line.startswith("--command")


def test_what_is_not_simulated_is_told_and_the_rest_listed_once():
    command = f"{SERVE} --enable-dbo --port 1 --no-swa-bounded-replay --api-key x"
    lines = read_launch(command).lines()
    assert len(lines) == 2
    assert "--enable-dbo is not simulated" in lines[0]
    assert lines[1].endswith("time and decisions: --port, --no-swa-bounded-replay, --api-key")


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-tp 2 --max-model-len 16k --max-num-seqs 100 --no-enable-prefix-caching",
        "--watermark 0.1 --prefill-schedule-interval 2 --no-scheduler-reserve-full-isl",
        "--enable-lora --max-loras 4 --no-async-scheduling --generation-config vllm",
    ],
)
def test_a_scenario_writes_the_command_that_it_was_made_of(options):
    def load(command):
        return load_scenario({"gpu": "H100"}, [LaunchCommand(command)])

    first = load(f"{SERVE} {options}")
    assert load(serve_command(first)).engine == first.engine


def test_a_command_takes_the_place_of_a_scenarios_engine():
    raw = {
        "model": "llama-3-8b",
        "gpu": {"name": "H100-80GB", "count": 2},
        "engine": {"version": "0.30", "tensor_parallel_size": 2, "watermark": 0.1},
        "cost": {"profile": "llama-3-8b.h100-tp2.bf16"},
    }
    scenario = load_scenario(raw, [LaunchCommand(SERVE), "engine.max_num_seqs=3"])
    engine = scenario.engine
    assert (scenario.model, scenario.gpu.count, scenario.cost) == ("Qwen/Qwen3-8B", 1, None)
    assert (engine.version, engine.watermark, engine.max_num_seqs) == ("0.30", 0.0, 3)
    with pytest.raises(HeadwayError, match=r"^--command --max-num-seqs 0: engine.max_num_seqs: "):
        load_scenario(raw, [LaunchCommand(f"{SERVE} --max-num-seqs 0")])


def test_verbs_take_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"{SERVE} --max-num-seqs 8 --port 9000"
    assert main(["init", "s.yaml", "--yes", "--command", command]) == 0
    assert load_scenario(Path("s.yaml")).engine.max_num_seqs == 8
    few = ["--set", "workload.num_prompts=5", "--quiet", "--out", "o"]
    assert main(["run", "s.yaml", "--command", command.replace("8 --", "4 --"), *few]) == 0
    assert load_scenario(Path("o/scenario.yaml")).engine.max_num_seqs == 4
    assert main(["memory", "--gpu", "H100", "--command", f"{SERVE} -tp 2"]) == 0
    assert "2 x H100-80GB" in capsys.readouterr().out
    assert main(["init", "t.yaml", "--yes", "--command", SERVE, "--model", "x"]) == 2
    assert main(["memory", "--gpu", "H100"]) == 2


def test_keys_of_an_engine_that_are_not_simulated_say_so():
    """Instead of another key that is spelled alike."""
    raw = {"gpu": "H100", "engine": {"name": "sglang", "dp_size": 2, "enable_dp_attention": True}}
    with pytest.raises(HeadwayError) as raised:
        load_scenario(raw)
    first, second = raised.value.messages
    assert first.endswith(
        "engine.dp_size: SGLang's name of cluster.replicas: without attention in "
        "data-parallel ranks"
    )
    assert "engine.enable_dp_attention: is not simulated: attention in data-parallel" in second


WORKERS = """
apiVersion: leaderworkerset.x-k8s.io/v1
spec:
  leaderWorkerTemplate:
    leaderTemplate:
      spec:
        containers:
          - image: docker.io/vllm/vllm-openai:latest
            command: [sh, -c, "bash multi-node-serving.sh leader; vllm serve M -tp 8"]
    workerTemplate:
      spec:
        containers:
          - image: docker.io/vllm/vllm-openai:latest
            command: [sh, -c, "bash multi-node-serving.sh worker"]
"""


def test_workers_that_run_a_shell_start_no_server() -> None:
    """vLLM's own manifest of a LeaderWorkerSet: an image's entry point does not count there."""
    launch = read_launch(WORKERS)
    assert (launch.model, launch.engine["tensor_parallel_size"]) == ("M", 8)
    assert read_launch("docker run vllm/vllm-openai:latest --model M").model == "M"
    assert read_launch("bash -c 'docker run vllm/vllm-openai:latest --model M'").model == "M"


@pytest.mark.parametrize(
    ("release", "taken"), [("0.10.0", True), ("0.16.0", True), ("0.17.0", False)]
)
def test_an_option_is_taken_until_it_goes(release: str, taken: bool) -> None:
    """arg_utils.py of 0.16.0 has it, of 0.17.0 not."""
    with nullcontext() if taken else pytest.raises(HeadwayError, match="went after 0"):
        read_launch(f"{SERVE} --disable-log-requests", release)


def test_an_option_of_another_engine_is_named_as_this_one_names_it() -> None:
    with pytest.raises(HeadwayError, match="did you mean --mem-fraction-static"):
        read_launch("sglang serve --model-path M --gpu-memory-utilization 0.8")
