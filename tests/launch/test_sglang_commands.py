"""Commands of SGLang that draft, and what sizes a KV cache by the memory of a GPU."""

import pytest

from headway.cli.main import main
from simulator.launch.keys import CHAIN, EAGLE_SIZES, TREE, LaunchCommand, read_launch
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from simulator.util.errors import HeadwayError

NEXTN = "sglang serve --model m --speculative-algorithm NEXTN"
LLAMA = "sglang serve --model meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("command", "method", "sizes"),
    [
        (f"{LLAMA} --speculative-algorithm EAGLE3 --speculative-draft-model a/b", "eagle3", TREE),
        (f"{LLAMA} --speculative-algorithm eagle --speculative-draft-model a/b", "eagle", TREE),
        (f"{LLAMA} --speculative-algo EAGLE --speculative-draft-model a/NextN", "mtp", TREE),
        (NEXTN, "mtp", CHAIN),
        (
            f"{NEXTN} --speculative-num-steps 2 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 7",
            "mtp",
            (2, 1, 3),
        ),
    ],
)
def test_drafts_of_sglang_have_its_sizes(command, method, sizes):
    """As `_auto_choose_speculative_params` and `_handle_eagle_family` of 0.5.23."""
    launch = read_launch(command)
    drafts = launch.engine["speculative_config"]
    assert drafts["method"] == method
    assert tuple(drafts[name] for name in EAGLE_SIZES) == sizes
    assert drafts.get("model") == (None if method == "mtp" else "a/b")
    assert "acceptance: typical: supposed" in launch.lines()[0]


def test_sizes_without_an_algorithm_draft_nothing():
    launch = read_launch(f"{LLAMA} --speculative-num-steps 3 --speculative-attention-mode decode")
    assert "speculative_config" not in launch.engine
    assert launch.lines()[1].endswith("decisions: sizes without --speculative-algorithm")


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("vllm serve Qwen/Qwen3-8B --kv-cache-memory-bytes 9G", "num_gpu_blocks_override", 4096),
        (f"{LLAMA} --max-total-tokens 6400 --page-size 64", "num_gpu_blocks_override", 100),
        (f"{LLAMA} --max-total-tokens 9000000", "num_gpu_blocks_override", None),
        (
            f"{LLAMA} --max-total-tokens 8000 --enable-hicache --hicache-ratio 3",
            "kv_offloading_size",
            (24_000 + 1.5) * 2**17 / 2**30,
        ),
        (f"{LLAMA} --hicache-ratio 3", "kv_offloading_size", None),
    ],
)
def test_a_command_sizes_the_cache_of_its_gpu(command, key, value, tmp_path):
    """Qwen3-8B has 144 KiB a token, Llama 128; what a run takes is what `init` writes."""
    scenario = load_scenario({"gpu": "H100"}, [LaunchCommand(command)])
    assert getattr(scenario.engine, key) == value
    assert main(["init", str(tmp_path / "s.yaml"), "--yes", "--command", command]) == 0
    assert getattr(load_scenario(tmp_path / "s.yaml").engine, key) == value


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("sglang serve --model m --speculative-algorithm NGRAM", "NGRAM is not simulated: EAGLE"),
        (
            "sglang serve --model m --speculative-algo EAGLE3",
            "needs --speculative-draft-model-path",
        ),
        (f"{NEXTN} --speculative-num-steps 3", "needs all of --speculative-num-steps, --spec"),
        (f"{NEXTN} --speculative-num-draft-tokens 3", "needs all of"),
        (f"{NEXTN} --speculative-num-steps 3 --speculative-eagle-topk 2", "needs all of"),
    ],
)
def test_drafts_that_start_no_server_are_refused(command, what):
    with pytest.raises(HeadwayError) as raised:
        read_launch(command)
    (line,) = raised.value.messages
    assert line.startswith("--command: --speculative-algorithm: ")
    assert what in line


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("sglang serve --model m --tp 4 --ep 4", True),
        ("sglang serve --model m --tp 4 --ep 1", None),
        ("sglang serve --model m --tp 4 --enable-ep-moe", True),
        ("trtllm-serve m --tp_size 8 --ep_size 8", True),
    ],
)
def test_experts_in_as_many_parts_as_tensors(command, parts):
    assert read_launch(command).engine.get("enable_expert_parallel") == parts


