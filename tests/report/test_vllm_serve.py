"""The `vllm serve` commands of a scenario."""

import re
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.report.vllm_serve import serve_command
from simulator import load_scenario
from simulator.build.policy_table import PLUGIN
from simulator.launch.keys import read_launch
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import resolve
from simulator.util.yaml_lines import SourceMap
from tests.support.scenarios import ONE_A_SECOND


def test_each_group_gets_the_command_of_its_own_engine(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND
        + """cluster:
  groups:
    small: {replicas: 3}
    big: {gpu: {name: H100-80GB, count: 2}, engine: {tensor_parallel_size: 2, watermark: 0.1}}
    none: {replicas: 0}
"""
    )
    lines = serve_command(load_scenario(path)).splitlines()
    assert [line for line in lines if not line.startswith("vllm")] == [
        "# tiny-test: put its name on Hugging Face here, or its folder",
        "# small: 3, each on 1 A100-80GB",
        "# big: 1, each on 2 H100-80GB",
    ]
    assert ["--watermark 0.1" in line for line in lines if line.startswith("vllm")] == [False, True]
    small, big = (line for line in lines if line.startswith("vllm serve tiny-test "))
    assert "--tensor-parallel-size" not in small
    assert "--tensor-parallel-size 2 " in big


def test_a_context_that_does_not_fit_is_cut(tmp_path: Path):
    """Without it vLLM would not start: 131,072 tokens do not fit beside 8 GB of weights in 22."""
    text = "model: llama-3.1-8b\nengine: {quantization: fp8}\ngpu: {name: %s}\n"
    commands = {}
    for gpu in ("L4", "H100"):
        path = tmp_path / f"{gpu}.yaml"
        path.write_text(text % gpu)
        commands[gpu] = serve_command(load_scenario(path))
    longest = re.search(r"--max-model-len (\d+) ", commands["L4"].splitlines()[-1])
    assert longest is not None
    tokens = 16 * (resolve(load_scenario(tmp_path / "L4.yaml")).num_gpu_blocks - 1)
    assert 0.94 * tokens < int(longest[1]) <= 0.95 * tokens
    assert "the model's 131,072 do not fit in the KV cache" in commands["L4"]
    assert "--max-model-len" not in commands["H100"]


def test_what_a_version_does_anyway_is_not_missing(tmp_path: Path):
    """0.15 has no scheduler_reserve_full_isl that could be set to false."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    command = serve_command(load_scenario(path, ["engine.version=0.15"]))
    assert "scheduler_reserve_full_isl" not in command
    command = serve_command(load_scenario(path, ["engine.scheduler_reserve_full_isl=false"]))
    assert " --no-scheduler-reserve-full-isl" in command


def test_a_policy_of_headway_comes_with_the_command(tmp_path: Path):
    """By the class and the environment that `headway.vllm` has."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    policy = "engine.scheduling_policy={policy: sjf, ageing: 20}"
    command = serve_command(load_scenario(path, [policy])).splitlines()[-1]
    assert command.startswith("""HEADWAY_POLICY='{"policy": "sjf", "ageing": 20}' vllm serve """)
    assert " --scheduler-cls headway.vllm.HeadwayScheduler " in command


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["engine.scheduling_policy=static"],
            "static is a scheduler of its own, which vLLM cannot",
        ),
        (["engine=sglang"], "SGLang's scheduler was simulated, which vLLM cannot have"),
        (
            ["engine.scheduling_policy=sjf", "engine.version=0.19"],
            "sjf comes to vLLM by headway.vllm, which fits vLLM 0.33 and not 0.19",
        ),
    ],
)
def test_a_policy_that_is_given_up_is_told_with_its_reason(tmp_path: Path, capsys, options, why):
    """In the file, and by `run --deploy`, which is not silent about it."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    command = serve_command(load_scenario(path, options))
    assert f"# {why}" in command
    assert ": this is vLLM's fcfs\n" in command
    assert "HEADWAY_POLICY" not in command
    words = [word for option in options for word in ("--set", option)]
    words += ["--out", str(tmp_path / "out"), "--deploy", str(tmp_path / "deploy")]
    assert main(["run", str(path), *words]) == 0
    assert f"warning: vllm_serve.sh: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("policy", [[], ["engine.scheduling_policy=sjf"]])
@pytest.mark.parametrize("name", ["sglang", "tgi", "hf", "vllm-v0"])
def test_another_engine_is_told_and_its_sizes_are_left_out(
    tmp_path: Path, capsys, name: str, policy: list[str]
):
    """What SGLang or a static batch has for itself is no advice for vLLM."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    words = [word for option in [f"engine.name={name}", *policy] for word in ("--set", option)]
    words += ["--set", "engine.tensor_parallel_size=2", "--deploy", str(tmp_path / "deploy")]
    words += ["--out", str(tmp_path / "out")]
    rejects_all = name == "tgi" and not policy  # 200 tokens are less than its longest answer
    assert main(["run", str(path), *words]) == int(rejects_all)
    assert f"warning: vllm_serve.sh: engine {name} was simulated" in capsys.readouterr().err
    command = (tmp_path / "deploy" / "vllm_serve.sh").read_text()
    assert f"# engine {name} was simulated, and this starts vLLM" in command
    assert "--tensor-parallel-size 2" in command
    for size in ("max-num", "block-size", "utilization", "chunked-prefill", "prefix-caching"):
        assert size not in command
    values = (tmp_path / "deploy" / "llm-d-values.yaml").read_text()
    assert "prefix-caching" not in values


