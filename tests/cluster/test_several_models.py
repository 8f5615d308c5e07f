"""A fleet of several models: each is served as if it were alone."""

from pathlib import Path

import numpy as np
import pytest

from simulator import load_scenario, plan, run
from simulator.results.service_levels import service_levels
from simulator.util.errors import HeadwayError

FLEET = """
model: llama-3-8b
gpu: {name: H100-80GB}
engine: {max_model_len: 4096}
cluster:
  router: least_outstanding
  groups:
    small: {replicas: 2}
    large: {model: qwen3-32b, replicas: 1, engine: {max_num_seqs: 64}}
workload:
  trace: {path: trace.csv, format: requests}
"""
ALONE = """
model: MODEL
gpu: {name: H100-80GB}
engine: {max_model_len: 4096, max_num_seqs: SEATS}
cluster: {replicas: COUNT, router: least_outstanding}
workload:
  trace: {path: trace.csv, format: requests}
"""
NAMES = ["llama-3-8b", "llama-3-8b", "qwen3-32b"]


def write(folder: Path, text: str, names: list[str], *, of: str | None = None) -> Path:
    """Write a scenario and a trace: all requests, or those of one model."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    rows = [
        f"{at},{rng.integers(20, 900)},{rng.integers(1, 90)},{names[k % len(names)]}\n"
        for k, at in enumerate(np.cumsum(rng.exponential(0.04, 150)).tolist())
    ]
    kept = [row for row in rows if of is None or row.endswith(f",{of}\n")]
    head = "arrival,prompt_tokens,output_tokens,model\n"
    (folder / "trace.csv").write_text(head + "".join(kept))
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def test_each_model_is_served_as_if_it_were_alone(tmp_path: Path) -> None:
    """Latencies of two models in one fleet are those of two fleets, to the arrivals' rounding."""
    fleet = run(load_scenario(write(tmp_path / "both", FLEET, NAMES))).requests
    for name, count, seats in (("llama-3-8b", 2, 1024), ("qwen3-32b", 1, 64)):
        text = ALONE.replace("MODEL", name).replace("COUNT", str(count))
        text = text.replace("SEATS", str(seats))
        alone = run(load_scenario(write(tmp_path / name, text, NAMES, of=name))).requests
        mine = fleet[fleet.model == name]
        assert mine.e2el.tolist() == pytest.approx(alone.e2el.tolist(), abs=1e-6)
        assert mine.ttft.tolist() == pytest.approx(alone.ttft.tolist(), abs=1e-6)
    assert set(fleet.replica[fleet.model == "qwen3-32b"]) == {2}
    assert set(fleet.replica[fleet.model == "llama-3-8b"]) == {0, 1}


def test_models_are_drawn_by_weight(tmp_path: Path) -> None:
    path = write(tmp_path, FLEET, NAMES)
    workload = "workload={num_prompts: 4000, request_rate: 200, input_len: 20, output_len: 1, "
    workload += "models: {llama-3-8b: 3, qwen3-32b: 1}}"
    result = run(load_scenario(path, [workload]))
    share = (result.requests.model == "qwen3-32b").mean()
    assert share == pytest.approx(0.25, abs=0.02)
    told = result.summary()["headway"]["per_model"]
    assert told["qwen3-32b"]["requests"] == round(4000 * share)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cluster.failures={mtbf: 100}", "cluster.failures: needs one model"),
        ("cluster.pods=1", "cluster.pods: needs one model|if there are pods"),
        ("cluster.groups.large.model=no-such", "cluster.groups.large.model: no file and no ship"),
        ("workload.models={a: 0}", "workload.models: must have a weight above 0 .{name: weight}"),
    ],
)
def test_what_goes_with_one_model_alone_is_refused(
    tmp_path: Path, change: str, message: str
) -> None:
    with pytest.raises(HeadwayError, match=message):
        load_scenario(write(tmp_path, FLEET, NAMES), [change])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["llama-3-8b", "gpt"], "a request asks for gpt; the groups serve llama-3-8b, qwen3-32b"),
        (["qwen3-32b", ""], "a request asks for no model; the groups serve"),
    ],
)
def test_a_model_that_nobody_serves_is_refused(tmp_path: Path, names, message) -> None:
    with pytest.raises(HeadwayError, match=message):
        run(load_scenario(write(tmp_path, FLEET, names)))


def test_models_are_refused_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\nworkload: {num_prompts: 5, models: {llama-3-8b: 1}}\n")
    with pytest.raises(HeadwayError, match=r"workload.models: needs cluster.groups of differe"):
        run(load_scenario(path))


def test_each_model_is_judged_by_its_own_levels(tmp_path: Path) -> None:
    """Bounds of one model are on its requests alone: the numbers are those of its rows."""
    own = "slo=[qwen3-32b:p99_ttft_ms<=500, llama-3-8b:mean_e2el_ms<=1, each:goodput>=0.9]"
    path = write(tmp_path, FLEET, NAMES)
    result = run(load_scenario(path, [own, "goodput={tpot: 25}"]))
    got, told = result.requests, result.summary()["headway"]
    values = {one["bound"]: one["value"] for one in told["slo"]}
    large, small = (got[got.model == name] for name in ("qwen3-32b", "llama-3-8b"))
    assert values == pytest.approx(
        {
            "qwen3-32b:p99_ttft_ms<=500": 1e3 * np.percentile(large.ttft, 99),
            "llama-3-8b:mean_e2el_ms<=1": 1e3 * small.e2el.mean(),
            "llama-3-8b:goodput>=0.9": (small.tpot.fillna(0.0) <= 0.025).mean(),
            "qwen3-32b:goodput>=0.9": (large.tpot.fillna(0.0) <= 0.025).mean(),
            "completion>=1": 1.0,
        }
    )
    assert [one["met"] for one in told["slo"]] == [True, False, True, False, True]
    assert not told["slo_met"]


def test_a_plan_keeps_the_levels_of_each_model(tmp_path: Path) -> None:
    """A rare model that is slow is lost among all requests, and not where it has its own level."""
    load = "workload={num_prompts: 400, request_rate: 8, input_len: 300, output_len: 20, "
    load += "models: {llama-3-8b: 19, qwen3-32b: 1}}"
    path = write(tmp_path, FLEET, NAMES)
    short = ["plan.min_duration=20", "plan.max_duration=20"]
    given = {"cheapest": True, "overrides": [load, *short], "jobs": 1}
    assert plan(path, ["p90_tpot_ms<=15"], **given).holds.all()
    with pytest.raises(HeadwayError, match="qwen3-32b:p90_tpot_ms"):
        plan(path, ["each:p90_tpot_ms<=15"], **given)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ("gpt:p99_ttft_ms<=5", "no model 'gpt'; the groups serve llama-3-8b, qwen3-32b"),
        ("each:p99_itl_ms<=5", "p99_itl_ms is of all requests together"),
        ("each:output_throughput>=5", "output_throughput is of all requests together"),
    ],
)
def test_levels_of_no_model_are_refused(tmp_path: Path, slo: str, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        service_levels(load_scenario(write(tmp_path, FLEET, NAMES), [f"slo=['{slo}']"]))
