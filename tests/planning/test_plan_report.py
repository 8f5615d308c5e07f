"""What `headway plan` prints and writes."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cli.main import main
from headway.planning.buy_report import _speeds
from headway.planning.candidate import Candidate
from headway.planning.plan import _keeps
from headway.planning.plan_report import COLUMNS, _abscissa, _cells, _draw, _draw_bounds
from headway.planning.problem import REPLICAS
from headway.planning.runs import read_metric_values
from headway.planning.search import SearchResult
from headway.planning.verdict import Trial
from simulator import load_scenario, run
from simulator.results.service_levels import parse_slo

SLO = parse_slo("p99_ttft_ms<=100")


@pytest.mark.medium
def test_the_fewest_seats_and_the_files(scenario: Path, capsys: pytest.CaptureFixture[str]):
    out = scenario.parent / "out"
    args = ["--slo", "p99_ttft_ms<=250", "--fewest", "engine.max_num_seqs=1..16", "--jobs", "1"]
    assert main(["plan", str(scenario), *args, "--out", str(out)]) == 0
    report = json.loads((out / "plan.json").read_text())
    assert report["slo"] == ["p99_ttft_ms<=250", "completion>=1"]
    (row,) = report["candidates"]
    seats = int(row["at"])
    assert 1 < seats < 16
    printed = capsys.readouterr().out
    assert f"* the scenario  {seats:>19}" in printed
    for note in ("is simulated", "no price is known"):  # of no pods, of a GPU of the list
        assert note not in printed
    again = load_scenario(out / "best.yaml")
    assert again.engine.max_num_seqs == seats
    result = run(again)
    with (out / "runs.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if int(float(r["engine.max_num_seqs"])) == seats]
    assert [int(row["seed"]) for row in rows[:2]] == [again.seed, again.seed + 1]
    (row,) = [r for r in rows if int(r["num_prompts"]) == again.workload.generator.num_prompts][:1]
    result.warmup = float(row["warmup_s"])
    values = read_metric_values(result, [parse_slo("p99_ttft_ms<=250")])
    assert float(row["p99_ttft_ms"]) == values["p99_ttft_ms"]
    command = (out / "vllm_serve.sh").read_text()
    assert f"--max-num-seqs {seats} " in command
    assert (out / "plan.png").stat().st_size > 10_000
    long = f"workload.num_prompts={10 * again.workload.generator.num_prompts}"
    for count, holds in ((seats, True), (seats - 1, False)):
        check = run(load_scenario(scenario, [f"engine.max_num_seqs={count}", long]))
        assert (read_metric_values(check, [])["p99_ttft_ms"] <= 250) is holds


def test_a_share_is_as_near_to_its_bound_as_what_is_missed_to_what_may_be():
    slos = [parse_slo("goodput>=0.99"), SLO]
    for goodput, ttft, strain in ((0.0, 90.0, 100.0), (0.98, 0.0, 2.0), (1.0, 90.0, 0.9)):
        trial = Trial(1.0, runs=[{"goodput": goodput, "p99_ttft_ms": ttft}])
        assert max(trial.ratios(slos).values()) == pytest.approx(strain)


@pytest.mark.medium
def test_the_table_has_the_headroom_of_those_that_hold(
    scenario: Path, capsys: pytest.CaptureFixture[str]
):
    """As plan.json tells it, of the 0.2 requests/s that are offered."""
    out = scenario.parent / "out"
    args = ["--slo", "p99_ttft_ms<=60000", "--jobs", "1", "--out", str(out)]
    assert main(["plan", str(scenario), *args]) == 0
    (row,) = json.loads((out / "plan.json").read_text())["candidates"]
    printed = capsys.readouterr().out
    assert f"headroom {100 * row['headroom']:.0f} %" in printed
    lines = printed.splitlines()
    (head,) = [line for line in lines if line.startswith("candidate ")]
    (cells,) = [line for line in lines if line.startswith("* the scenario  ")]
    end = head.index("headroom %") + len("headroom %")
    assert cells[:end].split()[-1] == f"{100 * row['headroom']:.0f}"


def test_a_candidates_speeds_are_a_users_and_those_of_all() -> None:
    """10 ms a token and 50 tokens/s, on two GPUs at $7."""
    trial = Trial(1.0, runs=[{"mean_tpot_ms": 10.0, "output_throughput": 50.0}])
    result = SimpleNamespace(trials=[trial], best=None)
    candidate = SimpleNamespace(result=result, resources_at=lambda _: (2, 7.0))
    assert [*Candidate.speeds(candidate, of_best=False)] == [(trial, 100.0, 50.0)]  # type: ignore[arg-type]


def test_the_interval_of_a_load_has_the_load() -> None:
    """The curve's lower end is where its upper strain crosses, which may be above what was held."""
    scenario = load_scenario("demo")
    places = [(1.0, (-0.9, -0.5, -0.4)), (2.0, (-0.8, -0.4, -0.2)), (4.0, (0.2, 0.4, 0.6))]
    trials = [Trial(at, strain=strain) for at, strain in places]
    found = Candidate({}, scenario, result=SearchResult(trials[0], trials))
    low, high = found.capacity_interval
    assert low == found.capacity == 1.0
    assert high is not None
    assert 2.0 < high < 4.0


