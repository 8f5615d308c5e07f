"""Live runs: the scheduler and blocks of a scenario drive an engine, on three clocks; and what the
comparison with the simulation makes of it, also from a log that comes with the package."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from calibration.engine_steps.live_folder import MEASURED, read_measured
from calibration.engine_steps.validate import table, validate
from simulator.cli.main import main
from simulator.costs.profile import PROFILES
from simulator.scenario.load import load_scenario
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "scenarios/live-tiny-cpu.yaml"
LOG = ROOT / "calibration/measurements/cpu/tiny-test/live"
FEW = ("workload.num_prompts=12", "workload.request_rate=50", "workload.output_len=12")


def load(*overrides: str) -> Scenario:
    return load_scenario(SCENARIO, (*FEW, *overrides))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A copy of the committed log that a test may spoil."""
    return Path(shutil.copytree(LOG, tmp_path / "log"))


# ------------------------------------------------------------------- from the committed log


def test_the_committed_live_run_is_predicted(log: Path) -> None:
    """Loose bounds; how close it really is stands in docs/live.md."""
    found = validate(log)
    assert found.steps["all steps"].points > 1000
    assert found.steps["all steps"].median < 0.25
    assert abs(found.steps["all steps"].bias) < 0.25
    errors = {free.label: free.error for free in found.free}
    assert abs(errors["Request throughput"]) < 0.03
    assert abs(errors["TPOT mean"]) < 0.3
    assert abs(errors["E2EL mean"]) < 0.3
    assert found.reruns >= 2
    assert all(free.band is not None for free in found.free)
    assert (log / "validation.png").stat().st_size > 10_000
    said = json.loads((log / "validation.json").read_text())
    assert (said["device"], said["clock"], said["measure"]) == ("cpu", "exec", "cpu")


def test_what_cannot_be_compared_is_null(log: Path) -> None:
    """JSON has no NaN, which other readers refuse."""
    summary = json.loads((log / "summary.json").read_text())
    (log / "summary.json").write_text(json.dumps(summary | {"mean_tpot_ms": None}))
    validate(log)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    said = json.loads((log / "validation.json").read_text(), parse_constant=refuse)
    live = {free["label"]: free["live"] for free in said["free"]}
    assert live["TPOT mean"] is None
    assert live["TTFT mean"] == summary["mean_ttft_ms"]


def test_the_table_has_every_comparison(log: Path) -> None:
    text = table(validate(log))
    for word in ("all steps", "with prompts", "Request throughput", "TTFT mean", "E2EL P99"):
        assert word in text
    assert "live vs live" in text


