"""Each rule of the diagnosis: a scenario that triggers it, and one that does not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from simulator import load_scenario, run
from simulator.diagnosis.rules import SHOWN, diagnosis_lines

CALM = """name: calm
engine: {name: textbook,
  max_num_seqs: 16, max_num_batched_tokens: 512, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 60, request_rate: 8, input_len: 64, output_len: 50}
goodput: {ttft: 1000}
"""
PAIR = """name: pair
engine: {name: textbook,
  max_num_seqs: 4, block_size: 4, num_gpu_blocks_override: 6, enable_prefix_caching: false,
         max_model_len: 16}
cost: {kind: linear, base: 1, swap_out_per_block: 0.25, swap_in_per_block: 0.5}
workload: {num_prompts: 2, request_rate: inf, input_len: 7, output_len: 4}
"""
LOUDEST = """class Loudest:
    def __init__(self, weights=None):
        pass

    def key(self, request):
        return request.client != "client-0", request.arrival
"""
TWOFOLD = """from simulator.schedulers.vllm.scheduler import Scheduler

class Twofold(Scheduler):
    def admit(self, step, budget, cap):
        if len(self.running) < 2:
            super().admit(step, budget, cap)

class Plain(Scheduler):
    pass
"""
NARROW = "engine.max_num_seqs=2"
CROWDED = [
    *("engine.max_num_seqs=64", "engine.max_num_batched_tokens=64"),
    *("workload.request_rate=60", "workload.num_prompts=200"),
]
UNEVEN = "workload.output_len={kind: uniform, low: 5, high: 95}"


@pytest.fixture
def diagnose(write):
    """Run a scenario with keys set; give the findings by rule."""

    def diagnosed(*sets: str, text: str = CALM) -> dict[str, dict[str, Any]]:
        result = run(load_scenario(write(text), sets))
        findings = result.summary()["headway"]["diagnosis"]
        assert [f["weight"] for f in findings] == sorted(
            (f["weight"] for f in findings), reverse=True
        )
        return {finding["rule"]: finding for finding in findings}

    return diagnosed


def test_nothing_stands_out_of_a_calm_run(diagnose) -> None:
    """The scenario that triggers no rule at all."""
    assert diagnose() == {}
    assert diagnosis_lines({"diagnosis": []}) == ["No finding: no knob needs turning."]


def test_memory(diagnose) -> None:
    """24 blocks hold three requests of 8 blocks at their end; in the calm run there are more."""
    found = diagnose("engine.num_gpu_blocks_override=25", "engine.max_model_len=256")
    assert found["memory"]["advice"][0]["key"] == "engine.num_gpu_blocks_override"
    assert found["memory"]["figures"]["share_of_e2el"] > 0.3
    assert "waiting" not in found


def test_for_how_long_requests_wait_for_blocks(diagnose) -> None:
    """3 blocks of 4 tokens hold one of two requests: 4 s of 8 s the second waits."""
    found = diagnose("engine.num_gpu_blocks_override=4", text=PAIR)["memory"]
    assert found["text"].startswith("KV memory limits the batch: for 50% of the busy time ")
    assert found["figures"]["share_of_busy_time"] == 0.5
    assert found["figures"]["share_of_e2el"] == 0.3333  # 4 s of 4 + 8 s


def test_reserved_memory(diagnose) -> None:
    """Pages for the longest request: allocation is the knob."""
    found = diagnose(
        "engine.num_gpu_blocks_override=33",
        "engine.max_model_len=256",
        "engine.allocation=contiguous",
    )
    first, second, *_ = found["memory"]["advice"]
    assert first == {
        "direction": "set",
        "key": "engine.allocation",
        "from": "contiguous",
        "to": "paged",
    }
    assert second["key"] == "engine.max_model_len"
    assert (second["from"], second["to"]) == (256, 128)  # 64 + 50 tokens, in blocks of 16


@pytest.mark.parametrize(
    ("sets", "cause", "knob"),
    [
        ([NARROW], "seats", "engine.max_num_seqs"),
        (CROWDED, "token budget", "engine.max_num_batched_tokens"),
        (["engine.scheduling_policy=static"], "policy", "engine.scheduling_policy"),
        (
            ["engine.prefill_schedule_interval=100"],
            "policy",
            "engine.prefill_schedule_interval",
        ),
    ],
)
def test_waiting(diagnose, sets: list[str], cause: str, knob: str) -> None:
    """Why those who wait are not admitted."""
    found = diagnose(*sets)
    assert found["waiting"]["figures"]["cause"] == cause
    assert found["waiting"]["advice"][0]["key"] == knob
    share = f"{found['waiting']['figures']['share_of_e2el']:.0%}"
    assert found["waiting"]["text"].startswith(f"Requests wait for {share} of their time because ")
    assert "memory" not in found


def test_waiting_for_a_scheduler_of_ones_own(diagnose, tmp_path: Path, monkeypatch) -> None:
    """One that boards two at most, though there is memory; one that only memory holds back."""
    (tmp_path / "twofold.py").write_text(TWOFOLD)
    monkeypatch.syspath_prepend(tmp_path)
    found = diagnose("engine.scheduling_policy={policy: 'twofold:Twofold'}")
    assert found["waiting"]["figures"]["cause"] == "policy"
    assert "memory" not in found
    scarce = ("engine.num_gpu_blocks_override=25", "engine.max_model_len=256")
    found = diagnose("engine.scheduling_policy={policy: 'twofold:Plain'}", *scarce)
    assert "memory" in found
    assert "waiting" not in found


def test_preemption(diagnose) -> None:
    """Worked in test_breakdown.py: of 7 + 7 + 9 computed tokens 8 are computed again."""
    found = diagnose(text=PAIR)["preemption"]
    assert found["text"].startswith("1 preemptions, 0.50 per request: 8 tokens (35% of prefill)")
    assert found["figures"] == {
        "recomputed_tokens": 8,
        "share_of_prefill_tokens": 0.3478,
        "share_of_e2el": 0.3,  # 2 s waiting and 1 s computing of 4 + 6 s
    }
    assert "preemption" not in diagnose("engine.num_gpu_blocks_override=7", text=PAIR)


def test_preemption_by_swap(diagnose) -> None:
    """2 blocks of 4 tokens go and come back, 128 KiB a token of Llama-3-8B."""
    told = diagnose("engine.preemption_mode=swap", text=PAIR)["preemption"]
    assert ": 0.0021 GB of KV cache copied, 33.3% of the requests' time." in told["text"]
    found = told["figures"]
    assert found["recomputed_tokens"] == 0
    assert found["share_of_e2el"] == 0.3333  # (0.5 + 2.5 + 1) s of 4.5 + 7.5 s


def test_prefill_stalls(diagnose) -> None:
    """A token takes 1 ms: a prompt of 64 makes a step of some 12 ms one of some 76 ms."""
    found = diagnose("cost.per_token=1e-3", "workload.request_rate=4")["prefill_stalls"]
    figures = found["figures"]
    beyond = figures["mean_step_with_prompts_ms"] - figures["mean_of_its_decodes_alone_ms"]
    assert 64 <= beyond < 70  # few such steps have two prompts
    assert 12 <= figures["mean_of_its_decodes_alone_ms"] < 15
    (advice,) = found["advice"]
    assert advice["key"] == "engine.max_num_batched_tokens"
    assert advice["direction"] == "lower"
    assert found["knob"] == f"lower engine.max_num_batched_tokens from 512 to {advice['to']}"


def test_smaller_chunks_that_take_as_long_as_the_decodes_beside_them(diagnose) -> None:
    """600 tokens take the 6 ms of a step of decodes: 512, which a bound on ITL asks for.

    Without one it is half of 2,048, and with a bound on TTFT that any delay breaks none.
    """
    sets = ["cost.base=6e-3", "workload.request_rate=14", "workload.input_len=1500"]
    sets += ["engine.max_num_batched_tokens=2048", "goodput={}"]
    found = diagnose(*sets)["prefill_stalls"]
    (advice,) = found["advice"]
    assert (advice["key"], advice["to"]) == ("engine.max_num_batched_tokens", 1024)
    assert " With max_num_batched_tokens=1024 a prompt takes 1." in found["text"]
    (advice,) = diagnose(*sets, "slo=[p99_itl_ms<=10]")["prefill_stalls"]["advice"]
    assert (advice["key"], advice["to"]) == ("engine.max_num_batched_tokens", 512)
    (advice, *_) = diagnose(*sets, "slo=[mean_ttft_ms<=1]")["prefill_stalls"]["advice"]
    assert advice["key"] == "cluster.replicas"


def test_smaller_chunks_that_do_not_keep_up_are_not_advised(diagnose) -> None:
    """5,120 prompt tokens come a second: steps of 256 compute some 5,300."""
    near = [
        *("engine.max_num_seqs=16", "cost.base=20e-3", "cost.per_token=1e-4"),
        *("workload.request_rate=20", "workload.num_prompts=400", "workload.input_len=256"),
        *("workload.output_len=16", "cluster={replicas: 1}"),
    ]
    (advice, *_) = diagnose(*near)["prefill_stalls"]["advice"]
    assert (advice["key"], advice["direction"]) == ("cluster.replicas", "raise")


def test_unused_seats(diagnose) -> None:
    """Ghosts and padding of a static batch; seats that nobody wants cost nothing."""
    static = diagnose("engine.scheduling_policy=static", UNEVEN)["unused_seats"]
    assert float(static["text"].partition("%")[0]) > 10
    assert static["advice"][0]["to"] == "fcfs"
    assert diagnose("engine.max_num_seqs=256") == {}


HEAVY = """name: heavy
engine: {name: textbook, max_num_seqs: 4, max_num_batched_tokens: 512, enable_prefix_caching: false}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 300, request_rate: 10, input_len: 64, output_len: 50, clients: [8, 1, 1]}
"""


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "static"])
def test_unfair_to_those_behind_one_who_asks_for_more(diagnose, policy: str) -> None:
    """A policy that knows no clients gives the heavy one four fifths while the others wait."""
    found = diagnose(f"engine.scheduling_policy={policy}", text=HEAVY)["unfair"]
    figures = found["figures"]
    assert figures["best_client"] == "client-0"
    assert figures["worst_client"] in ("client-1", "client-2")
    assert figures["best_service"] > 2 * figures["worst_service"]
    assert figures["share_of_waiting_time"] == pytest.approx(found["weight"], abs=1e-3)


@pytest.mark.parametrize("weights", ["{}", "{client-0: 4}", "{client-1: 4}"])
@pytest.mark.parametrize("policy", ["fair", "drr", "wfq"])
def test_fair_policies_are_fair_to_one_who_asks_for_more(diagnose, policy, weights) -> None:
    """It waits far longer than the others, or with weights they do: that is its share."""
    key = f"engine.scheduling_policy={{policy: {policy}, weights: {weights}}}"
    assert "unfair" not in diagnose(key, text=HEAVY)


def test_fcfs_is_fair_to_those_who_ask_for_as_much(diagnose) -> None:
    assert "unfair" not in diagnose("workload.clients=3", text=HEAVY)


@pytest.mark.parametrize("clients", ["[1, 1, 1]", "[8, 1, 1]"])
def test_unfair_by_priority(diagnose, clients: str) -> None:
    """Who goes last gets nothing while the others' requests come."""
    sets = (f"workload.clients={clients}", "workload.priorities=[0, 0, 1]")
    found = diagnose("engine.scheduling_policy=priority", *sets, text=HEAVY)["unfair"]
    assert found["figures"]["worst_client"] == "client-2"


