"""Live runs on vLLM: what its scheduler, here a fake, is seen to do becomes a run's log."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from calibration.engine_steps.live_folder import OPTIONAL_COLUMNS, PARTS, write_live
from calibration.engine_steps.refit import describe_machine
from gpu_backend.vllm_engine import run_vllm
from headway.cli.main import main
from simulator.scenario.load import load_scenario, with_keys
from simulator.scenario.scenario import Scenario

ENGINE = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "max_model_len": 100,
    "num_gpu_blocks_override": 50,
}


class FakeScheduler:
    """vLLM's, first come first served: prompts in chunks; one is preempted while it decodes."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.waiting: list[str] = []
        self.running: list[Any] = []
        self.turn = 0
        self.preempted = False
        pool = SimpleNamespace(num_gpu_blocks=50, get_num_free_blocks=lambda: 30)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self) -> SimpleNamespace:
        self.turn += 1
        preempted = []
        if self.turn > 8 and not self.preempted and self.running and self.running[-1].told > 2:
            self.preempted = True
            one = self.running.pop()
            one.num_computed_tokens = 0
            self.waiting.insert(0, one.name)
            preempted.append(one.name)
        while self.waiting and len(self.running) < 3 and not preempted:
            self.running.append(self.requests[self.waiting.pop(0)])
        left, tokens = 32, {}
        for one in self.running:
            count = min(one.num_prompt_tokens + one.told - one.num_computed_tokens, left)
            if count > 0:
                tokens[one.name] = count
                one.num_computed_tokens += count
                left -= count
        return SimpleNamespace(num_scheduled_tokens=tokens, preempted_req_ids=preempted)

    def update_from_output(self, scheduled: SimpleNamespace, _: object) -> dict[int, Any]:
        outputs = []
        for name in scheduled.num_scheduled_tokens:
            one = self.requests[name]
            if one.num_computed_tokens == one.num_prompt_tokens + one.told:
                one.told += 1
                outputs.append(SimpleNamespace(request_id=name, new_token_ids=[7]))
                if one.told == one.output:
                    self.running.remove(one)
        return {0: SimpleNamespace(outputs=outputs)}


class FakeEngine:
    """VllmEngine around it; the engine's own interface is its, too."""

    vocab_size = 100

    def __init__(self) -> None:
        self.scheduler = FakeScheduler()
        self.engine = self

    def add(self, name: str, tokens: list[int], output: int, priority: int) -> str:
        assert max(tokens) < self.vocab_size
        known = f"{name}-internal"
        self.scheduler.requests[known] = SimpleNamespace(
            name=known, num_prompt_tokens=len(tokens), output=output, told=0, num_computed_tokens=0
        )
        self.scheduler.waiting.append(known)
        return known

    def step(self) -> None:
        self.scheduler.update_from_output(self.scheduler.schedule(), None)

    def reset_prefix_cache(self) -> None:
        pass


@pytest.fixture
def scenario() -> Scenario:
    load = {"num_prompts": 8, "request_rate": 1e6, "input_len": 40, "output_len": 10}
    return load_scenario(
        {"model": "tiny-test", "gpu": "CPU", "engine": ENGINE, "workload": load}, ["seed=3"]
    )


def test_what_the_engine_did_is_the_log(scenario: Scenario) -> None:
    done = run_vllm(scenario, engine=FakeEngine())  # type: ignore[arg-type]
    requests, steps, summary = done.result.requests, done.result.steps, done.result.summary()
    assert summary["completed"] == 8
    assert summary["total_output_tokens"] == 80
    assert set(requests.finish_reason) == {"stop"}
    assert requests.preemptions.sum() == 1
    again = steps.prefill_tokens.sum() - 8 * 40
    assert 0 < again <= 50  # what was preempted is computed once more
    assert steps.decode_tokens.sum() + 8 + 1 == 80  # first tokens, and one after the preemption
    assert ((requests.ttft > 0) & (requests.e2el > requests.ttft)).all()
    ends = (steps.start + steps.duration).to_numpy()
    assert (steps.start.to_numpy()[1:] >= ends[:-1] - 1e-6).all()
    assert len(done.timings) == len(steps)
    assert done.timings[0].chunks == ((0, 32),)
    assert (done.clock, done.device) == ("exec", "cpu")


@pytest.mark.medium
def test_what_was_not_measured_is_left_out(
    scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step's time is the wall's, and known as a whole."""
    more = with_keys(scenario, {"workload.num_prompts": 30})
    done = run_vllm(more, engine=FakeEngine())  # type: ignore[arg-type]
    for number, timing in enumerate(done.timings):  # every other step beside another program
        timing.measured.wall_s = timing.predicted_s * (1 + 5 * (number % 2))
    write_live(done, tmp_path / "live", describe_machine() | {"engine": "vllm 0.32.0"})
    lines = (tmp_path / "live/steps_measured.csv").read_text().splitlines()
    first = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    empty = {name for name, cell in first.items() if not cell}
    swapped = {"swapped_out", "swapped_in"}
    assert empty == {*PARTS, *OPTIONAL_COLUMNS, *swapped}
    assert float(first["wall_s"]) > 0
    about = json.loads((tmp_path / "live/live.json").read_text())
    assert {"device", "clock", "engine", "python", "torch", "processor", "commit"} <= set(about)
    assert main(["validate", str(tmp_path / "live")]) == 0
    told = capsys.readouterr()
    assert "Live on cpu, clock exec; steps in wall time" in told.out
    assert "Scheduler and log" not in told.out
    assert "differ 6.0-fold (P90 over P10)" in told.err
    assert json.loads((tmp_path / "live/validation.json").read_text())["schedule_s"] is None


def test_an_engine_runs_again(scenario: Scenario) -> None:
    """Its scheduler is given back as it was."""
    engine = FakeEngine()
    for _ in range(2):
        assert run_vllm(scenario, engine=engine).result.summary()["completed"] == 8  # type: ignore[arg-type]
        assert engine.scheduler.schedule.__func__ is FakeScheduler.schedule  # type: ignore[attr-defined]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_a_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: tiny-test\ngpu: CPU\n")
    assert main(["live", str(path), "--engine", "vllm", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "headway: error: --engine vllm: vLLM is not installed in this Python; install Headway into "
        "the environment that has it\n"
    )
    assert main(["live", str(path), "--engine", "vllm", "--clock", "wall"]) == 2
    assert "cannot be used with --device and --clock" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
