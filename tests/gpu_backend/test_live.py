"""Live runs: the scheduler and blocks of a scenario drive an engine, on three clocks."""

import json
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'headway[gpu]'")

from calibration.engine_steps.validate import validate  # noqa: E402
from gpu_backend import live as module  # noqa: E402
from gpu_backend.live import run_live  # noqa: E402
from headway.cli.main import main  # noqa: E402
from simulator.costs.profile import PROFILES  # noqa: E402
from simulator.scenario.load import load_scenario  # noqa: E402
from simulator.scenario.resolve import resolve  # noqa: E402
from simulator.scenario.scenario import Scenario  # noqa: E402
from simulator.simulation.run import run  # noqa: E402

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "scenarios/live-tiny-cpu.yaml"
FEW = ("workload.num_prompts=12", "workload.request_rate=50", "workload.output_len=12")
FEW_SETS = [word for setting in FEW for word in ("--set", setting)]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `headway live` begin without its second of warming up."""
    monkeypatch.setattr(module, "warm_up", lambda engine, seconds: None)


def load(*overrides: str) -> Scenario:
    return load_scenario(SCENARIO, (*FEW, *overrides))


@pytest.mark.many
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine.num_gpu_blocks_override=60", "engine.max_model_len=640"),  # preempts
        ("workload.prefix_len=64", "workload.input_len=100"),  # shares blocks
        ("engine.max_num_batched_tokens=64", "engine.long_prefill_token_threshold=32"),
        ("engine.scheduling_policy=sjf", "engine.max_num_seqs=4"),
    ],
)
def test_on_the_models_clock_a_live_run_is_the_simulation(overrides: tuple[str, ...]) -> None:
    """Shadow: the same steps at the same times to the last bit, the same requests."""
    scenario = load(*overrides)
    live = run_live(scenario, "cpu", "model", warm_s=0.0)
    simulated = run(scenario, stepwise=True)
    assert live.result.logs[0].step_rows == simulated.logs[0].step_rows
    assert live.result.logs[0].request_rows == simulated.logs[0].request_rows
    assert [timing.seconds for timing in live.timings] == [t.predicted_s for t in live.timings]
    assert all(timing.measured.wall_s > 0 for timing in live.timings)


def test_an_engine_captures_the_graphs_that_its_profile_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation pads steps with prompts to these sizes: so must the engine."""
    given: list[object] = []
    monkeypatch.setattr(module, "Engine", lambda *_, **named: given.append(named["mixed_sizes"]))
    cost = "{kind: piecewise, dense: [[1, 0.001]], graph_mixed: [[16, 0.001], [48, 0.002]]}"
    for scenario in (load(f"cost={cost}"), load()):
        module.build_engine(scenario, resolve(scenario), "cpu")
    assert given == [[16, 48], []]


def test_a_preempting_scenario_preempts() -> None:
    """The second case above means something."""
    summary = run(load("engine.num_gpu_blocks_override=60", "engine.max_model_len=640")).summary()
    assert summary["headway"]["preemptions"] > 0


def test_swaps_are_carried_out_and_written_down() -> None:
    scenario = load(
        "engine.num_gpu_blocks_override=60",
        "engine.max_model_len=640",
        "engine.preemption_mode=swap",
    )
    live = run_live(scenario, "cpu", "model", warm_s=0.0)
    assert sum(map(len, (timing.swapped_out for timing in live.timings))) > 0
    assert sum(timing.measured.swap_in_s for timing in live.timings) > 0
    assert live.result.logs[0].step_rows == run(scenario, stepwise=True).logs[0].step_rows


@pytest.mark.medium
def test_on_the_execution_clock_time_is_what_steps_took() -> None:
    """Each step lasts as long as was measured; idle time costs nothing."""
    began = monotonic()
    live = run_live(load("workload.request_rate=0.5"), "cpu", "exec", warm_s=0.0)
    assert live.result.summary()["duration"] > 10
    assert monotonic() - began < 20
    steps = live.result.logs[0].steps
    took = [timing.measured.busy_s for timing in live.timings]
    np.testing.assert_allclose(steps["end"] - steps["start"], took, rtol=1e-6, atol=1e-9)