def test_one_policy_is_advised_where_the_urgent_wait_more(diagnose) -> None:
    """Preemption for the first contradicts a fair policy for the last, which is said without it."""
    sets = ("workload.clients=[1, 1, 1]", "workload.priorities=[0, 0, 1]")
    found = diagnose("engine.scheduling_policy=priority", *sets, text=HEAVY)
    assert found["urgent"]["advice"][0]["to"] == "preemptive"
    assert found["unfair"]["figures"]["worst_client"] == "client-2"
    assert not found["unfair"]["advice"]


def test_unfair_by_weights(diagnose, tmp_path: Path, monkeypatch) -> None:
    """Who has more weight may get more; where the lighter one does, that stands out."""
    (tmp_path / "loud.py").write_text(LOUDEST)
    monkeypatch.syspath_prepend(tmp_path)

    def found(weights: str) -> bool:
        key = f"engine.scheduling_policy={{policy: 'loud:Loudest', weights: {weights}}}"
        findings = diagnose(key, "workload.clients=[2, 1]", text=HEAVY)
        text = findings.get("unfair", {"text": ""})["text"]
        return "(an output token counts as two, by weight)" in text

    assert found("{client-0: 4, client-1: 4}")
    assert found("{client-1: 4}")
    assert not found("{client-0: 100}")


