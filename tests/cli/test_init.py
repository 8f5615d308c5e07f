"""`headway init`: a first scenario."""

import json
import re
import shlex
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.report.vllm_serve import longest_that_fits
from simulator import run
from simulator.models.load import MODELS
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from tests.support.commands import names
from tests.support.model_configs import write_config


def test_yes_writes_a_scenario_that_runs(folder, capsys):
    """With defaults for all; each key that may be wanted stands there with its default."""
    assert main(["init", "first.yaml", "--yes"]) == 0
    assert capsys.readouterr().out == (
        "written to first.yaml: 1 x H100-80GB, $6.88/h; steps are timed by the profile "
        "llama-3-8b.h100.bf16; try headway run first.yaml\n"
    )
    scenario = load_scenario(Path("first.yaml"))
    assert (scenario.name, scenario.engine.name) == ("first", "vllm")
    assert scenario.slo == ["p99_ttft_ms<=1000"]
    text = Path("first.yaml").read_text()
    for key in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  # {key}: ")]
        shown = line.removeprefix(f"  # {key}: ").partition(" ")[0]
        assert shown == str(getattr(scenario.engine, key)).lower()
    with_all = re.sub("(?m)^  # (?=[a-z_]+: )", "  ", text).replace("0.19.1", "0.33")
    Path("all.yaml").write_text(with_all)
    assert load_scenario(Path("all.yaml")).engine.max_num_seqs == scenario.engine.max_num_seqs
    assert main(["run", "first.yaml", "--set", "workload.num_prompts=20"]) == 0


def test_options_are_what_the_scenario_says(folder):
    """Relative files are found from where the scenario is; a large model gets GPUs enough."""
    Path("log.csv").write_text("t,n,m\n" + "".join(f"{k},{50 + k},{5 + k}\n" for k in range(6)))
    options = ["--model", "llama-3-70b", "--gpu", "H200", "--traffic", "log.csv"]
    options += ["--columns", "arrival=t,prompt=n,output=m", "--slo", "p90_ttft_ms<=700"]
    assert main(["init", "new/own.yaml", *options, "--slo", "goodput>=0.9", "--yes"]) == 0
    scenario = load_scenario(Path("new/own.yaml"))
    assert (scenario.model, scenario.gpu.name, scenario.gpu.count) == ("llama-3-70b", "H200", 2)
    assert scenario.slo == ["p90_ttft_ms<=700", "goodput>=0.9"]
    assert [*make_workload(scenario).prompt_tokens] == [50, 51, 52, 53, 54, 55]
    assert "# 6 requests, prompts of 52 tokens on average" in Path("new/own.yaml").read_text()


@pytest.fixture
def answers(monkeypatch) -> list[str]:
    """What somebody types at the terminal."""
    typed: list[str] = []

    def answer(question: str) -> str:
        print(question)
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return typed