@pytest.mark.parametrize(("ratio", "scale"), [(0.4, "linear"), (0.3, "log")])
def test_what_is_far_from_its_bound_is_drawn_on_a_logarithmic_scale(
    ratio: float, scale: str
) -> None:
    """From a third of it on: the bound is part of the picture."""
    from matplotlib.figure import Figure

    trial = Trial(1.0, runs=[{"p99_ttft_ms": ratio * SLO.bound}])
    result = SimpleNamespace(trials=[trial], best=trial)
    candidate = SimpleNamespace(scenario=None, spent_at=lambda _: None, result=result)
    problem = SimpleNamespace(criteria=SimpleNamespace(slos=[SLO]), high=0, key="at")
    axes = Figure().subplots()
    _draw_bounds(axes, problem, [(candidate, "0.5", "one")], candidate)  # type: ignore[arg-type]
    assert axes.get_yscale() == scale


def test_a_load_that_long_runs_broke_is_drawn_by_these() -> None:
    """It was a solid dot of its short run, on top of the Pareto front."""
    numbers: dict[str, Any] = {"mean_tpot_ms": 10.0, "output_throughput": 50.0}
    short, long = (Trial(1.0, s, [numbers], ok=s < 99) for s in (60.0, 240.0))
    for trials in ([short, long], [long, short]):
        candidate = SimpleNamespace(result=SimpleNamespace(trials=trials, best=None))
        (drawn,) = Candidate.speeds(candidate, of_best=False)  # type: ignore[arg-type]
        assert drawn[0] is long


def test_a_number_of_the_table_has_all_its_digits_before_the_point() -> None:
    """It was 1.433e+04."""
    trial = SimpleNamespace(scenario=None)
    row = dict.fromkeys(("attainment", "reason", "headroom", *COLUMNS))
    row |= {"holds": False, "p99_ttft_ms": 14_330.4}
    problem = SimpleNamespace(criteria=SimpleNamespace(window=None))
    cells = _cells(problem, trial, row, ["p99_ttft_ms"])  # type: ignore[arg-type]
    assert [*cells][:2] == ["no", "14,330"]


def test_what_costs_nothing_is_drawn_at_nothing() -> None:
    trial = object()
    result = SimpleNamespace(best=None, trials=[trial])
    candidate = SimpleNamespace(spent_at=lambda trial: 0.0, result=result)
    words, place = _abscissa(SimpleNamespace(high=8), [candidate])
    assert (words, place(candidate, trial)) == ("$/h", 0.0)