def test_low_load(diagnose) -> None:
    """A request of half a second every 5 s on 4 replicas, where one does; on one all is well."""
    found = diagnose("workload.request_rate=0.2", "cluster.replicas=4")["low_load"]
    assert 1 <= float(re.search(r"matter: (\S+) requests run", found["text"])[1]) < 1.2
    assert found["knob"] == "lower cluster.replicas from 4 to 1"
    assert diagnose("workload.request_rate=0.2") == {}


def test_what_is_kept_is_told_first() -> None:
    """Alone, unless a queue grows or fewer replicas would do."""
    more = {"rule": "host", "text": "The GPU waits.", "knob": "set it"}
    fewer = {"rule": "low_load", "text": "Little comes.", "knob": "lower it"}
    first = "- All service levels are kept: nothing needs turning."
    assert diagnosis_lines({"diagnosis": [more], "slo_met": True}) == [first]
    assert diagnosis_lines({"diagnosis": [more, fewer], "slo_met": True}) == [
        first,
        "- Little comes.\n  Knob: lower it.",
    ]
    grows = {"stationary": False, "trend_per_s": 0.3, "slo_met": True}
    more = {"rule": "memory", "text": "Full.", "knob": "raise it"}
    assert diagnosis_lines(grows | {"diagnosis": [more]}) == [
        "- All service levels are kept so far, but a queue grows: in a longer run they break.",
        "- Full.\n  Knob: raise it.",
    ]