@pytest.mark.parametrize(
    ("command", "off"),
    [
        ("sglang serve --model-path M", []),
        ("sglang serve --model-path M --disable-radix-cache", ["prefix-caching"]),
        ("sglang serve --model-path M --chunked-prefill-size -1", ["chunked-prefill"]),
        ("trtllm-serve M", []),
        ("trtllm-serve M --disable_kv_cache_reuse", ["prefix-caching"]),
    ],
)
def test_what_is_off_in_another_engine_is_off_in_vllm(command: str, off: list[str]) -> None:
    """What that engine never has is left to vLLM."""
    engine = read_launch(command).engine
    raw = {"model": "llama-3.1-8b", "gpu": "H100", "engine": engine}
    text = serve_command(check_scenario(raw, SourceMap("s.yaml", {})))
    assert re.findall(r"--no-enable-(\S+)", text) == off
    assert "async-scheduling" not in text


@pytest.mark.parametrize(("branches", "told"), [(1, False), (4, True)])
def test_drafts_of_sglang_have_keys_that_vllm_refuses(branches: int, told: bool) -> None:
    """A chain is vLLM's, too; of a tree a comment says that it is lost."""
    sizes = f"--speculative-num-steps 3 --speculative-eagle-topk {branches}"
    words = f"--speculative-algorithm EAGLE {sizes} --speculative-num-draft-tokens 4"
    engine = read_launch(f"sglang serve --model-path deepseek-v3 --tp 8 {words}").engine
    raw = {"model": "deepseek-v3", "gpu": "H200", "engine": engine}
    text = serve_command(check_scenario(raw, SourceMap("s.yaml", {})))
    assert """'{"method": "mtp", "num_speculative_tokens": 3}'""" in text
    assert ("# vLLM drafts a chain of tokens, no tree" in text) == told


def test_a_policy_of_ones_own_needs_its_module(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    (tmp_path / "mine.py").write_text(
        "class Last:\n    def key(self, one):\n        return -one.arrival\n"
    )
    command = serve_command(load_scenario(path, ["engine.scheduling_policy=mine:Last"]))
    assert "# mine:Last is your own; headway, which runs it, is to be installed" in command
    assert "# mine must be on the server's Python path\n" in command


def test_a_class_for_vllm_is_in_the_command(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    scenario = load_scenario(path)
    engine = scenario.engine.model_copy(
        update={"scheduler": "vllm", "scheduler_cls": "headway.vllm.SJF"}
    )
    command = serve_command(scenario.model_copy(update={"engine": engine}))
    assert " --scheduler-cls headway.vllm.SJF " in command
    assert "not in this command" not in command


def test_a_policy_that_came_by_the_environment_is_in_the_command(monkeypatch) -> None:
    """And one that the scenario names counts in its place."""
    monkeypatch.setenv("HEADWAY_POLICY", '{"policy": "sjf"}')
    for policy, there in (("fcfs", "sjf"), ("fair", "fair")):
        scenario = load_scenario("demo", [f"engine.scheduling_policy={policy}"])
        engine = scenario.engine.model_copy(update={"scheduler_cls": PLUGIN})
        command = serve_command(scenario.model_copy(update={"engine": engine}))
        assert f"""HEADWAY_POLICY='{{"policy": "{there}"}}' vllm serve""" in command


@pytest.mark.parametrize(
    ("version", "given", "told"),
    [
        ("0.33", "0", ""),
        ("0.33", "null", " --prefix-cache-retention-interval None"),
        ("0.33", "64", " --prefix-cache-retention-interval 64"),
        ("0.28", "null", ""),
    ],
)
def test_what_of_a_window_is_cached_is_told(tmp_path: Path, version, given, told):
    path = tmp_path / "s.yaml"
    path.write_text("model: gpt-oss-20b\n")
    keys = [f"engine.version='{version}'", f"engine.prefix_cache_retention_interval={given}"]
    command = serve_command(load_scenario(path, keys))
    assert "retention" not in command if not told else told in command


@pytest.mark.parametrize(
    "options",
    [
        "--enforce-eager --max-model-len 8k",
        "--kv-offloading-size 40",
        "--spec-method ngram --spec-tokens 4",
        "--speculative-config.method eagle --speculative-config.model a/b "
        "--speculative-config.num_speculative_tokens 2",
        "--max-num-queued-reqs 100 --no-enable-prefix-caching --watermark 0.02",
    ],
)
def test_a_command_comes_back_from_its_scenario(options: str):
    """But for what no command says, as how many drafts are accepted."""
    first = read_launch(f"vllm serve meta-llama/Llama-3.1-8B-Instruct {options}")
    scenario = check_scenario(
        {"model": first.model, "gpu": "H100", "engine": first.engine}, SourceMap("s.yaml", {})
    )
    command = serve_command(scenario)
    assert "#" not in command
    again = read_launch(command)
    assert again.model == first.model
    assert again.engine.items() >= first.engine.items()