@pytest.mark.medium
def test_on_the_wall_clock_time_is_real() -> None:
    """The run lasts as long as its clock says, arrivals included."""
    scenario = load("workload.request_rate=8")
    began = monotonic()
    live = run_live(scenario, "cpu", "wall", warm_s=0.0)
    real = monotonic() - began
    end = float(live.result.logs[0].steps["end"][-1])
    assert end >= float(live.result.workload.arrival[-1])
    assert end <= real <= end + 5  # building the engine
    for timing, step in zip(live.timings, live.result.logs[0].steps, strict=True):
        assert step["end"] - step["start"] >= 0.99 * timing.measured.wall_s


@pytest.mark.medium
@pytest.mark.usefixtures("cold")
def test_live_writes_what_run_writes_and_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the folder stands for itself: its own profile, its reruns, ready to validate."""
    profile = tmp_path / "profile.yaml"  # as the copy in the folder is called, too
    profile.write_bytes((PROFILES / "tiny-test.cpu.fp32.yaml").read_bytes())
    beside = tmp_path / "beside.yaml"
    beside.write_text(SCENARIO.read_text().replace("tiny-test.cpu.fp32", "profile.yaml"))
    sets = [*FEW_SETS, "--set", f"cost={{profile: {profile}}}"]
    words = ["live", str(beside), *FEW_SETS, "--out", str(tmp_path / "l"), "--reruns", "1"]
    assert main(words) == 0
    assert "profile: profile.yaml" in (tmp_path / "l" / "scenario.yaml").read_text()
    assert "Serving Benchmark Result" in capsys.readouterr().out
    words = ["live", str(SCENARIO), *sets, "--out", str(tmp_path / "j"), "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "j" / "summary.json").read_text())
    profile.unlink()
    names = {path.name for path in (tmp_path / "l").iterdir()}
    written = {"summary.json", "requests.csv", "steps.csv", "scenario.yaml", "steps_measured.csv"}
    assert names == written | {"live.json", "profile.yaml", "rerun-1"}
    again = ["live", str(SCENARIO), *FEW_SETS, "--out", str(tmp_path / "l")]
    assert main(again) == 2  # its reruns would be taken for those of another run
    assert "has a live run already (live.json)" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "l").iterdir()} == names
    assert main([*again[:-1], str(tmp_path / "m"), "--reruns", "-1"]) == 2
    assert "--reruns -1: must be 0 or more" in capsys.readouterr().err
    found = validate(tmp_path / "l")
    assert (found.reruns, found.clock) == (1, "exec")


@pytest.mark.medium
@pytest.mark.usefixtures("cold")
def test_an_interrupt_of_a_rerun_says_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run's files are there already."""
    carried_out = []

    def interrupt_the_second(*arguments: object, **options: object) -> object:
        done = run_live(*arguments, **options)
        result = replace(done.result, interrupted=bool(carried_out))
        carried_out.append(done)
        return replace(done, result=result)

    monkeypatch.setattr(module, "run_live", interrupt_the_second)
    sets = FEW_SETS
    out = tmp_path / "l"
    assert main(["live", str(SCENARIO), *sets, "--out", str(out), "--reruns", "2"]) == 130
    count = len(list(out.iterdir()))
    assert capsys.readouterr().err.endswith(f"done; {count} files are written, in {out}\n")
    assert (out / "summary.json").exists()
    assert len(carried_out) == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.max_model_len=9000", "9000 is more than the 8192 positions of tiny-test"),
        (
            "workload.input_len={kind: uniform, low: 4000, high: 9000}",
            "18 of 160 prompts, of up to 8985 tokens, do not fit the 8192 positions of tiny-test",
        ),
        ("engine.allocation=contiguous", "a live run needs paged allocation"),
        ("engine.num_gpu_blocks_override=9000000", "does not fit cpu"),
        ("engine.quantization=int8", "engine.quantization: the engine has no quantized weights"),
        (
            "engine.speculative_config={num_speculative_tokens: 2, acceptance: 0.5}",
            "headway: error: engine.speculative_config: a live engine verifies no drafts",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_what_the_engine_cannot_do_is_refused(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["live", str(SCENARIO), "--set", setting, "--out", str(tmp_path / "x")])
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_device_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = ["tpu"] if torch.cuda.is_available() else ["tpu", "cuda"]
    for device in devices:
        arguments = ["live", str(SCENARIO), "--device", device, "--out", str(tmp_path / "x")]
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith(f"headway: error: --device {device}: ")
