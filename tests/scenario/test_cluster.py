"""The block `cluster` of a scenario: what it makes, what the summary says, what is refused."""

from pathlib import Path

import pandas as pd
import pytest

from headway.report.comparison import compare_table
from simulator import plan, sweep
from simulator.scenario.load import load_scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL, errors


def made(folder: Path, more: str = "", *overrides: str) -> Result:
    """Run the small scenario with a cluster."""
    path = folder / "s.yaml"
    path.write_text(SMALL + more)
    return run(load_scenario(path, overrides))


def cluster(result: Result) -> dict:
    return result.summary()["headway"]["cluster"]


def test_a_cluster_of_one_is_the_engine_alone(tmp_path: Path) -> None:
    one = write_run(made(tmp_path), tmp_path / "one")
    two = write_run(made(tmp_path, "cluster: {replicas: 1}"), tmp_path / "two")
    names = [file.name for file in one]
    assert names == [file.name for file in two]
    for name in ("requests.csv", "steps.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_route(tmp_path) -> None:
    more = "cluster: {replicas: 3, router: random}"
    rows = [made(tmp_path, more, f"seed={seed}").requests for seed in (0, 0, 1)]
    assert rows[0].equals(rows[1])
    assert not rows[0]["replica"].equals(rows[2]["replica"])


@pytest.mark.parametrize("first", ["cramped", "roomy"])
def test_a_replica_that_swaps_nothing_has_the_columns_of_one_that_does(tmp_path, first) -> None:
    groups = {"cramped": "{engine: {num_gpu_blocks_override: 20}}", "roomy": "{}"}
    names = [first, *groups.keys() - {first}]
    more = "cluster:\n  groups:\n" + "".join(f"    {name}: {groups[name]}\n" for name in names)
    result = made(tmp_path, more, "engine.preemption_mode=swap", "workload.request_rate=inf")
    write_run(result, tmp_path / "out")
    steps = pd.read_csv(tmp_path / "out" / "steps.csv", index_col=False)
    assert not steps.isna().any().any()
    swapped = steps.groupby("replica")[["swapped_out_blocks", "swap_time"]].sum()
    roomy = names.index("roomy")
    assert (swapped.loc[roomy] == 0).all()
    assert (swapped.loc[1 - roomy] > 0).all()


def test_groups_differ_in_what_they_say_and_else_are_as_the_scenario(tmp_path: Path) -> None:
    more = """cluster:
  router: least_outstanding
  groups:
    slow: {replicas: 2}
    fast:
      gpu: {name: H100-80GB}
      engine: {max_num_seqs: 4}
      cost: {kind: linear, base: 1e-3, per_token: 1e-6, per_context: 0}
"""
    result = made(tmp_path, more)
    slow, fast = (result.scenario.of_group(name) for name in ("slow", "fast"))
    assert (slow.engine.max_num_seqs, fast.engine.max_num_seqs) == (8, 4)
    assert not fast.engine.enable_prefix_caching
    assert result.cluster.groups == ["slow", "slow", "fast"]
    groups = cluster(result)["groups"]
    assert groups["slow"]["completed"] + groups["fast"]["completed"] == 40
    rows = result.requests
    assert set(rows["replica"]) <= {0, 1, 2}
    fastest = rows[rows["replica"] == 2]["tpot"].max()
    assert fastest < rows[rows["replica"] < 2]["tpot"].min()


def test_gpus_dollars_and_the_shares_of_the_groups_add_up(tmp_path: Path) -> None:
    more = """cluster:
  groups:
    a: {replicas: 3}
    b: {replicas: 1, dollars_per_hour: 2.0}
"""
    result = made(tmp_path, more)
    block = cluster(result)
    assert block["gpus"] == 4
    assert block["dollars_per_hour"] == pytest.approx(3 * 3.43 + 2.0)
    hours = result.summary()["duration"] / 3600
    assert block["dollars"] == pytest.approx(block["dollars_per_hour"] * hours)
    assert block["requests_per_replica_min"] == block["requests_per_replica_max"] == 10
    whole = result.summary()["output_throughput"]
    assert sum(g["output_throughput"] for g in block["groups"].values()) == pytest.approx(whole)


def test_what_a_cluster_costs_is_in_a_sweep_and_in_a_comparison(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "cluster: {admission: {max_outstanding: 1}}")
    rows = sweep(path, {"cluster.replicas": [1, 2]}, out=tmp_path / "out", jobs=1)
    runs = [run(load_scenario(path, [f"cluster.replicas={n}"])) for n in (1, 2)]
    names = ["gpus", "dollars", "dollars_per_million_output_tokens", "replica_hours", "shed"]
    for row, result in zip(rows.to_dict("records"), runs, strict=True):
        assert [row[name] for name in names] == [cluster(result)[name] for name in names]
    summaries = [result.summary() for result in runs]
    told = compare_table(["one", "two"], summaries, everything=True).splitlines()
    found = {line.split("  ")[0]: line.split("  ", 1)[1].split() for line in told if "  " in line}
    assert found["GPUs"] == ["1", "2", "2.00x"]
    assert found["Requests shed"][:2] == [str(cluster(result)["shed"]) for result in runs]
    assert found["Cost of 1M output tokens ($)"][0] == (
        f"{cluster(runs[0])['dollars_per_million_output_tokens']:.2f}"
    )
    assert "Replicas failed" not in found


def test_without_tokens_a_token_has_no_price(tmp_path: Path) -> None:
    more = "cluster: {client: {timeout: 0.001}}"
    found = cluster(made(tmp_path, more))
    assert found["timed_out"] == 40
    assert found["dollars_per_million_output_tokens"] is None


def test_a_homogeneous_cluster_uses_its_gpus_as_its_only_group_does(tmp_path: Path) -> None:
    result = made(tmp_path, "cluster: {replicas: 4}")
    ours = result.summary()["headway"]
    for key in ("mfu", "bandwidth_utilization", "gpu_busy_fraction", "mean_waiting", "steps"):
        assert ours[key] == pytest.approx(cluster(result)["groups"]["all"][key])


def test_more_replicas_are_set_by_a_dotted_key(tmp_path: Path) -> None:
    assert len(made(tmp_path, "", "cluster.replicas=3").logs) == 3
    more = "cluster: {groups: {a: {replicas: 1}, b: {replicas: 1}}}"
    result = made(tmp_path, more, "cluster.groups.b.replicas=4")
    assert result.cluster.groups.count("b") == 4


def test_a_group_that_the_file_does_not_name_is_no_new_one(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + "cluster: {groups: {a: {}, b: {}}}")
    told = (
        "--set cluster.groups.c.replicas=4: cluster.groups.c: there is no group 'c'; there is a, b"
    )
    assert errors(path, ["cluster.groups.c.replicas=4"]) == [told]
    assert [*load_scenario(path, ["cluster.groups.c={replicas: 4}"]).cluster.groups] == [*"abc"]
    path.write_text(SMALL)
    made_up = [f"cluster.groups.{name}.replicas=2" for name in "ab"]
    assert [*load_scenario(path, made_up).cluster.groups] == [*"ab"]


def test_a_router_of_ones_own_is_asked(tmp_path: Path) -> None:
    (tmp_path / "my_route.py").write_text(
        "def last(request, targets):\n    return len(targets) - 1\n"
        "class Nth:\n"
        "    def __init__(self, n=0):\n        self.n = n\n"
        "    def choose(self, request, targets):\n        return self.n\n"
        "def fails(request, targets):\n    return targets[9]\n"
        "def wrong(request, targets):\n    return 9\n"
    )
    rows = made(tmp_path, "cluster: {replicas: 3, router: 'my_route:last'}").requests
    assert set(rows["replica"]) == {2}
    rows = made(tmp_path, "cluster: {replicas: 3, router: {router: 'my_route:Nth', n: 1}}").requests
    assert set(rows["replica"]) == {1}
    with pytest.raises(HeadwayError, match=r"fails\(request 0\) raised IndexError.*my_route.py:9"):
        made(tmp_path, "cluster: {replicas: 3, router: 'my_route:fails'}")
    with pytest.raises(HeadwayError, match=r"wrong\(request 0\) gave 9, which is none of"):
        made(tmp_path, "cluster: {replicas: 3, router: 'my_route:wrong'}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("{replicas: 2, router: best}", "s.yaml:6: cluster.router: no router 'best'; there are"),
        ("{replica: 2}", "s.yaml:6: cluster.replica: unknown key; did you mean replicas?"),
        ("{replicas: 0}", "s.yaml:6: cluster.replicas: must be at least 1, not 0"),
        (
            "{replicas: 2, router: {router: prefix_aware, chunks: 1}}",
            "s.yaml:6: cluster.router.chunks: prefix_aware takes no such argument; there is chunk",
        ),
        (
            "{router: {router: prefix_aware, chunk: a}}",
            "s.yaml:6: cluster.router.chunk: must be a whole number such as 64, not 'a' (tokens)",
        ),
        (
            "{router: 'no_such:f'}",
            "s.yaml:6: cluster.router: cannot load no_such:f: ModuleNot",
        ),
        ("{router: 3}", "s.yaml:6: cluster.router: must be a name or a mapping"),
        ("{groups: {a: {replicas: 0}}}", "s.yaml:6: cluster.groups: there is not one replica"),
        (
            "{replicas: 1, groups: {a: {}}}",
            "s.yaml:6: cluster.replicas: beside groups, each group gives its own replicas",
        ),
        (
            "{groups: {a: {gpu: {name: H900}}}}",
            "s.yaml:6: cluster.groups.a.gpu.name: no GPU 'H900': take a similar one",
        ),
        (
            "{groups: {a: {engine: {max_num_seq: 1}}}}",
            "s.yaml:6: cluster.groups.a.engine.max_num_seq: unknown key",
        ),
        ("{groups: {a: {replica: 1}}}", "s.yaml:6: cluster.groups.a.replica: unknown key"),
        (
            "{groups: {a: {gpu: {count: 1}, engine: {tensor_parallel_size: 2}}}}",
            "s.yaml:6: cluster.groups.a.gpu.count: must equal engine.tensor_parallel_size (2)",
        ),
    ],
)
def test_what_is_wrong_is_told_by_line_and_key(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + f"cluster: {more}\n")
    told = errors(path)
    assert any(line.startswith(message) for line in told), told