def test_other_parts_of_experts_are_refused():
    with pytest.raises(HeadwayError, match=r"--ep 2: is not simulated: experts in 2 parts on 4 G"):
        read_launch("sglang serve --model m --ep 2 --tp 4")


def test_options_of_older_releases_are_read():
    """SGLang's of 0.4 and 0.5, as published; vLLM's of 0.9 where that is the release."""
    lines = read_launch("sglang serve --model m --cuda-graph-max-bs 8 --stream-output").lines()
    assert "--cuda-graph-max-bs 8 is not simulated: sizes of CUDA graphs" in lines[0]
    assert lines[1].endswith("decisions: --stream-output")
    old = "vllm serve m --enable-reasoning --num-scheduler-steps 1"
    assert "--enable-reasoning" in read_launch(old, "0.9.2").lines()[0]
    with pytest.raises(HeadwayError, match=r"--enable-reasoning: vLLM 0\.10\.0 has no such option"):
        read_launch(old, "0.10.0")


def test_variables_of_an_engine_are_named_without_their_values():
    launch = read_launch("VLLM_API_KEY=secret HF_TOKEN=x vllm serve m")
    assert launch.lines() == ["--command: variables are not read: VLLM_API_KEY"]


def test_fewer_requests_leave_more_of_the_memory_to_the_cache():
    """`handle_gpu_memory_settings` reserves 2 MiB for each request of the largest CUDA graph."""
    shares = [
        load_scenario({"gpu": "H100"}, [LaunchCommand(LLAMA + options)]).engine
        for options in ("", " --max-running-requests 16")
    ]
    usual, fewer = (81_101 * (1 - engine.gpu_memory_utilization) for engine in shares)
    assert usual - fewer == pytest.approx(2 * (256 - 16), abs=82)  # shares have three digits


def test_engines_behind_the_controller_are_replicas(tmp_path, capsys):
    """`round_robin_scheduler` of DataParallelController: they share nothing else."""
    command = f"{LLAMA} --dp-size 4 --load-balance-method round_robin"
    scenario = load_scenario({"gpu": "H100"}, [LaunchCommand(command)])
    assert (scenario.cluster.replicas, scenario.cluster.router.name) == (4, "round_robin")
    assert scenario.gpu.count == scenario.engine.data_parallel_size == 1
    assert main(["init", str(tmp_path / "s.yaml"), "--yes", "--command", command]) == 0
    assert "4 x H100-80GB (4 replicas of TP 1)" in capsys.readouterr().out
    assert load_scenario(tmp_path / "s.yaml").cluster.replicas == 4
    raw = {"gpu": "H100", "cluster": {"replicas": 2, "router": "random"}}
    other = load_scenario(raw, [LaunchCommand(command)]).cluster
    assert (other.replicas, other.router.name) == (4, "random")
    with pytest.raises(HeadwayError, match=r"--enable-dp-attention: is not simulated") as raised:
        read_launch(f"{LLAMA} --dp 4 --enable-dp-attention")
    assert len(raised.value.messages) == 1


@pytest.mark.parametrize(
    ("gpu", "options", "page"),
    [
        ("H100", "", 1),
        ("B200", "", 64),
        ("B200", "--page-size 32", 32),
        ("B200", "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b", 1),
    ],
)
def test_pages_are_as_long_as_the_kernels_take(gpu, options, page):
    """TensorRT-LLM's are the default on Blackwell, but with a tree of drafts."""
    scenario = load_scenario({"gpu": gpu}, [LaunchCommand(f"{LLAMA} {options}")])
    assert settled(scenario) == page
    command = LaunchCommand("sglang serve --model deepseek-ai/DeepSeek-V3.2 --tp 8")
    assert settled(load_scenario({"gpu": "H200"}, [command])) == 64


def settled(scenario):
    (spec,) = engine_specs(scenario).values()
    return spec.engine.block_size


def test_the_nodes_of_one_server_are_no_replicas():
    manifest = """kind: StatefulSet
spec:
  replicas: {}
  template:
    spec:
      containers:
        - command: [sglang, serve, --model, m, --tp, "16", --nnodes, "2"]
"""
    assert len(read_launch(manifest.format(2)).lines()) == 1
    told = "--command: 1 of the manifest's 3 replicas is simulated: cluster.replicas"
    assert read_launch(manifest.format(6)).lines()[0] == told