def test_the_front_is_that_of_what_keeps_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks a bound is none of them; the bounds are below, not over the points."""
    figures: list[Any] = []
    monkeypatch.setattr("headway.figures.style.encode", lambda figure, _: figures.append(figure))
    problem = SimpleNamespace(by_energy=False, high=0, key="at", pods=1)
    problem.criteria = SimpleNamespace(slos=[SLO])

    def candidate(user: float, ok: bool) -> Any:
        trial = Trial(1.0, runs=[{"p99_ttft_ms": 90.0}], ok=ok)
        return SimpleNamespace(
            varied={},
            scenario=None,
            label=f"{user} {ok}",
            result=SimpleNamespace(trials=[trial], best=trial),
            speeds=lambda of_best: [(trial, user, 1000.0 / user)],
            spent_at=lambda _: 2.0,
            resources_at=lambda _: (2, None),
        )

    held = [candidate(20.0, ok=True), candidate(10.0, ok=True)]
    for some in (held, [*held, candidate(40.0, ok=False)]):
        _draw(problem, some, held[0], None)  # type: ignore[arg-type]
        *_, front = figures[-1].axes[1].lines
        assert sorted(zip(*front.get_data(), strict=True)) == [(10.0, 50.0), (20.0, 25.0)]
    assert figures[-1].axes[0].get_xlabel().endswith("\np99_ttft_ms<=100")


def test_latencies_of_ten_seconds_have_all_digits_before_the_point() -> None:
    runs = [{"mean_ttft_ms": 100.0, "mean_tpot_ms": 20.0, "mean_e2el_ms": 10_740.0}]
    offer: Any = SimpleNamespace(best=SimpleNamespace(runs=runs, ratios=lambda _: {}))
    problem: Any = SimpleNamespace(criteria=SimpleNamespace(slos=[SLO]))
    assert _speeds(problem, offer) == "  means: TTFT 100 ms, TPOT 20 ms, E2EL 10,740 ms"


def test_the_picture_names_the_sizes_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10G stood beside "not run: A10G (TP 1)": it had run as TP 2."""
    figures: list[Any] = []
    monkeypatch.setattr("headway.figures.style.encode", lambda figure, _: figures.append(figure))
    problem = SimpleNamespace(by_energy=False, high=0, key="at", pods=1)
    problem.criteria = SimpleNamespace(slos=[SLO])
    trial = Trial(1.0, runs=[{"p99_ttft_ms": 90.0}], ok=True)

    def candidate(gpu: str, size: int) -> Any:
        engine = SimpleNamespace(tensor_parallel_size=size)
        return SimpleNamespace(
            varied={"gpu.name": gpu},
            scenario=SimpleNamespace(engine=engine, cluster=None),
            label=f"{gpu} (TP {size})",
            result=SimpleNamespace(trials=[trial], best=trial),
            speeds=lambda of_best: [(trial, 20.0, 50.0)],
            spent_at=lambda _: 2.0,
            resources_at=lambda _: (2, None),
        )

    ran = [candidate("A10G", 2) for _ in range(9)] + [candidate("L4", 4), candidate("L4", 2)]
    _draw(problem, ran, ran[0], None)  # type: ignore[arg-type]
    names = figures[-1].axes[0].get_legend_handles_labels()[1]
    assert {*names} >= {"A10G (TP 2)", "L4 (TP 2, 4)", "the best: A10G (TP 2)"}


@pytest.mark.parametrize(
    ("ttft", "growing", "told"),
    [
        (200.0, "", "its runs keep p99_ttft_ms<=200; "),
        (200.0, "the queue", ""),  # it will be worse
        (50.0, "", ""),
    ],
)
def test_bounds_are_loosened_to_what_runs_keep_unless_they_grow(
    ttft: float, growing: str, told: str
):
    trial = Trial(1.0, runs=[{"p99_ttft_ms": ttft}], growing=growing)
    assert _keeps([SLO], trial) == told


def test_replicas_of_an_autoscaled_fleet_are_drawn_as_those_at_the_start() -> None:
    keys = ["cluster={replicas: 1, autoscaling: {target: 1, max_replicas: 2}}"]
    for more, named in ((keys, "cluster.replicas (autoscaled: at the start)"), ([], REPLICAS)):
        tried = SearchResult(None, [Trial(1.0)])
        candidate = Candidate({}, load_scenario("demo", more), result=tried)
        problem = SimpleNamespace(high=4, key=REPLICAS)
        assert _abscissa(problem, [candidate])[0] == named  # type: ignore[arg-type]
