"""A plan for a fleet of pods simulates one pod, and says so."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli.main import main
from headway.planning.pods import one_pod
from headway.planning.problem import PlanOptions, make_problem
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL

PODS = "cluster: {replicas: 12, pods: 4, router: %s}\n"


@pytest.mark.parametrize("router", ["round_robin", "random"])
def test_a_pod_gets_arrivals_as_in_the_fleet(router: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + PODS % router)
    load = ["workload.num_prompts=40000", "workload.burstiness=0.4"]
    whole = load_scenario(path, load)
    pod = load_scenario(path, [*load, *one_pod(whole)])
    assert pod.cluster is not None
    assert (pod.cluster.pods, pod.cluster.replicas) == (None, 3)
    assert pod.cluster.router_name == "least_outstanding"
    levels = PlanOptions(slo=["p99_ttft_ms<=1000"])
    assert make_problem(path, levels, load).pods == 4
    assert make_problem(path, levels, ["cluster={replicas: 3}"]).pods == 1
    gaps = np.diff(make_workload(pod).arrival)
    arrival = make_workload(whole).arrival
    chosen = (
        np.arange(40000) % 4
        if router == "round_robin"
        else np.random.default_rng(0).integers(4, size=40000)
    )
    expected = np.diff(arrival[chosen == 0])
    assert gaps.mean() == pytest.approx(expected.mean(), rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(expected.std() / expected.mean(), rel=0.08)


def test_the_router_of_the_pod_may_be_varied_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + PODS % "random")
    levels = PlanOptions(
        slo=["p99_ttft_ms<=1000"], vary=["cluster.pod_router=random,least_outstanding"]
    )
    assert make_problem(path, levels).axes[0][0] == "cluster.router"  # of the pod
    wrong: tuple[dict[str, Any], ...] = (
        {"vary": ["cluster.router=random"]},
        {"vary": None, "fewest": "cluster.pods=1..4"},
    )
    for keys in wrong:
        with pytest.raises(HeadwayError, match="one pod; vary cluster"):
            make_problem(path, replace(levels, **keys))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("workload={trace: {path: t.csv}}", "a trace is not one pod's"),
        ("cluster.failures={mtbf: 100}", "whose replicas are always up"),
    ],
)
def test_what_is_not_of_one_pod_is_refused(more: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + PODS % "random")
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,100,10\n"
    (tmp_path / "t.csv").write_text(trace)
    with pytest.raises(HeadwayError, match=f"cluster.pods: a plan simulates one pod.*{why}"):
        make_problem(path, PlanOptions(), [more])


@pytest.mark.medium
def test_the_plan_says_that_it_is_of_a_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "s.yaml", tmp_path / "plan"
    path.write_text(SMALL + PODS % "random")
    words = ["--min-duration", "5", "--max-duration", "10", "--replications", "1"]
    assert main(["plan", str(path), "--jobs", "1", *words, "--out", str(out)]) == 0
    assert "one of 4 pods is simulated: rates, replicas and prices" in capsys.readouterr().out
    assert json.loads((out / "plan.json").read_text())["pods"] == 4
    assert "\ndescription: one of 4 pods" in (out / "best.yaml").read_text()
    assert (out / "vllm_serve.sh").read_text().startswith("# one of 4 pods\n")