# One request holds the only seat for a second: 4 tokens of 0.25 s.
ONE_A_SECOND = """name: one-a-second
engine: {max_num_seqs: 1, enable_prefix_caching: false}
cost: {kind: linear, base: 0.25, per_token: 0, per_context: 0}
workload: {num_prompts: 400, request_rate: 3.2, input_len: 16, output_len: 4}
"""


@pytest.mark.medium
def test_the_fewest_replicas_that_hold_a_load_and_their_price(tmp_path: Path) -> None:
    """3.2 requests/s at one a second each need 4 at least, and queue up before fewer."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND + "cluster: {router: least_outstanding}\n")
    frame = plan(path, ["p90_ttft_ms<=3000"], fewest="cluster.replicas=1..64", jobs=1)
    row = frame.iloc[0]
    assert row["at"] in (4, 5)
    assert row["gpus"] == row["at"]
    assert row["dollars_per_hour"] == pytest.approx(3.43 * row["at"])
    for fewer in range(1, int(row["at"])):
        summary = run(load_scenario(path, [f"cluster.replicas={fewer}"])).summary()
        assert summary["p90_ttft_ms"] > 3000


@pytest.mark.medium
def test_the_cheapest_mix_of_two_groups(tmp_path: Path) -> None:
    """4 or 5 seats are needed; new ones serve twice as fast for less than twice the money."""
    path = tmp_path / "s.yaml"
    path.write_text(
        ONE_A_SECOND
        + """cluster:
  router: least_outstanding
  groups:
    old: {dollars_per_hour: 3.0}
    new: {dollars_per_hour: 4.0, cost: {kind: linear, base: 0.125, per_token: 0, per_context: 0}}
