"""What a policy would read of a workload and does not find is told; clients drawn for a trace."""

import pytest

from simulator.build.policy_table import missing_inputs
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve_groups
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.scenarios import SMALL, errors

CSV = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{k / 10},{40 + k},{5 + k}\n" for k in range(20)
)
TRACE = SMALL.replace(
    "{num_prompts: 40, request_rate: 20, input_len: 64, output_len: 8}", "{trace: {path: t.csv}}"
)


@pytest.fixture
def traced(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    path = tmp_path / "s.yaml"
    path.write_text(TRACE)
    return lambda *overrides: load_scenario(path, overrides)


def missing(scenario) -> list[str]:
    admission = scenario.cluster and scenario.cluster.admission
    specs = resolve_groups(scenario).values()
    lines = missing_inputs(specs, make_workload(scenario), admission)
    return [line.split(",")[0] for line in lines]


TWO = "workload.clients=2"
RANKED = "workload.priorities=[0, 5]"
POLICY = "engine.scheduling_policy"


def test_prompts_with_contents_without_a_prefix_cache():
    """It is among the warnings of the result, too."""
    said = ["tgi has no prefix cache: engine.enable_prefix_caching has no effect"]
    asks = {"scheduling_policy": "tgi", "async_scheduling": False, "enable_prefix_caching": True}
    for prefix, lines in ((0, []), (32, said)):
        load = {"num_prompts": 4, "input_len": 64, "prefix_len": prefix}
        scenario = load_scenario({"model": "tiny-test", "engine": asks, "workload": load})
        assert missing(scenario) == lines


@pytest.mark.parametrize("policy", ["priority", "preemptive"])
def test_without_priorities(traced, policy):
    chosen = f"{POLICY}={policy}"
    said = [f"{POLICY}: {policy}: all requests have the same priority"]
    assert missing(traced(chosen)) == said
    assert missing(traced(chosen, TWO)) == said
    assert missing(traced(chosen, TWO, "workload.priorities=[3, 3]")) == said
    assert missing(traced(chosen, TWO, RANKED)) == []


def test_priorities_that_nobody_reads(traced):
    """First come, first served is the default: that it ignores them is said, and what does not."""
    said = [f"{POLICY}: fcfs: ignores the requests' priorities"]
    assert missing(traced(TWO, RANKED)) == said
    assert missing(traced(TWO, "workload.priorities=[3, 3]")) == []
    assert missing(traced(TWO, RANKED, f"{POLICY}=fair")) == []
    with pytest.warns(HeadwayWarning, match="which `priority` and `preemptive` read"):
        run(traced(TWO, RANKED))


@pytest.mark.parametrize("policy", ["fair", "wfq", "drr"])
def test_with_one_client(traced, policy):
    chosen = f"{POLICY}={policy}"
    said = [f"{POLICY}: {policy}: all requests are of one client"]
    assert missing(traced(chosen)) == said
    assert missing(traced(chosen, "workload.clients=1")) == said
    assert missing(traced(chosen, TWO)) == []


@pytest.mark.parametrize("policy", ["sjf", "hrrn", "boost"])
def test_a_predictor_that_nobody_asks(traced, policy):
    by_prompt, predictor = f"{POLICY}={policy}", "predictor=oracle"
    said = [f"predictor: {policy} ranks by the prompt alone; by: hint or total reads it"]
    assert missing(traced(by_prompt)) == []
    assert missing(traced(by_prompt, predictor)) == said
    assert missing(traced(f"{POLICY}={{policy: {policy}, by: hint}}", predictor)) == []


def test_lengths_that_nobody_knows(traced):
    chosen = f"{POLICY}=virtual-finish-time"
    said = [f"{POLICY}: virtual-finish-time: knows nothing of the lengths of answers"]
    assert missing(traced(chosen)) == said
    assert missing(traced(chosen, "predictor=oracle")) == []
    assert missing(traced(chosen, "workload.max_tokens=9")) == []
    weights = f"{POLICY}={{policy: virtual-finish-time, weights: {{client-9: 3}}}}"
    said = [f"{POLICY}: virtual-finish-time: no request is of client 'client-9'"]
    assert missing(traced(weights, TWO, "predictor=oracle")) == said


def test_deadlines_by_default(traced):
    assert missing(traced(f"{POLICY}=deadline")) == [f"{POLICY}: deadline: has no deadlines"]
    assert missing(traced(f"{POLICY}={{policy: deadline, ttft: 100}}")) == []


def test_a_client_that_never_comes(traced):
    policy = f"{POLICY}={{policy: fair, weights: {{client-0: 2, client-9: 3}}}}"
    assert missing(traced(policy, TWO)) == [f"{POLICY}: fair: no request is of client 'client-9'"]


def test_deadlines_of_clients_where_nobody_is_named(traced):
    policy = f"{POLICY}={{policy: deadline, clients: {{gold: {{ttft: 100}}}}}}"
    assert missing(traced(policy)) == [f"{POLICY}: deadline: no request is of client 'gold'"]


def test_shedding_by_priority(traced):
    shed = ("cluster.replicas=2", "cluster.admission={max_outstanding: 9, shed_from: 0.5}")
    said = "cluster.admission.shed_from: no request has a priority of 1 or more"
    assert missing(traced(*shed)) == [said]
    assert missing(traced(*shed, TWO, RANKED)) == []


def test_a_policy_that_reads_nothing_lacks_nothing(traced):
    assert missing(traced()) == []


@pytest.mark.parametrize("more", [(), ("cluster.replicas=2",)])
def test_every_kind_of_run_tells_it_once(traced, more):
    scenario = traced(f"{POLICY}=priority", *more)
    with pytest.warns(HeadwayWarning, match="same priority"):
        result = run(scenario)
    assert len([text for text in result.warnings if "same priority" in text]) == 1
    with pytest.warns(HeadwayWarning, match="same priority"):
        summary = run_streamed(scenario)
    assert len([text for text in summary["headway"]["warnings"] if "same priority" in text]) == 1


def test_the_urgent_of_a_trace_go_first(traced, tmp_path):
    """With one seat, whoever waits is served by its number, not by its arrival."""
    rows = ["0,9,9,5", "0.001,9,9,4", "0.002,9,9,3", "0.003,9,9,-2"]
    header = "arrived_at,num_prefill_tokens,num_decode_tokens,priority"
    (tmp_path / "t.csv").write_text("\n".join([header, *rows]))
    result = run(traced("engine.max_num_seqs=1", f"{POLICY}=priority"))
    assert result.requests.sort_values("ttft").index.tolist() == [0, 3, 2, 1]


def test_clients_are_drawn_for_a_trace_as_for_a_generator(traced):
    workload = make_workload(traced("workload.clients=[3, 1]", RANKED))
    generated = make_workload(
        load_scenario("demo", ["workload={num_prompts: 20, clients: [3, 1]}", "engine={}"])
    )
    assert workload.client == generated.client
    assert workload.priority.tolist() == [5 * (name == "client-1") for name in workload.client]


def test_a_session_has_one_client(traced, tmp_path):
    turns = "".join(
        f'{{"session_id": {k % 3}, "{"timestamp" if k < 3 else "delay"}": {k}, '
        '"input_length": 9, "output_length": 9}\n'
        for k in range(12)
    )
    (tmp_path / "t.jsonl").write_text(turns)
    scenario = traced("workload={trace: {path: t.jsonl}, clients: 50}")
    clients = make_workload(scenario).client
    assert len({*clients}) == 3
    assert clients == clients[:3] * 4


def test_bad_clients_beside_a_trace(traced, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(TRACE.replace("t.csv}", "t.csv}, clients: 0, priorities: [1]"))
    assert errors(path) == [
        "s.yaml:4: workload.clients: must be at least 1, not 0 (their number, a list of weights, "
        "or {name: weight}; null: requests name no client)",
        "s.yaml:4: workload.priorities: needs clients: how urgent the requests of each "
        "are (one per client; smaller is more urgent)",
    ]


def test_two_sources_of_clients(traced, tmp_path):
    named = CSV.replace("\n", ",client\n", 1).replace("\n", ",a\n").replace("client,a", "client")
    (tmp_path / "t.csv").write_text(named)
    with pytest.raises(HeadwayError, match=r"clients: the trace names the client of each"):
        make_workload(traced(TWO))