def test_routing(diagnose) -> None:
    """All requests are of one client, whose sessions stay on one of two replicas."""
    sets = ("cluster.replicas=2", NARROW, "workload.clients=1")
    found = diagnose(*sets, "cluster.router=session_affinity", "workload.sessions={turns: 60}")
    assert found == {} or "routing" not in found  # one turn after the other waits for nobody
    uneven = "workload.output_len={kind: lognormal, median: 20, sigma: 1.5, high: 2000}"
    found = diagnose("cluster.replicas=4", NARROW, "cluster.router=random", uneven)["routing"]
    assert found["advice"][0]["to"] == "least_outstanding"
    assert found["figures"]["share_of_waiting"] > 0.5
    assert "routing" not in diagnose(
        "cluster.replicas=4", NARROW, "cluster.router=least_outstanding", uneven
    )


def test_prefix_reuse(diagnose) -> None:
    """All but the first of 60 prompts begin with the same 400 of 464 tokens: 85 % are known."""
    sets = ("workload.prefix_len=400", "cost.per_token=1e-4")
    found = diagnose(*sets)["prefix_reuse"]
    assert found["figures"]["share_of_prompt_tokens"] == round(59 * 400 / (60 * 464), 4)
    assert found["knob"] == "set engine.enable_prefix_caching to true (now false)"
    assert "prefix_reuse" not in diagnose(*sets, "engine.enable_prefix_caching=true")


def test_advice_does_not_contradict_itself(diagnose) -> None:
    """A key has one value in all findings, and the first says which way it goes."""
    for text, *sets in (
        (CALM, *CROWDED, "cost.per_token=1e-4"),
        (CALM, NARROW, UNEVEN),
        (PAIR, "goodput={ttft: 100}"),
        (HEAVY, "goodput={ttft: 100, tpot: 10}"),
    ):
        found = diagnose(*sets, text=text)
        assert found
        advised = [one for finding in found.values() for one in finding["advice"]]
        assert len({one["key"] for one in advised}) == len(
            {(one["key"], one["direction"], str(one["to"])) for one in advised}
        )
        assert all(one["advice"] for rule, one in found.items() if rule != "levels")


def test_leaps_change_nothing(write) -> None:
    """Arrivals within a leap are counted as step by step."""
    for sets in ([NARROW], ["engine.num_gpu_blocks_override=25", "engine.max_model_len=256"]):
        scenario = load_scenario(write(CALM), sets)
        one, other = (run(scenario, stepwise=stepwise).summary() for stepwise in (False, True))
        assert one["headway"]["diagnosis"] == other["headway"]["diagnosis"] != []


def test_printed_and_written(write, tmp_path: Path, capsys) -> None:
    """The report prints the first of what summary.json lists."""
    path = write(CALM)
    sets = ["--set", "engine.scheduling_policy=static", "--set", UNEVEN, "--out", str(tmp_path)]
    assert main(["run", str(path), *sets, "--slo", "p99_ttft_ms<=1"]) == 0
    told = capsys.readouterr().out
    findings = json.loads((tmp_path / "summary.json").read_text())["headway"]["diagnosis"]
    assert findings
    assert told.count("Knob: ") == sum(bool(one["knob"]) for one in findings[:SHOWN])
    assert all(f"- {one['text']}" in told for one in findings[:SHOWN])
    assert main(["run", str(path), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "Diagnosis-" in told
    assert "No finding: no knob needs turning." in told


def test_no_knob_where_the_service_levels_are_kept(write, tmp_path, capsys) -> None:
    """A finding stays in the summary; nothing needs turning, though, and the page says so, too."""
    path = write(CALM)
    sets = ["--set", "engine.scheduling_policy=static", "--set", UNEVEN, "--out", str(tmp_path)]
    assert (
        main(["run", str(path), *sets, "--slo", "p99_ttft_ms<=1e9", "--set", "goodput=null"]) == 0
    )
    told = capsys.readouterr().out
    finding = json.loads((tmp_path / "summary.json").read_text())["headway"]["diagnosis"][0]
    assert "- All service levels are kept: nothing needs turning.\n==" in told
    assert finding["text"] not in told
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    assert "All service levels are kept" in page.read_text()
    assert finding["text"] not in page.read_text()