"""
    )
    axes = {"cluster.groups.old.replicas": [0, 5], "cluster.groups.new.replicas": [0, 1, 3]}
    frame = plan(path, ["p90_ttft_ms<=3000"], axes, cheapest=True, jobs=1)
    best = frame.iloc[0]
    names = ["cluster.groups.old.replicas", "cluster.groups.new.replicas"]
    assert [int(best[name]) for name in names] == [0, 3]
    assert best["dollars_per_hour"] == 12.0
    dearer = frame["not_tried"].notna()
    failed = frame[~frame["holds"].astype(bool) & ~dearer]
    for rows, places in ((failed, [(0, 0), (0, 1)]), (frame[dearer], [(5, 0), (5, 1), (5, 3)])):
        assert sorted(zip(*(rows[name].astype(int) for name in names), strict=True)) == places


@pytest.mark.medium
def test_more_replicas_never_hold_less(tmp_path: Path) -> None:
    """Checked, not assumed: the load grows with the replicas, the tails must not."""
    path = tmp_path / "s.yaml"
    path.write_text(ONE_A_SECOND)
    for router in ("random", "round_robin", "least_outstanding", "power_of_two"):
        tails = []
        for count in (4, 5, 6, 8, 12):
            options = [f"cluster.replicas={count}", f"cluster.router={router}"]
            tails.append(run(load_scenario(path, options)).summary()["mean_e2el_ms"])
        assert tails == sorted(tails, reverse=True), (router, tails)
