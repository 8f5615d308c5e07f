"""The comparison of a live run with the simulation, from a log that comes with the package."""

import json
import shutil
from pathlib import Path

import pytest

from calibration.engine_steps.live_folder import MEASURED, read_measured
from calibration.engine_steps.validate import Validation, spread_of, table, validate
from headway.cli.main import main
from simulator.costs.profile import PROFILES
from simulator.util.errors import HeadwayError, HeadwayWarning

MEASUREMENTS = Path(__file__).parents[2] / "calibration/measurements"
LOG = MEASUREMENTS / "cpu/tiny-test/live"
GPU_LOG = MEASUREMENTS / "h100/llama-3.1-8b/live-heavy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the committed log, to be left as it is."""
    return Path(shutil.copytree(LOG, tmp_path_factory.mktemp("live") / "log"))


@pytest.fixture(scope="module")
def validated(folder: Path) -> Validation:
    """What becomes of it; the files lie in it."""
    return validate(folder)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A copy of the committed log that a test may spoil."""
    return Path(shutil.copytree(LOG, tmp_path / "log"))


def test_the_committed_live_run_is_predicted(folder: Path, validated: Validation) -> None:
    """Loose bounds; how close it really is stands in docs/live.md."""
    found = validated
    assert found.steps["all steps"].points > 1000
    assert found.steps["all steps"].median < 0.25
    assert abs(found.steps["all steps"].bias) < 0.25
    errors = {free.label: free.error for free in found.free}
    assert abs(errors["Request throughput"]) < 0.03
    assert abs(errors["TPOT mean"]) < 0.3
    assert abs(errors["E2EL mean"]) < 0.3
    assert found.reruns >= 2
    assert all(free.band is not None for free in found.free)
    assert (folder / "validation.png").stat().st_size > 10_000
    said = json.loads((folder / "validation.json").read_text())
    assert (said["device"], said["clock"], said["measure"]) == ("cpu", "exec", "cpu")
    assert 1 < spread_of(read_measured(folder), "cpu") < 1.5  # on a core of its own


@pytest.mark.parametrize("profile", [None, "llama-3-8b.h100.bf16"])
def test_the_live_run_on_an_h100_is_predicted(profile: str | None, tmp_path: Path) -> None:
    """By the profile of its engine, and by one that was composed of published kernel times."""
    found = validate(GPU_LOG, profile, tmp_path)
    errors = {free.label: free.error for free in found.free}
    for label, limit in (("TTFT mean", 0.05), ("TPOT mean", 0.03), ("E2EL mean", 0.03)):
        assert abs(errors[label]) < limit, label
    assert found.steps["all steps"].median < 0.06


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


def test_the_table_has_every_comparison(validated: Validation) -> None:
    text = table(validated)
    for word in ("all steps", "with prompts", "Request throughput", "TTFT mean", "E2EL P99"):
        assert word in text
    assert "live vs live" in text


@pytest.mark.medium
def test_another_profile_can_be_judged(
    log: Path, validated: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cost twice as slow is off by 100 % in each step; its path counts from where we are."""
    text = (PROFILES / "tiny-test.cpu.fp32.yaml").read_text()
    base = validated.steps["decode"].bias
    head, _, rest = text.partition("overhead: ")
    number, _, rest = rest.partition(" ")
    (tmp_path / "slow.yaml").write_text(f"{head}overhead: {float(number) + 1.0} {rest}")
    monkeypatch.chdir(tmp_path)
    slow = validate(log, "slow.yaml", tmp_path / "out")
    assert slow.steps["decode"].bias > base + 100
    with pytest.raises(HeadwayError, match=r"--profile no\.yaml: no such file"):
        validate(log, "no.yaml")


@pytest.mark.medium
def test_a_run_without_reruns_says_so(log: Path) -> None:
    for folder in log.glob("rerun-*"):
        shutil.rmtree(folder)
    with pytest.warns(HeadwayWarning, match="was not repeated"):
        assert validate(log).reruns == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("live.json", "{", "live.json: damaged"),
        ("live.json", "[]", "is no description of a live run"),
        ("summary.json", "{}", "summary.json: damaged: lacks request_throughput"),
        ("requests.csv", "id\n0\n", "requests.csv: damaged"),
        ("requests.csv", "", "requests.csv: damaged: it is empty$"),
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
    (log / MEASURED).write_text("\n".join([*lines[:2], "abc,-3,1,1,1,0,1,0,1,10,,,"]) + "\n")
    with pytest.raises(HeadwayError, match=r"csv:3: start: must be a number, .* not 'abc'"):
        read_measured(log)
    with pytest.raises(HeadwayError, match="nowhere: no such folder"):
        validate(log / "nowhere")
    assert main(["validate", str(log / "nowhere")]) == 2
    (log / "live.json").unlink()
    with pytest.raises(HeadwayError, match=r"is no folder of `headway live`: has no live\.json"):
        validate(log)