def test_another_profile_can_be_judged(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cost twice as slow is off by 100 % in each step; its path counts from where we are."""
    text = (PROFILES / "tiny-test.cpu.fp32.yaml").read_text()
    base = validate(log).steps["decode"].bias
    head, _, rest = text.partition("overhead: ")
    number, _, rest = rest.partition(" ")
    (tmp_path / "slow.yaml").write_text(f"{head}overhead: {float(number) + 1.0} {rest}")
    monkeypatch.chdir(tmp_path)
    slow = validate(log, "slow.yaml", tmp_path / "out")
    assert slow.steps["decode"].bias > base + 100
    with pytest.raises(HeadwayError, match=r"--profile no\.yaml: no such file"):
        validate(log, "no.yaml")


def test_a_run_without_reruns_says_so(log: Path) -> None:
    for folder in log.glob("rerun-*"):
        shutil.rmtree(folder)
    with pytest.warns(HeadwayWarning, match="was not repeated"):
        assert validate(log).reruns == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("live.json", "{", "live.json: damaged"),
        ("live.json", "[]", "is no description of a live run"),
        ("summary.json", "{}", "summary.json: damaged: lacks request_throughput"),
        ("requests.csv", "id\n0\n", "requests.csv: damaged"),
        (MEASURED, "start\n", r"steps_measured.csv:1: lacks columns seconds"),
    ],
)
def test_a_damaged_log_is_told_and_left(log: Path, name: str, content: str, said: str) -> None:
    """One line names the file; nothing is written beside it."""
    (log / f"{name}.gz").unlink(missing_ok=True)
    (log / name).write_text(content)
    before = sorted(log.iterdir())
    with pytest.raises(HeadwayError, match=said):
        validate(log)
    assert sorted(log.iterdir()) == before


def test_a_damaged_line_is_told_by_its_number(log: Path) -> None:
    steps = read_measured(log)
    assert steps[0].row.tokens > 0
    lines = ["start,seconds,predicted_s,device_s,host_s,swap_s,wall_s,schedule_s,decodes,context"]
    lines[0] += ",chunks,swapped_out,swapped_in"
    lines += ["0,1,1,1,1,0,1,0,1,10,,,", "0,1,1,1,1,0,1,0,1,10,17,,"]
    (log / MEASURED).write_text("\n".join(lines) + "\n")
    with pytest.raises(HeadwayError, match=r"steps_measured.csv:3: '17' is no piece of a prompt"):
        read_measured(log)
    assert main(["validate", str(log / "nowhere")]) == 2


# ------------------------------------------------------------------------ on the engine


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
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    from gpu_backend.live import run_live

    scenario = load(*overrides)
    live = run_live(scenario, "cpu", "model", warm_s=0.0)
    simulated = run(scenario, stepwise=True)
    assert live.result.logs[0].step_rows == simulated.logs[0].step_rows
    assert live.result.logs[0].request_rows == simulated.logs[0].request_rows
    assert [timing.seconds for timing in live.timings] == [t.predicted_s for t in live.timings]
    assert all(timing.measured.wall_s > 0 for timing in live.timings)


def test_a_preempting_scenario_preempts() -> None:
    """The second case above means something."""
    summary = run(load("engine.num_gpu_blocks_override=60", "engine.max_model_len=640")).summary()
    assert summary["headway"]["preemptions"] > 0


def test_swaps_are_carried_out_and_written_down() -> None:
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    from gpu_backend.live import run_live

    scenario = load(
        "engine.num_gpu_blocks_override=60",
        "engine.max_model_len=640",
        "engine.preemption_mode=swap",
    )
    live = run_live(scenario, "cpu", "model", warm_s=0.0)
    assert sum(map(len, (timing.swapped_out for timing in live.timings))) > 0
    assert sum(timing.measured.swap_in_s for timing in live.timings) > 0
    assert live.result.logs[0].step_rows == run(scenario, stepwise=True).logs[0].step_rows


def test_on_the_execution_clock_time_is_what_steps_took() -> None:
    """Each step lasts as long as was measured; idle time costs nothing."""
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    from gpu_backend.live import run_live

    began = monotonic()
    live = run_live(load("workload.request_rate=0.5"), "cpu", "exec", warm_s=0.0)
    assert live.result.summary()["duration"] > 10
    assert monotonic() - began < 20
    steps = live.result.logs[0].steps
    took = [timing.measured.busy_s for timing in live.timings]
    np.testing.assert_allclose(steps["end"] - steps["start"], took, rtol=1e-6, atol=1e-9)


def test_on_the_wall_clock_time_is_real() -> None:
    """The run lasts as long as its clock says, arrivals included."""
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    from gpu_backend.live import run_live

    scenario = load("workload.request_rate=8")
    began = monotonic()
    live = run_live(scenario, "cpu", "wall", warm_s=0.0)
    real = monotonic() - began
    end = float(live.result.logs[0].steps["end"][-1])
    assert end >= float(live.result.workload.arrival[-1])
    assert end <= real <= end + 5  # building the engine
    for timing, step in zip(live.timings, live.result.logs[0].steps, strict=True):
        assert step["end"] - step["start"] >= 0.99 * timing.measured.wall_s


def test_live_writes_what_run_writes_and_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the folder stands for itself: its own profile, its reruns, ready to validate."""
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    profile = tmp_path / "mine.yaml"
    profile.write_bytes((PROFILES / "tiny-test.cpu.fp32.yaml").read_bytes())
    sets = [word for setting in FEW for word in ("--set", setting)]
    sets += ["--set", f"cost={{profile: {profile}}}"]
    assert main(["live", str(SCENARIO), *sets, "--out", str(tmp_path / "l"), "--reruns", "1"]) == 0
    assert "Serving Benchmark Result" in capsys.readouterr().out
    profile.unlink()
    names = {path.name for path in (tmp_path / "l").iterdir()}
    written = {"summary.json", "requests.csv", "steps.csv", "scenario.yaml", "steps_measured.csv"}
    assert names == written | {"live.json", "profile.yaml", "rerun-1"}
    found = validate(tmp_path / "l")
    assert (found.reruns, found.clock) == (1, "exec")


def test_an_interrupt_of_a_rerun_says_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run's files are there already."""
    live = pytest.importorskip("gpu_backend.live", reason="needs the extra `gpu`")
    carried_out = []
    run_live = live.run_live

    def interrupt_the_second(*arguments: object, **options: object) -> object:
        done = run_live(*arguments, **options)
        result = replace(done.result, interrupted=bool(carried_out))
        carried_out.append(done)
        return replace(done, result=result)

    monkeypatch.setattr(live, "run_live", interrupt_the_second)
    sets = [word for setting in FEW for word in ("--set", setting)]
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
            "workload.input_len=8192",
            "160 of 160 prompts, of up to 8192 tokens, do not fit",
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
    pytest.importorskip("torch", reason="needs the extra `gpu`")
    code = main(["live", str(SCENARIO), "--set", setting, "--out", str(tmp_path / "x")])
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_device_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `gpu`")
    devices = ["tpu"] if torch.cuda.is_available() else ["tpu", "cuda"]
    for device in devices:
        arguments = ["live", str(SCENARIO), "--device", device, "--out", str(tmp_path / "x")]
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("headway: error: device: ")
