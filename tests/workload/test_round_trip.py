"""What Headway wrote, Headway reads back: a run's requests, played again, make the same run."""

import copy
import json
import os

import numpy as np
import pytest

from calibration.server_logs.request_log import read_log, terms_of
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from simulator.workload.describe import shared_prefix_tokens
from simulator.workload.traces import read_trace
from simulator.workload.traces.write import write_timed_trace
from simulator.workload.workload import Workload
from tests.support.random_scenarios import draw_scenario

CHECKS = int(os.environ.get("HEADWAY_CHECKS", "12"))
KEPT = ("max_concurrency", "frontend", "client_latency")
"""Keys of a workload that say how its requests are sent, whatever they are."""
TIMED = {"failures", "autoscaling"}
BASE = {"model": "llama-3-8b", "gpu": {"name": "A100-80GB"}, "engine": {"name": "vllm"}, "seed": 3}
LOAD = {"num_prompts": 60, "request_rate": 20.0, "input_len": 90, "output_len": 12}
LORA = {"name": "vllm", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
IMAGES = {"image": {"tokens": 40, "distinct": 7}}
KINDS = {
    "generated": {},
    "samples": {"n": 3},
    "closed loop": {"max_concurrency": 7, "request_rate": float("inf")},
    "sessions": {"sessions": {"turns": 4, "think_time": 0.0}, "prefix_len": 50},
    "prefixes": {"prefix_groups": {"num_prefixes": 4, "prefix_len": 40}, "prefix_len": 33},
    "images": {"multimodal": IMAGES, "prefix_len": 20},
    "adapters": {"adapters": {"num_adapters": 5, "base": 0.3}},
    "priorities": {"clients": [3, 1], "priorities": [5, -2]},
    "limits": {"max_tokens": {"kind": "uniform", "low": 1, "high": 20}},
}
ENGINES = {
    "adapters": LORA,
    "images": {"name": "vllm", "multimodal_config": {"encoder_seconds": [[1, 0.004], [40, 0.02]]}},
    "priorities": {"name": "vllm", "scheduling_policy": "priority", "max_num_seqs": 4},
}


def play(tmp_path, raw, form="csv"):
    """Run a scenario; give its table, by when each was sent, as numbers."""
    import pandas as pd

    out = tmp_path / f"run{len([*tmp_path.iterdir()])}"
    write_run(run(load_scenario(raw)), out, form)
    path = out / f"requests.{form}"
    table = pd.read_csv(path) if form == "csv" else pd.read_parquet(path)
    table["sent"] = table["arrival"] + table["client_queue_time"].fillna(0.0)
    return path, table.sort_values("sent", kind="stable").reset_index(drop=True)


def check_again(tmp_path, raw, form="csv"):
    """Play what a run wrote in its own scenario; give the table."""
    path, first = play(tmp_path, raw, form)
    again = copy.deepcopy(raw)
    kept = {key: raw["workload"][key] for key in KEPT if key in raw["workload"]}
    again["workload"] = {"trace": {"path": str(path)}, **kept}
    _, second = play(tmp_path, again, form)
    assert len(first) == len(second)
    columns = ["prompt_tokens", "output_tokens", "cached_tokens", "sent"]
    if not ("sessions" in raw["workload"] and first["sent"].duplicated().any()):
        columns += ["ttft", "e2el"]  # else two that came in one nanosecond may change places
    for table in (first, second):
        table["sent"] -= table["sent"].min()
    for name in columns:
        one, other = (table[name].to_numpy(np.float64) for table in (first, second))
        assert np.allclose(one, other, rtol=0, atol=1e-6, equal_nan=True), name
    if "finish_reason" in first:
        words = [table["finish_reason"].fillna("").tolist() for table in (first, second)]
        assert words[0] == words[1]
    return first


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
@pytest.mark.parametrize("seed", range(CHECKS))
def test_drawn_scenarios(tmp_path, seed):
    """Any workload on any engine or cluster, with refusals, timeouts and retries."""
    raw = draw_scenario(seed)
    if TIMED & {*raw.get("cluster", {})}:
        pytest.skip("what comes by the clock counts from a trace's first request")
    try:
        load_scenario(raw)
    except HeadwayError:
        pytest.skip("contradicts itself")
    check_again(tmp_path, raw)


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(tmp_path, kind, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    raw = {**BASE, "engine": ENGINES.get(kind, BASE["engine"]), "workload": LOAD | KINDS[kind]}
    first = check_again(tmp_path, raw, form)
    if kind in ("samples", "sessions", "prefixes", "images"):
        assert first["cached_tokens"].sum() > 0


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_clients_that_hang_up(tmp_path):
    """A broken answer is asked for again, in full, and its client hangs up again."""
    row = {"input_length": 500, "output_length": 400}
    rows = [row | {"timestamp": 10 * k, "hash_ids": [k]} for k in range(12)]
    rows = [one | ({"cancel_after": 0.4} if k % 3 else {}) for k, one in enumerate(rows)]
    (tmp_path / "hang.jsonl").write_text("\n".join(map(json.dumps, rows)))
    raw = {**BASE, "workload": {"trace": {"path": str(tmp_path / "hang.jsonl")}}}
    first = check_again(tmp_path, raw)
    assert (first["finish_reason"] == "unfinished").sum() == 8


def test_what_was_served(tmp_path):
    """`served.jsonl`: times to the last bit, blocks, clients, adapters, hang-ups, limits, hints."""
    work = Workload(
        np.array([0.0, 0.1 + 0.2, 0.7]),
        np.array([40, 24, 16]),
        np.array([5, 9, 3]),
        segments=[
            ((("a",), 16), (("b",), 16), (("c",), 8)),
            ((("a",), 16), (("d",), 8)),
            ((("a",), 16),),
        ],
        client=["x", "", "y"],
        priority=np.array([0, -2, 3]),
        max_tokens=np.array([0, 12, 3]),
        cancel_after=np.array([np.nan, 0.25, np.nan]),
        hint=np.array([4, 0, 0]),
        model=["", "sql", ""],
    )
    path = tmp_path / "served.jsonl"
    with path.open("wb") as file:
        write_timed_trace(work, 16, file)
    again = read_trace(path)
    for name in ("arrival", "prompt_tokens", "output_tokens", "priority", "max_tokens", "hint"):
        assert getattr(again, name).tolist() == getattr(work, name).tolist(), name
    assert np.array_equal(again.cancel_after, work.cancel_after, equal_nan=True)
    assert (again.client, again.model) == (["x", "-", "y"], work.model)
    assert shared_prefix_tokens(again) == shared_prefix_tokens(work) == 32
    assert [sum(count for _, count in parts) for parts in again.segments] == [40, 24, 16]


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_a_fleet_of_several_models(tmp_path):
    groups = {"small": {"model": "llama-3-8b"}, "other": {"model": "llama-2-7b"}}
    load = LOAD | {"models": {"llama-3-8b": 2, "llama-2-7b": 1}}
    first = check_again(tmp_path, {**BASE, "cluster": {"groups": groups}, "workload": load})
    assert first["model"].nunique() == 2


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_clients_that_try_again(tmp_path):
    """The tries of a request are in its row, and come again where they were."""
    client = {"max_retries": 3, "backoff": 0.2, "jitter": 0.1}
    cluster = {"admission": {"max_outstanding": 8}, "client": client}
    load = LOAD | {"request_rate": 400.0}
    first = check_again(tmp_path, {**BASE, "cluster": cluster, "workload": load})
    assert (first["retry_time"] > 0).any()


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_calibration_on_what_a_run_wrote_is_not_off(tmp_path, kind):
    """Its own scenario simulates the latencies that its file has."""
    raw = {**BASE, "engine": ENGINES.get(kind, BASE["engine"]), "workload": LOAD | KINDS[kind]}
    path, _ = play(tmp_path, raw)
    log = read_log(path, load_scenario(raw))
    simulated, measured = log.simulate(terms_of(log.cost)), log.measured()
    for name in ("ttft", "e2el"):
        off = np.nanmean(simulated[name]) / np.nanmean(measured[name]) - 1
        assert abs(off) < (5e-3 if kind == "sessions" else 1e-5), name


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
@pytest.mark.parametrize("ended", ["rejected", "unfinished", "timeout", "shed"])
def test_a_first_request_without_an_answer_shares_nothing(tmp_path, ended):
    """Its cell of whom it shares with is empty, as that of others that share nothing."""
    text = (
        "id,arrival,prompt_tokens,output_tokens,asked_output_tokens,prefix_request,prefix_tokens,"
    )
    rows = [f"0,0,90,0,5,,0,{ended}", "1,1,90,5,5,0,40,stop"]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join([f"{text}finish_reason", *rows]) + "\n")
    again = read_trace(path)
    assert again.output_tokens.tolist() == [5, 5]
    assert again.segments[1][0] == (again.segments[0][0][0], 40)
