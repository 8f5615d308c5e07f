"""Who got how much: by hand, against plain loops over every token, in leaps as stepwise."""

import csv
from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import run
from simulator.core.log import Log
from simulator.results.fairness import (
    Clients,
    client_columns,
    client_weights,
    fairness_columns,
    several_clients,
    summarize_clients,
)
from simulator.results.request_table import client_column, gather_requests
from simulator.scenario.load import load_scenario
from simulator.simulation.write import write_run
from simulator.workload.workload import Workload
from tests.support.engines import Clock, fcfs, play, workload
from tests.support.logs import TICK
from tests.support.scenarios import SMALL

SCENARIO = {"model": "tiny-test", "cost": {"kind": "linear", "base": 0.01}}
CLOCK = Clock(base=0.25, per_token=1 / 128, per_context=1 / 1024)
times = st.integers(0, 400).map(lambda n: n * TICK)
rows = st.tuples(times, st.integers(1, 30), st.integers(1, 30), st.sampled_from("abc"))


def served(load: Workload, seats: int = 2, leap: bool = True, clock: object = None) -> Clients:
    """Run a workload first come, first served."""
    log, client = play(load, fcfs(max_num_seqs=seats), clock, leap)
    table = gather_requests(load, np.frombuffer(client.sent), [log])
    words = client_column(load)
    return Clients(table, [log], words, np.arange(1.0, len(words.names) + 1))


def tokens_of(log: Log) -> list[tuple[float, int]]:
    """List every token: when it came out, and whose request's it is."""
    return [
        (time, int(run["id"]))
        for run in log.runs
        for time in (
            float(run["start"]),
            *log.tick_ends[run["first_tick"] : run["first_tick"] + run["ticks"]],
        )
    ]


def test_shares_by_hand() -> None:
    """One seat, a step takes 1 s: a, b and a again run 4 s each; b's second waits to the end.

    Windows of 1.6 s. Who waits throughout: a until 8 s, b (from 0) until 4 s and from 4 to 12 s.
    """
    load = workload(*[(0, 5, 4)] * 4, client=["a", "b", "a", "b"])
    clients = served(load, seats=1)
    clients.weights[:] = 1
    windows = fairness_columns(clients)
    assert windows["end"][0] == 1.6
    assert windows["backlogged"].tolist() == [2, 2, 2, 2, 2, 1, 1, 0, 0, 0]
    # Service by window: prompts 5 at 0, 4, 8, 12 s; 2 at each whole second up to 16 s.
    # a: 5 + 2 | 2 + 2 | 2 (at 4 s) | 0 | 0; b: 0 | 0 | 5 | 2 + 2 | 2 (8 s is an edge)
    assert windows["window_difference"].tolist()[:5] == [7, 4, 3, 4, 2]
    assert windows["service_difference"].tolist()[:5] == [7, 11, 8, 4, 2]
    assert np.isnan(windows["window_difference"][5:]).all()
    assert windows["jain_index"].tolist()[:5] == [0.5, 0.5, 49 / 58, 0.5, 0.5]
    summary = summarize_clients(clients)
    assert summary["clients"] == 2
    assert summary["contended_share"] == 0.5
    assert summary["jain_index"] == pytest.approx((4 * 0.5 + 49 / 58) / 5)
    assert (summary["service_difference_mean"], summary["service_difference_max"]) == (6.4, 11)


def test_windows_last_a_minute_at_most() -> None:
    """A run of 700 s that begins after 100 s has twelve, to its end."""
    clients = served(workload((100, 5, 700), (100, 5, 9), client=["a", "b"]))
    windows = fairness_columns(clients)
    assert clients.span == (100, 800)
    assert len(windows["start"]) == 12
    assert windows["start"].tolist() == pytest.approx([100 + 700 / 12 * i for i in range(12)])
    assert windows["end"][-1] == 800


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=15), st.integers(1, 3))
def test_shares_are_those_of_every_token_listed(requests, seats) -> None:
    """Also: who is backlogged, by looking at all times that matter."""
    requests = sorted(requests)
    load = workload(*(row[:3] for row in requests), client=[row[3] for row in requests])
    clients = served(load, seats, clock=CLOCK)
    table = clients.table
    span = clients.span
    windows = fairness_columns(clients)
    prompts = [
        (float(t), i, int(p))
        for i, (t, p) in enumerate(zip(table.first_scheduled, load.prompt_tokens, strict=True))
    ]
    tokens = [(time, owner, 2) for time, owner in tokens_of(clients.logs[0])]
    codes = clients.codes

    def got(client: int, low: float, high: float) -> float:
        last = high == span[1]
        inside = [
            amount
            for time, owner, amount in (*prompts, *tokens)
            if codes[owner] == client and (low <= time < high or (last and time == high))
        ]
        return sum(inside) / clients.weights[client]

    def waits(client: int, time: float) -> bool:
        return any(
            codes[i] == client and table.sent[i] <= time < table.first_scheduled[i]
            for i in range(len(load))
        )

    moments = np.concatenate([table.sent, table.first_scheduled, windows["start"], windows["end"]])
    for number, (low, high) in enumerate(zip(windows["start"], windows["end"], strict=True)):
        looks = {low, *(time for time in moments if low <= time < high)}
        there = [
            client
            for client in range(len(clients.words.names))
            if all(waits(client, time) for time in looks)
        ]
        assert windows["backlogged"][number] == len(there)
        if len(there) < 2:
            assert np.isnan(windows["jain_index"][number])
            continue
        values = [got(client, low, high) for client in there]
        squares = sum(value * value for value in values)
        index = sum(values) ** 2 / (len(values) * squares) if squares else 1.0
        assert windows["jain_index"][number] == pytest.approx(index)
        assert windows["window_difference"][number] == max(values) - min(values)
        since = [got(client, span[0], high) for client in there]
        assert windows["service_difference"][number] == max(since) - min(since)


