"""Scenarios that prefill and decode on different replicas: what they say, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from headway.figures import Run
from headway.report.html.page import page
from headway.report.timeline import write_timeline
from headway.runs.explain import explain
from simulator.scenario.load import load_scenario
from simulator.simulation.result import Result
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.support.scenarios import SMALL, errors

APART = """cluster:
  kv_transfer: {bandwidth: 10, latency: 2}
  groups:
    prefill: {replicas: 1, kv_role: kv_producer}
    decode: {replicas: 2, kv_role: kv_consumer}
"""


def made(folder: Path, more: str = APART, *overrides: str) -> Result:
    path = folder / "s.yaml"
    path.write_text(SMALL + more)
    return run(load_scenario(path, overrides))


def test_a_lone_request_takes_two_steps_and_its_bytes(tmp_path: Path) -> None:
    """8 KV heads of 128 in 32 layers and bf16: 131,072 bytes a token, 125 blocks of 16 tokens."""
    cost = "{kind: linear, base: 0.01, per_token: 1e-5, per_context: 1e-7}"
    options = (
        *("workload.num_prompts=1", "workload.input_len=2000", "workload.output_len=1"),
        *(f"cost={cost}", "engine.max_num_batched_tokens=4000", "model=llama-3-8b"),
    )
    options += ("engine.num_gpu_blocks_override=1000",)
    for bandwidth, latency in ((10, 2), (1, 0), (1_000_000, 0)):
        link = (
            f"cluster.kv_transfer.bandwidth={bandwidth}",
            f"cluster.kv_transfer.latency={latency}",
        )
        result = made(tmp_path, APART, *options, *link)
        row = result.requests.iloc[0]
        seconds = 125 * 16 * 131072 / (bandwidth * 1e9) + latency / 1e3
        assert row["transfer_time"] == pytest.approx(seconds)
        prompt, token = 0.01 + 2000e-5, 0.01 + 1e-5 + 2000e-7
        assert row["prefill_time"] == pytest.approx(prompt + token)
        assert row["ttft"] == pytest.approx(prompt + seconds + token)
        links = result.summary()["headway"]["cluster"]["kv_transfer"]
        assert links["bytes"] == 125 * 16 * 131072
        assert links["mean_transfer_time_ms"] == pytest.approx(1e3 * seconds)
        busy = (seconds - latency / 1e3) / result.summary()["duration"]
        assert links["link_utilization"] == pytest.approx(busy)


def test_the_parts_of_the_time_are_the_whole(tmp_path: Path) -> None:
    more = APART + "  failures: {outages: [{replica: 2, start: 1.0, duration: 1.0}]}\n"
    result = made(tmp_path, more, "engine.num_gpu_blocks_override=15", "workload.output_len=60")
    rows = result.requests
    parts = ["queue_time", *result.time_parts()]
    assert {"transfer_time", "decode_queue_time"} <= set(parts)
    np.testing.assert_allclose(rows[parts].sum(axis=1), rows["e2el"], atol=1e-9)
    assert rows["preemptions"].sum() > 0
    assert rows["recompute_time"].sum() > 0
    assert set(rows["prefill_replica"]) == {0}
    assert set(rows["replica"]) == {1, 2}
    summary = result.summary()
    assert summary["mean_transfer_time_ms"] == pytest.approx(1e3 * rows["transfer_time"].mean())
    groups = summary["headway"]["cluster"]["groups"]
    assert groups["prefill"]["output_tokens"] == 0
    assert groups["decode"]["output_tokens"] == summary["total_output_tokens"]
    assert groups["decode"]["completed"] == 40


def test_the_halves_do_the_work_of_the_whole(tmp_path: Path) -> None:
    """Needed FLOPs: the same answers need the same, and the last prompt token once more."""
    flops = []
    for more in (APART, "cluster: {replicas: 3}"):
        ours = made(tmp_path, more).summary()
        flops.append(ours["headway"]["mfu"] * ours["duration"])
    assert 1.0 < flops[0] / flops[1] < 1.05


def test_a_group_scales_and_both_routers_are_asked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def last(request, targets):\n    return len(targets) - 1\n"
        "def wrong(request, targets):\n    return -1\n"
    )
    key = "cluster.kv_transfer.router"
    rows = made(tmp_path, APART, f"{key}=own:last").requests
    assert set(rows["replica"]) == {2}
    with pytest.raises(HeadwayError, match=r"^cluster.kv_transfer.router: wrong\(request 0\)"):
        made(tmp_path, APART, f"{key}=own:wrong")
    more = (
        APART + "  autoscaling: {group: decode, interval: 0.1, startup_delay: 0.1, target: 0.1}\n"
    )
    result = made(tmp_path, more, "engine.max_num_seqs=1")
    assert result.summary()["headway"]["cluster"]["scalings"] > 0
    assert result.requests["replica"].nunique() > 2


def test_what_is_said_of_a_request(tmp_path: Path) -> None:
    result = made(tmp_path)
    write_run(result, tmp_path / "out")
    told = explain(tmp_path / "out", 3)
    assert "scheduled for the first time by replica 0" in told
    assert "transfer of its KV cache from the replica that prefilled it" in told
    write_timeline(result, tmp_path / "t.json")
    names = [e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert names.count("KV transfer") == 2 * 40  # begin and end
    assert "KV transfer" in page([Run.read(tmp_path / "out", "one")])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "{kv_transfer: {}, groups: {a: {kv_role: kv_consumer}}}",
            "s.yaml:6: cluster.groups: there is no replica of kv_role kv_producer",
        ),
        (
            "{kv_transfer: {}, replicas: 2}",
            "s.yaml:6: cluster.kv_transfer: needs groups of kv_role kv_producer and",
        ),
        (
            "{groups: {a: {kv_role: kv_producer}, b: {kv_role: kv_consumer}}}",
            "s.yaml:6: cluster.kv_transfer: groups with kv_role need it: {bandwidth: GB/s,",
        ),
        (
            "{kv_transfer: {}, groups: {a: {kv_role: kv_producer}, b: {}}}",
            "s.yaml:6: cluster.groups.b.kv_role: kv_producer or kv_consumer, as other groups",
        ),
        (
            "{kv_transfer: {}, groups: {a: {kv_role: kv_both}}}",
            "s.yaml:6: cluster.groups.a.kv_role: must be 'kv_producer' or 'kv_consumer', not",
        ),
        (
            "{kv_transfer: {bandwith: 1}}",
            "s.yaml:6: cluster.kv_transfer.bandwith: unknown key; did you mean bandwidth?",
        ),
        (
            "{kv_transfer: {bandwidth: 0}}",
            "s.yaml:6: cluster.kv_transfer.bandwidth: must be at least 1e-06, not 0",
        ),
    ],
)
def test_what_is_wrong_is_told_by_line_and_key(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + f"cluster: {more}\n")
    told = errors(path)
    assert len(told) == 1, told
    assert told[0].startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("kv_transfer.router=best", "kv_transfer.router: no router 'best'; there are round_robin"),
        ("groups.decode.engine.block_size=32", "block_size: must be that of prefill (16), not 32"),
        (
            "groups.decode.engine.kv_cache_dtype=fp8",
            "kv_cache_dtype: must be that of prefill (bfloat16)",
        ),
        ("groups.prefill.engine.preemption_mode=swap", "preemption_mode: a group with kv_role"),
        ("groups.decode.engine.scheduling_policy=static", "scheduling_policy: static passes no KV"),
        (
            "groups.decode.model=llama-2-7b",
            "kv_transfer: needs one model, without groups that have",
        ),
    ],
)
def test_groups_that_do_not_go_together_are_refused(tmp_path, override, message) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + APART)
    told = errors(path, [f"cluster.{override}"])
    assert len(told) == 1, told
    assert message in told[0]


def test_tensor_parallel_sizes_may_differ_by_a_factor(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL + APART)

    def of(first: int, second: int) -> list[str]:
        return [
            *(f"cluster.groups.prefill.gpu={{name: A100-80GB, count: {first}}}",),
            *(f"cluster.groups.decode.gpu={{name: A100-80GB, count: {second}}}",),
            *(f"cluster.groups.prefill.engine.tensor_parallel_size={first}",),
            *(f"cluster.groups.decode.engine.tensor_parallel_size={second}",),
        ]

    load_scenario(path, of(2, 4))
    load_scenario(path, of(4, 2))