def test_it_asks_for_what_is_not_given(folder, capsys, answers):
    """Nothing is the default; a wrong answer is told, and asked for again."""
    answers += ["no-such-model", "llama-3.1-8b", "", "many", "2.5", "p99_ttft_ms<=800"]
    assert main(["init", "asked.yaml"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "Model [llama-3-8b]: "
    assert told[1].startswith("  model: no file and no shipped model")
    assert [line for line in told if line.startswith("GPU")] == ["GPU [H100-80GB]: "]
    assert "  is neither a number of requests per second nor a file" in told
    scenario = load_scenario(Path("asked.yaml"))
    assert (scenario.model, scenario.workload.generator.request_rate) == ("llama-3.1-8b", 2.5)
    assert scenario.slo == ["p99_ttft_ms<=800"]


def test_what_is_given_is_not_asked(folder, capsys, answers):
    options = ["--model", "llama-3-8b", "--gpu", "L40S", "--rate", "1", "--slo", "goodput>=0.9"]
    assert main(["init", "given.yaml", *options]) == 0
    assert "[" not in capsys.readouterr().out
    assert main(["init", "none.yaml", *options[:4]]) == 2
    assert capsys.readouterr().err == "headway: error: --rate: no answer; nothing was written\n"
    assert not Path("none.yaml").exists()


WRONG = [
    (["--yes", "--model", "nope"], "--model nope: model: no file and no shipped model 'nope'"),
    (
        ["--yes", "--gpu", "H300"],
        "--gpu H300: gpu.name: no GPU 'H300': take a similar one, as H200",
    ),
    (["--yes", "--rate", "0"], "--rate 0: must be requests per second, more than 0"),
    (["--yes", "--rate=-1"], "--rate -1: must be requests per second, more than 0"),
    (["--yes", "--rate", "inf"], "--rate inf: must be requests per second, more than 0"),
    (["--yes", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0: must be 1 or more ("),
    (["--yes", "--tensor-parallel-size=-2"], "--tensor-parallel-size -2: must be 1 or more ("),
    (["--yes", "--chars-per-token", "4"], "--chars-per-token: needs --traffic"),
    (["--yes", "--slo", "p99_ttft_ms<=0"], "--slo p99_ttft_ms<=0: must be p99_ttft_ms<=NUMBER"),
    (["--yes", "--slo", "x<=3"], "--slo x<=3: no metric 'x'"),
    (["--yes", "--traffic", "none.csv"], "none.csv: no such file"),
    (["--yes", "--traffic", "small.yaml"], "small.yaml:1: format:"),
    (["--yes", "--traffic", "small.yaml", "--rate", "1"], "--rate: cannot be used with --traffic"),
    (["--yes", "--columns", "a=b"], "--columns: needs --traffic"),
    (["--yes", "--model", "llama-3.1-405b", "--gpu", "L4"], "--gpu L4: eight have no room for"),
    (
        ["--yes", "--tensor-parallel-size", "3"],
        "--tensor-parallel-size 3: engine.tensor_parallel_size: 3 does",
    ),
    ([], "--model: is missing; without a terminal, give it or --yes"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_bad_input_is_one_line_and_nothing_is_written(folder, capsys, options, message):
    assert main(["init", "new.yaml", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway: error: {message}")
    assert names(folder) == ["small.yaml"]


def test_what_is_wrong_with_a_model_is_not_said_of_its_gpus(folder, capsys):
    """It was "eight have no room", also where no number of GPUs makes room."""
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    path = write_config(folder, quantization_config=mixed)
    assert main(["init", "new.yaml", "--yes", "--model", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no room" not in line
    assert "quantized_layers is empty" in line


def test_texts_without_lengths_are_estimated_as_told(folder, capsys):
    """The hint of the refusal is an option of each verb that reads a trace."""
    turns = [{"value": "q" * 40}, {"value": "a" * 80}]
    Path("chat.json").write_text(json.dumps([{"conversations": turns}]))
    for command in (
        ["trace", "describe", "chat.json"],
        ["trace", "convert", "chat.json", "o.jsonl"],
        ["init", "chat.yaml", "--yes", "--traffic", "chat.json"],
    ):
        assert main(command) == 2
        assert "estimate it by --chars-per-token 4" in capsys.readouterr().err
        assert main([*command, "--chars-per-token", "4"]) == 0
        assert main([*command, "--chars-per-token", "inf"]) == 2
        capsys.readouterr()
    workload = make_workload(load_scenario(Path("chat.yaml")))
    assert (workload.total_input, workload.total_output) == (10, 20)
    assert main(["trace", "describe", "chat.yaml", "--chars-per-token", "4"]) == 2
    told = capsys.readouterr().err
    assert told == ("headway: error: --chars-per-token: needs a trace; chat.yaml is a scenario\n")


def test_the_closing_hint_can_be_pasted(folder, capsys):
    assert main(["init", "my dir/my first.yaml", "--yes"]) == 0
    words = shlex.split(capsys.readouterr().out.partition("; try ")[2])
    assert words == ["headway", "run", "my dir/my first.yaml"]
    assert main([*words[1:], "--set", "workload.num_prompts=2"]) == 0


def test_a_file_that_is_there_is_not_overwritten(folder, capsys):
    before = Path("small.yaml").read_bytes()
    assert main(["init", "small.yaml", "--yes"]) == 2
    assert capsys.readouterr().err == (
        "headway: error: small.yaml: is there already; give another name\n"
    )
    assert Path("small.yaml").read_bytes() == before


def test_a_file_of_traffic_is_checked_at_once(folder, answers, capsys):
    """And asked for again; the comment names the scenario's path."""
    Path("bad.csv").write_text("a,b\n1,2\n")
    Path("good.csv").write_text("arrival,prompt_tokens,output_tokens\n0,5,3\n")
    answers += ["", "", "bad.csv", "good.csv", ""]
    assert main(["init", "sub/own.yaml"]) == 0
    said = capsys.readouterr().out
    assert said.index("bad.csv:1: format: ") < said.index("Service level")
    assert Path("sub/own.yaml").read_text().startswith("# `headway run sub/own.yaml` simulates")


@pytest.mark.parametrize(("model", "size"), [("llama-3.3-70b", 2), ("qwen3-32b", 1)])
def test_the_first_scenario_serves_all(tmp_path: Path, model: str, size: int) -> None:
    """As few GPUs as have room for the longest request and the mean load."""
    file = tmp_path / "s.yaml"
    assert main(["init", str(file), "--model", model, "--gpu", "H100", "--yes"]) == 0
    scenario = load_scenario(file, ["workload.num_prompts=200"])
    assert scenario.engine.tensor_parallel_size == size
    assert run(scenario).summary()["failed"] == 0


@pytest.mark.parametrize(("prompt", "size"), [(300, 2), (30_000, 4)])
def test_long_requests_want_more_gpus(tmp_path: Path, prompt: int, size: int) -> None:
    """Two H100 have room for 21,600 tokens beside the weights of a 70B."""
    trace, file = tmp_path / "t.csv", tmp_path / "s.yaml"
    trace.write_text(f"arrival,prompt,output\n0,{prompt},10\n9,{prompt},10\n")
    columns = ["--columns", "arrival=arrival,prompt=prompt,output=output"]
    words = ["init", str(file), "--model", "llama-3.1-70b", "--gpu", "H100", "--yes"]
    assert main([*words, "--traffic", str(trace), *columns]) == 0
    assert load_scenario(file).engine.tensor_parallel_size == size
    assert run(load_scenario(file)).summary()["failed"] == 0


def test_a_server_whose_longest_request_has_no_room_takes_shorter_ones(tmp_path, capsys):
    """It was written for one that does not start, below a warning."""
    file = tmp_path / "s.yaml"
    assert main(["init", str(file), "--model", "gpt-oss-120b", "--gpu", "H100", "--yes"]) == 0
    told = capsys.readouterr()
    assert (told.err, ", $6.88/h, max_model_len 65,872;" in told.out) == ("", True)
    assert load_scenario(file).engine.max_model_len == 65_872
    assert main(["memory", str(file)]) == 0
    # The same as `headway memory` and the command of a plan advise: they had 69,360 and 65,872.
    assert main(["memory", "--model", "gpt-oss-120b", "--gpu", "H100"]) == 1
    assert "; it starts with --max-model-len 65872 or " in capsys.readouterr().err
    free = load_scenario(file, ["engine.max_model_len=null"], fits=False)
    assert longest_that_fits(free) == 65_872


def test_a_relative_model_is_that_of_the_current_folder(tmp_path, monkeypatch, capsys):
    """The scenario names it as from its own folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("my", "sub"):
        (tmp_path / name).mkdir()
    raw = Path(MODELS / "llama-3.2-1b" / "config.json").read_text()
    (tmp_path / "my" / "config.json").write_text(raw)
    words = ["--model", "./my", "--gpu", "L4", "--tensor-parallel-size", "1"]
    assert main(["init", "sub/s.yaml", *words, "--yes"]) == 0
    assert "model: ../my " in (tmp_path / "sub" / "s.yaml").read_text()
    assert load_scenario(tmp_path / "sub" / "s.yaml").model == "../my"