@settings(max_examples=20, deadline=None)
@given(st.lists(rows, min_size=1, max_size=15))
def test_shares_are_the_same_in_leaps_as_stepwise(requests) -> None:
    """To the last bit."""
    requests = sorted(requests)
    load = workload(*(row[:3] for row in requests), client=[row[3] for row in requests])
    one, two = (served(load, leap=leap, clock=CLOCK) for leap in (True, False))
    for columns in (fairness_columns, client_columns):
        pair = zip(columns(one).items(), columns(two).values(), strict=True)
        for (name, a), b in pair:
            if name != "client":
                assert np.array_equal(a, b, equal_nan=True), name


def test_a_client_has_the_statistics_of_its_requests() -> None:
    """Mean and P99 as numpy computes them; NaN where there is nothing."""
    load = workload(
        *[(0.3 * k, 3 + k % 5, 1 + k % 4) for k in range(21)],
        client=["x" if k == 9 else "yz"[k % 2] for k in range(21)],
    )
    load.output_tokens[9] = 1  # no TPOT
    clients = served(load)
    columns = client_columns(clients)
    names = clients.words.names
    assert names == ["y", "z", "x"]
    for code, name in enumerate(names):
        mine = np.array([client == name for client in load.client])
        assert columns["requests"][code] == columns["completed"][code] == mine.sum()
        prompt, output = load.prompt_tokens[mine].sum(), load.output_tokens[mine].sum()
        assert columns["service"][code] == (prompt + 2 * output) / (code + 1)
        ttft = clients.table.ttft[mine]
        assert columns["mean_ttft"][code] == pytest.approx(ttft.mean())
        assert columns["p99_ttft"][code] == pytest.approx(np.percentile(ttft, 99))
    assert np.isnan(columns["p99_tpot"][2])


@pytest.mark.parametrize(
    "given", [None, 3, {"client-0": "high"}, {"client-0": 0}, {"client-0": [1, 2]}, {1: 2.0}, {}]
)
def test_weights_that_are_no_shares(given) -> None:
    """A policy of one's own may mean anything by the word: clients are then alike."""
    policy = {"policy": "own:Policy", "weights": given}
    assert client_weights(policy, ["client-0", "client-1"]).tolist() == [1, 1]
    assert client_weights({}, ["client-0"]).tolist() == [1]
    assert client_weights({"weights": {"client-0": 0.5}}, ["client-0", "a"]).tolist() == [0.5, 1]


def test_files_and_keys_come_with_several_clients_alone(write, tmp_path) -> None:
    """A policy's weights count; one client has nobody to share with."""
    text = SMALL.replace("output_len: 8", "output_len: 80, clients: [3, 1]")
    weights = "engine.scheduling_policy={policy: fair, weights: {client-0: 3}}"
    result = run(load_scenario(write(text), [weights, "engine.max_num_seqs=1"]))
    files = write_run(result, tmp_path / "out")
    assert {"clients.csv", "fairness.csv"} < {file.name for file in files}
    with (tmp_path / "out/clients.csv").open() as file:
        table = {row["client"]: row for row in csv.DictReader(file)}
    assert {name: row["weight"] for name, row in table.items()} == {
        "client-0": "3.000000000",
        "client-1": "1.000000000",
    }
    assert sum(int(row["output_tokens"]) for row in table.values()) == 40 * 80
    own = result.summary()["headway"]
    assert own["clients"] == 2
    assert own["jain_index"] > 0.7
    assert {file.name for file in write_run(result, tmp_path / "packed", "parquet")} > {
        "clients.parquet",
        "fairness.parquet",
    }
    alone = run(load_scenario(write(SMALL)))
    assert "clients" not in alone.summary()["headway"]
    assert "clients.csv" not in {file.name for file in write_run(alone, tmp_path / "alone")}


def test_who_has_company() -> None:
    """Names alone do not make several clients."""
    assert not several_clients(workload((0, 1, 1)))
    assert not several_clients(workload((0, 1, 1), (0, 1, 1), client=["a", "a"]))
    assert several_clients(workload((0, 1, 1), (0, 1, 1), client=["a", "b"]))


def test_requests_that_name_no_client_are_one(tmp_path) -> None:
    """Some bodies of `serve` have no `user`; their cells in requests.csv stay empty."""
    load = workload(*[(0.3 * k, 3 + k, 2) for k in range(4)], client=["", "a", "", "b"])
    result = run(SCENARIO, workload=load)
    assert {"clients.csv"} < {file.name for file in write_run(result, tmp_path)}
    with (tmp_path / "clients.csv").open() as file:
        table = {row["client"]: int(row["requests"]) for row in csv.DictReader(file)}
    assert table == {"": 2, "a": 1, "b": 1}
    parts = result.summary()["headway"]["per_client"]
    assert {name: part["requests"] for name, part in parts.items()} == table
    with (tmp_path / "requests.csv").open() as file:
        assert [row["client"] for row in csv.DictReader(file)] == load.client


def test_nobody_waits() -> None:
    """Then there is no index; nor where nothing was served."""
    load = workload((0, 5, 4), (50, 5, 4), client=["a", "b"])
    assert summarize_clients(served(load)) == {
        "clients": 2,
        "fairness_windows": 10,
        "contended_share": 0.0,
        "jain_index": None,
        "jain_index_min": None,
        "service_difference_mean": None,
        "service_difference_max": None,
    }
    table = gather_requests(load, np.array([nan, nan]), [])
    nothing = Clients(table, [], client_column(load), np.ones(2))
    assert summarize_clients(nothing)["jain_index"] is None
    assert client_columns(nothing)["completed"].tolist() == [0, 0]
