"""What Headway wrote, Headway reads back: a run's requests, played again, make the same run."""

import copy
import json
import os
from random import Random

import numpy as np
import pytest

from calibration.server_logs.request_log import read_log, terms_of
from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.traces import read_trace
from simulator.workload.traces.write import write_timed_trace
from simulator.workload.workload import Workload
from tests.support.random_scenarios import draw_scenario

CHECKS = int(os.environ.get("HEADWAY_CHECKS", "12"))
KEPT = ("max_concurrency", "frontend", "client_latency")
"""Keys of a workload that say how its requests are sent, whatever they are."""
ROUTED = ("prefix_hash", "session_hash", "session_affinity")
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
    table["sent"] = (table["arrival"] + table["client_queue_time"].fillna(0.0)).round(7)
    return path, table.sort_values(["sent", "id"]).reset_index(drop=True)


def check_again(tmp_path, raw, form="csv"):
    """Play what a run wrote in its own scenario; give the table."""
    path, first = play(tmp_path, raw, form)
    again = copy.deepcopy(raw)
    kept = {key: raw["workload"][key] for key in KEPT if key in raw["workload"]}
    again["workload"] = {"trace": {"path": str(path)}, **kept}
    _, second = play(tmp_path, again, form)
    assert len(first) == len(second)
    columns = ["prompt_tokens", "output_tokens", "cached_tokens", "sent"]
    late = first["sent"][first["sent"] > first["sent"].min()]
    close = {"sessions", "burstiness"} & {*raw["workload"]} and late.duplicated().any()
    if not close:
        columns += ["ttft", "e2el"]  # else two of one nanosecond change places, or share a step
    elif "max_concurrency" in raw["workload"]:  # and with them what is sent after their answers
        first, second = (
            one.sort_values(["prompt_tokens", "output_tokens"]) for one in (first, second)
        )
        columns = ["prompt_tokens", "output_tokens"]
    for table in (first, second):
        table["sent"] -= table["sent"].min()
    for name in columns:
        one, other = (table[name].to_numpy(np.float64) for table in (first, second))
        assert np.allclose(one, other, rtol=0, atol=1e-6, equal_nan=True), name
    if "finish_reason" in first:
        words = [table["finish_reason"].fillna("").tolist() for table in (first, second)]
        assert words[0] == words[1]
    return first


def draw(folder, seed):
    """Return a scenario of any workload on any engine or cluster, in turn with more of a kind."""
    rng, raw = Random(f"round trip {seed}"), draw_scenario(seed)
    kept = {key: raw["engine"][key] for key in ("max_num_seqs", "max_num_batched_tokens")}
    load, kind = raw["workload"], seed % 5
    if kind == 0:
        load["adapters"] = {"num_adapters": rng.randint(1, 6), "base": rng.choice([0.0, 0.3])}
        raw = {**BASE, "engine": LORA | kept, "workload": load}
    elif kind == 1:
        groups = {"small": {"model": "llama-3-8b"}, "other": {"model": "llama-2-7b"}}
        load["models"] = {"llama-3-8b": rng.randint(1, 3), "llama-2-7b": 1}
        raw = {**BASE, "engine": {"name": "vllm"} | kept, "workload": load}
        raw["cluster"] = {"groups": groups, "client": {"timeout": 2.0, "max_retries": 1}}
    elif kind == 2:  # clients of a trace that hang up
        path = folder / f"drawn{seed}.jsonl"
        rows = [{"timestamp": rng.randint(0, 4000), "input_length": rng.randint(1, 150)}
                | {"output_length": rng.randint(1, 60), "hash_ids": [rng.randint(0, 3)]}
                | ({"cancel_after": rng.uniform(0.02, 0.5)} if rng.random() < 0.5 else {})
                for _ in range(rng.choice([1, 30, 90]))]  # fmt: skip
        path.write_text("\n".join(map(json.dumps, sorted(rows, key=lambda row: row["timestamp"]))))
        sent = {key: load[key] for key in ("max_concurrency", "frontend") if key in load}
        raw["workload"] = {"trace": {"path": str(path), "hash_block_size": 150}, **sent}
    return raw


FEATURES = {
    "sessions": lambda raw: "sessions" in raw["workload"],
    "prefixes": lambda raw: {"prefix_len", "prefix_groups"} & {*raw["workload"]},
    "images": lambda raw: "multimodal" in raw["workload"],
    "adapters": lambda raw: "adapters" in raw["workload"],
    "several models": lambda raw: "models" in raw["workload"],
    "cancels": lambda raw: "trace" in raw["workload"],
    "retries": lambda raw: "max_retries" in raw.get("cluster", {}).get("client", {}),
    "priorities": lambda raw: "priorities" in raw["workload"],
    "closed loop": lambda raw: "max_concurrency" in raw["workload"],
}


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_turns_that_are_sent_at_once_keep_their_order(tmp_path):
    """As answers of equal length end in one step: which turn came first is told by its TTFT."""
    load = LOAD | {"sessions": {"turns": 5, "think_time": 0.0}, "request_rate": 60.0}
    engine = {"name": "vllm", "max_num_seqs": 16}
    load |= {"num_prompts": 200, "range_ratio": 0.8}
    path, first = play(tmp_path, BASE | {"workload": load, "engine": engine})
    again = {"workload": {"trace": {"path": str(path)}}, "engine": engine}
    _, second = play(tmp_path, BASE | again)
    assert first["sent"].duplicated().sum() == 52
    one, other = (table["ttft"].sort_values().to_numpy() for table in (first, second))
    assert np.allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_what_is_drawn(tmp_path):
    """Each feature, and most of the scenarios can be run."""
    drawn = [draw(tmp_path, seed) for seed in range(60)]
    played = [raw for raw in drawn if not says_less(raw) and loads(raw)]
    assert len(played) >= 40
    assert [name for name, has in FEATURES.items() if sum(map(bool, map(has, played))) < 2] == []


def says_less(raw):
    """Return whether a run's file does not carry something of it: reading says what."""
    cluster = raw.get("cluster", {})
    return bool({"failures", "autoscaling"} & {*cluster}) or cluster.get("router") in ROUTED


def loads(raw):
    """Return whether a scenario does not contradict itself."""
    try:
        load_scenario(raw)
    except HeadwayError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
@pytest.mark.parametrize("seed", range(CHECKS))
def test_drawn_scenarios(tmp_path, seed):
    """With refusals, timeouts and retries; see `draw`."""
    raw = draw(tmp_path, seed)
    if not loads(raw):
        pytest.skip("contradicts itself")
    if says_less(raw):
        with pytest.warns(match="its run had (failures|autoscaling|router)"):
            read_trace(play(tmp_path, raw)[0])
    else:
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
