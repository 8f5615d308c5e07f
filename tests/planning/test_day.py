"""A plan over a day: service levels in every hour, and autoscaling against a fixed fleet."""

import json
from pathlib import Path

import numpy as np
import pytest

from headway.cli.main import main
from headway.planning.measure import measure_run
from simulator import load_scenario, plan, run
from simulator.results.service_levels import parse_slo
from simulator.util.errors import HeadwayError
from tests.support.scenarios import ONE_A_SECOND

HOUR = 500.0  # s; a day of four
CURVE = "diurnal: {period: 2000, rates: [1, 1, 6, 1]}"
SCALING = "{target: 1, max_replicas: 4, interval: 5, startup_delay: 20, cooldown: 60}"


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """A second a request; four thirds come in the busy hour, of which one replica serves one."""
    text = ONE_A_SECOND.replace(
        "num_prompts: 200, request_rate: 0.2", f"num_prompts: 1000, {CURVE}"
    )
    path = tmp_path / "day.yaml"
    path.write_text(
        text.replace("burstiness: 1", "request_rate: 0.5")
        + f"cluster: {{replicas: 1, router: least_outstanding, autoscaling: {SCALING}}}\n"
    )
    return path


def test_bounds_are_held_against_the_worst_hour(day: Path):
    """Recomputed from the requests: each bound has the numbers of the hour where it is worst."""
    slos = [
        parse_slo(text) for text in ("p90_ttft_ms<=2000", "mean_e2el_ms<=4000", "completion>=1")
    ]
    scenario = load_scenario(day, ["cluster.autoscaling=null", "cluster.replicas=2"])
    found = measure_run(scenario, slos, steady=False, window=HOUR)
    table = run(scenario).request_table()
    hours = ((table.sent - table.sent[0]) // HOUR).astype(int).clip(max=3)
    p90 = [1e3 * np.percentile(table.ttft[hours == k], 90) for k in range(4)]
    mean = [1e3 * table.e2el[hours == k].mean() for k in range(4)]
    assert found["p90_ttft_ms"] == pytest.approx(max(p90))
    assert found["mean_e2el_ms"] == pytest.approx(max(mean))
    assert found["worst_window_p90_ttft_ms"] == HOUR * int(np.argmax(p90)) == 2 * HOUR
    assert found["completion"] == 1.0
    above = (1e3 * table.ttft[hours == 2] > 2000).mean()
    assert np.mean(found["batches"]["p90_ttft_ms<=2000"]) == pytest.approx(above, abs=0.01)


def test_a_day_that_holds_as_a_whole_may_break_in_an_hour(day: Path):
    """One replica: in the busy hour most wait for more than a minute, of all requests fewer."""
    keys = ["cluster.autoscaling=null", "plan.most_replications=3", "workload.burstiness=.inf"]
    plan(day, ["median_ttft_ms<=65000"], cheapest=True, overrides=keys, jobs=1)
    with pytest.raises(HeadwayError, match="no configuration meets median_ttft_ms<=65000"):
        plan(
            *(day, ["median_ttft_ms<=65000"]),
            cheapest=True,
            overrides=[*keys, f"plan.window={HOUR}"],
            jobs=1,
        )


@pytest.mark.medium
def test_autoscaling_is_priced_beside_the_fewest_fixed_replicas(day: Path, tmp_path: Path, capsys):
    """It pays for what is up, from the order on; the fixed fleet is found from 1 to 6."""
    command = ["plan", str(day), "--slo", "p90_ttft_ms<=60000", "--fewest", "cluster.replicas=1..6"]
    command += ["--window", f"{HOUR:g}", "--set", "plan.most_replications=3", "--jobs", "1"]
    assert main([*command, "--out", str(tmp_path / "o"), "--quiet"]) == 0
    rows = json.loads((tmp_path / "o" / "plan.json").read_text())["candidates"]
    scaled, fixed = rows
    assert "cluster.autoscaling" not in scaled
    assert fixed["cluster.autoscaling"] == "null"
    assert fixed["at"] > 1
    assert fixed["broke"] == "p90_ttft_ms"
    assert fixed["dollars_per_day"] == pytest.approx(24 * 3.43 * fixed["at"])
    summary = [
        run(load_scenario(day, [f"seed={seed}"])).summary()["headway"]["cluster"]
        for seed in range(3, 6)
    ]
    spans = [
        measure_run(load_scenario(day, [f"seed={seed}"]), [], steady=False)["run_duration"]
        for seed in range(3, 6)
    ]
    paid = [24 * 3600 * one["dollars"] / span for one, span in zip(summary, spans, strict=True)]
    assert scaled["dollars_per_day"] == pytest.approx(np.mean(paid))
    assert scaled["dollars_per_day"] < fixed["dollars_per_day"]
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "o")]) == 0
    told = capsys.readouterr().out
    assert "with autoscaling, the cheapest: $" in told
    assert f"fixed, the cheapest: ${fixed['dollars_per_day']:.2f}/day, {fixed['at']} GPUs" in told
    assert "worst p90_ttft_ms from 0.278 h on" in told
    assert main([*command, "--out", str(tmp_path / "o"), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["candidates"] == rows
    assert not output.err


@pytest.mark.medium
def test_a_fleet_that_scales_too_late_is_told(day: Path):
    """A replica that takes half an hour to start comes when the busy hour is over."""
    late = ["cluster.autoscaling.startup_delay=1000", "plan.most_replications=3"]
    frame = plan(
        *(day, ["p90_ttft_ms<=60000"]),
        fewest="cluster.replicas=1..6",
        overrides=[*late, f"plan.window={HOUR}"],
        jobs=1,
    )
    holds = frame["holds"].tolist()
    assert holds[:2] == [True, False]
    assert not any(holds[2:])  # nor does it with another target or metric
    assert frame["cluster.autoscaling"].tolist()[0] == "null"


@pytest.mark.medium
def test_an_autoscaler_that_orders_nothing_saves_nothing(day: Path, tmp_path: Path, capsys):
    """It said that it costs 0 %."""
    day.write_text(day.read_text().replace("{target: 1", "{target: 10000"))
    command = ["plan", str(day), "--slo", "p90_ttft_ms<=1e9", "--fewest", "cluster.replicas=1..2"]
    assert main([*command, "--window", f"{HOUR:g}", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "  autoscaling saves nothing\n" in capsys.readouterr().out


@pytest.mark.medium
def test_a_target_that_holds_is_found_without_being_asked_for(day: Path, tmp_path: Path, capsys):
    """A queue of eight is late; of two it is early enough, and cheaper than two all day."""
    text = (
        day.read_text()
        .replace("{target: 1", "{target: 8")
        .replace("startup_delay: 20", "startup_delay: 10")
    )
    day.write_text(text)
    command = ["plan", str(day), "--slo", "p90_ttft_ms<=7000", "--fewest", "cluster.replicas=1..6"]
    command += ["--window", f"{HOUR:g}", "--set", "plan.most_replications=4", "--jobs", "1"]
    assert main([*command, "--out", str(tmp_path / "o")]) == 0
    told = capsys.readouterr().out
    rows = json.loads((tmp_path / "o" / "plan.json").read_text())["candidates"]
    held = rows[-1]
    assert held["holds"]
    assert held["cluster.autoscaling.metric"] == "queue_depth"
    assert not rows[0]["holds"]
    less = 1 - held["dollars_per_day"] / rows[1]["dollars_per_day"]
    assert f"  autoscaling saves {less:.0%}" in told
    best = load_scenario(tmp_path / "o" / "best.yaml")
    for seed in (100, 101, 102):
        found = run(best.model_copy(update={"seed": seed}))
        table = found.request_table()
        hours = ((table.sent - table.sent[0]) // HOUR).astype(int).clip(max=3)
        assert max(1e3 * np.percentile(table.ttft[hours == k], 90) for k in range(4)) <= 8000


@pytest.mark.medium
def test_more_replicas_at_least_are_tried_where_no_target_is_early_enough(day: Path) -> None:
    """The third of three comes 100 s late: of one at least no target helps, of two it does."""
    keys = ["workload.num_prompts=2000", "workload.request_rate=1"]
    keys += ["plan={replications: 2, most_replications: 2}"]
    frame = plan(
        *(day, ["p90_ttft_ms<=45000"]),
        fewest="cluster.replicas=1..6",
        overrides=[*keys, f"plan.window={HOUR}", "cluster.autoscaling.startup_delay=100"],
        jobs=1,
    )
    held = frame[frame["holds"] & frame["cluster.autoscaling"].isna()]
    assert held["cluster.autoscaling.min_replicas"].tolist() == ["2"]
    fixed = frame[frame["cluster.autoscaling"] == "null"]
    assert held["dollars_per_day"].iloc[0] < fixed["dollars_per_day"].iloc[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--window", "0"], "--window 0: must be more than 0"),
        (["--window", "nan"], "--window nan: must be a number"),
        (
            ["--window", "60", "--slo", "p99_itl_ms<=9"],
            "--window: cannot be used with p99_itl_ms<=9: it",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(day: Path, capsys, options: list[str], told: str):
    assert main(["plan", str(day), "--slo", "p90_ttft_ms<=9", "--cheapest", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_window_is_of_the_load_as_it_is(day: Path, capsys):
    assert main(["plan", str(day), "--slo", "p90_ttft_ms<=9", "--window", "60"]) == 2
    assert "--window: needs --fewest or --cheapest" in capsys.readouterr().err


@pytest.mark.medium
def test_a_run_that_breaks_a_window_ends_and_is_told(tmp_path: Path) -> None:
    """When it ends, later windows have begun: what was broken is still what ended it."""
    command = ["plan", "demo", "--slo", "p99_ttft_ms<=1000", "--window", "60", "--jobs", "1"]
    command += ["--fewest", "cluster.replicas=1..2", "--set", "workload.request_rate=6"]
    assert main([*command, "--replications", "1", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    assert (row["at"], row["broke"]) == (2, "p99_ttft_ms")
