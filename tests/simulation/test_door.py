"""Limits of the queue: who comes beyond them is rejected at once (`AsyncLLM.check_admission`)."""

from dataclasses import replace

import pytest

from simulator.build.assemble_scheduler import make_scheduler
from simulator.core.log import REJECTED
from simulator.core.request import Request
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from simulator.schedulers.door import Door
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError

LOAD = {"num_prompts": 80, "request_rate": 40}
POLICIES = ("fcfs", "priority", "sjf")


def load(**blocks):
    base = {"model": "Qwen/Qwen3-8B", "gpu": "H100", "workload": LOAD}
    return load_scenario(base | blocks)


def rejected(table):
    """Follow the rule over what came of a run; return whom it rejects, by id."""
    return {int(row) for row in table.reason.nonzero()[0] if table.reason[row] == REJECTED}


def by_the_rule(result, requests, tokens):
    """Say, request by request, who is rejected, given when the others began and ended."""
    table, load = result.request_table(), result.workload
    inside, out = [], set()
    for id, now in enumerate(table.sent):
        inside = [one for one in inside if table.finish[one] > now]
        queued = sum(load.prompt_tokens[one] for one in inside if table.first_token[one] > now)
        many = requests is not None and len(inside) + 1 > requests
        if many or (tokens is not None and queued >= tokens):
            out.add(id)
        else:
            inside.append(id)
    return out


@pytest.mark.parametrize(("requests", "tokens"), [(12, None), (None, 900), (30, 700)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_rejects_whom_the_rule_rejects(requests, tokens, policy, stepwise, ranks):
    """One server counts over all its data-parallel ranks."""
    limits = {"max_num_queued_reqs": requests, "max_num_queued_tokens": tokens}
    limits |= {"scheduling_policy": policy, "max_num_seqs": 16 // ranks}
    scenario = load(engine=limits | {"data_parallel_size": ranks, "api_server_count": 1})
    result = run(scenario, stepwise=stepwise)
    out = rejected(result.request_table())
    assert 0 < len(out) < LOAD["num_prompts"]
    assert out == by_the_rule(result, requests, tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_request_at_all_is_let_in_by_a_limit_of_none(ranks):
    with pytest.warns(match="all 80 requests were rejected: engine.max_num_queued_reqs"):
        result = run(load(engine={"max_num_queued_reqs": 0, "data_parallel_size": ranks}))
    assert len(rejected(result.request_table())) == LOAD["num_prompts"]


def test_the_number_of_requests_is_looked_at_first():
    door = Door(1, 50)
    assert door.refuses(0.0) == ""
    door.enter(first := Request(0, 0.0, 60, 5))
    assert door.refuses(0.0) == "max_num_queued_reqs"
    door.requests = None
    assert door.refuses(0.0) == "max_num_queued_tokens"
    first.first_token = 1.0
    assert door.refuses(0.5) == "max_num_queued_tokens"
    assert door.refuses(1.0) == ""
    assert door.refusals == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 2}
    door.leave(first)
    assert not door.present


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ({"cluster": {"replicas": 2}}, "is not simulated with a cluster: see cluster.admission"),
        ({"cluster": {"router": "random"}}, "is not simulated with a cluster"),
        ({"engine": {"version": "0.28"}}, "which came with 0.29.0"),
        ({"engine": {"name": "sglang"}}, "is vLLM's alone"),
        (
            {"engine": {"data_parallel_size": 2, "max_num_queued_tokens": 9}},
            "each of 2 API servers counts its own: needs api_server_count: 1",
        ),
        (
            {"engine": {"api_server_count": 3, "max_num_queued_tokens": 9}},
            "each of 3 API servers counts its own",
        ),
    ],
)
def test_where_they_are_not_simulated_they_are_refused(blocks, what):
    engine = blocks.get("engine", {}) | {"max_num_queued_reqs": 5}
    with pytest.raises(HeadwayError) as raised:
        load(**blocks | {"engine": engine})
    (line,) = raised.value.messages
    assert what in line


def test_the_limits_are_before_the_scheduler_of_the_installed_vllm_too(monkeypatch):
    scenario = load(engine={"max_num_queued_reqs": 5})
    made = make_scheduler(engine_specs(scenario)[""], False)
    made.door = None
    monkeypatch.setattr("headway.vllm.assemble_installed.make_installed", lambda *_: made)
    engine = scenario.engine.model_copy(update={"scheduler": "vllm"})
    spec = replace(engine_specs(scenario)[""], engine=engine, scheduler=None)
    assert make_scheduler(spec, False).door.requests == 5
