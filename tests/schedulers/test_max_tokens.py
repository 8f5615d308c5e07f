"""Requests that say themselves how long their answers may be: every engine cuts them there."""

from pathlib import Path

import pytest

from headway.testing import check_policy
from simulator import load_scenario, run
from simulator.build.policy_table import POLICIES
from simulator.core.request import Request
from simulator.schedulers.continuous_batching import Orca
from simulator.schedulers.tgi import Tgi
from simulator.schedulers.trtllm import TrtLlm
from simulator.simulation.result import Result
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.support.engines import fcfs, made
from tests.support.schedules import counter

SCENARIO = """
model: tiny-test
engine: {name: textbook,
  num_gpu_blocks_override: 400, max_model_len: 256, scheduling_policy: POLICY}
workload:
  num_prompts: 6
  input_len: 160
  output_len: {kind: cycle, values: [10, 60]}
  max_tokens: {kind: cycle, values: [40, 20, 200]}
predictor: oracle
cost: {kind: linear, base: 0.01}
"""
GENERATED = [10, 20, 10, 40, 10, 60]
REASONS = ["stop", "length", "stop", "length", "stop", "stop"]


def play(folder: Path, text: str) -> Result:
    path = folder / "s.yaml"
    path.write_text(text)
    return run(load_scenario(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", POLICIES)
def test_every_engine_cuts_answers_at_max_tokens(tmp_path: Path, policy: str) -> None:
    """Answers of 10 and 60 in turn, cut at 40, 20 and 200 in turn."""
    found = play(tmp_path, SCENARIO.replace("POLICY", policy)).requests
    assert found["max_tokens"].tolist() == [40, 20, 200] * 2
    assert found["output_tokens"].tolist() == GENERATED
    assert found["finish_reason"].tolist() == REASONS
    assert found["predicted_output_tokens"].tolist() == GENERATED


def test_without_max_tokens_there_is_no_column(tmp_path: Path) -> None:
    text = SCENARIO.replace("POLICY", "fcfs").replace("  max_tokens", "  # max_tokens")
    found = play(tmp_path, text).requests
    assert "max_tokens" not in found
    assert set(found["finish_reason"]) == {"stop"}


def test_without_it_an_asynchronous_engine_knows_the_last_token_beforehand(tmp_path: Path) -> None:
    """As if each asked for just what it gets; one that may say more computes a token in vain."""
    text = SCENARIO.replace("POLICY", "fcfs, async_scheduling: true")
    text = text.replace("{kind: cycle, values: [10, 60]}", "10")
    asks = "  max_tokens: {kind: cycle, values: [40, 20, 200]}\n"
    unsaid, exact, room = (
        play(tmp_path, text.replace(asks, more))
        for more in ("", "  max_tokens: 10\n", "  max_tokens: 96\n")
    )
    assert unsaid.requests.e2el.tolist() == exact.requests.e2el.tolist()
    wasted = [one.summary()["headway"]["wasted_tokens"] for one in (unsaid, exact, room)]
    assert wasted == [0, 0, 6]


def test_a_trace_may_have_some_and_what_it_does_not_say_is_an_empty_cell(tmp_path: Path) -> None:
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens,max_tokens\n0,9,9,4\n0,9,9,\n"
    (tmp_path / "trace.csv").write_text(rows)
    text = "model: tiny-test\ncost: {kind: linear, base: 0.01}\n"
    text += "workload: {trace: {path: trace.csv}}\n"
    result = play(tmp_path, text)
    write_run(result, tmp_path / "out")
    header, first, second = (tmp_path / "out" / "requests.csv").read_text().split()
    at = header.split(",").index("max_tokens")
    assert (first.split(",")[at], second.split(",")[at]) == ("4", "")
    assert result.requests["output_tokens"].tolist() == [4, 9]
    with pytest.raises(HeadwayError, match=r"workload.max_tokens: the trace says the max_tokens"):
        play(tmp_path, text.replace("csv}", "csv}, max_tokens: 5"))


def test_beside_a_trace_a_number_or_a_distribution_says_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("num_prefill_tokens,num_decode_tokens\n9,9\n9,2\n")
    text = "model: tiny-test\ncost: {kind: linear, base: 0.01}\n"
    text += "workload: {trace: {path: t.csv}, max_tokens: 5}\n"
    assert play(tmp_path, text).requests["output_tokens"].tolist() == [5, 2]
    bad = r"s.yaml:3: workload.max_tokens: 0 is not a whole number of 1 or more"
    with pytest.raises(HeadwayError, match=bad):
        play(tmp_path, text.replace("5}", "0}"))


def request(max_tokens: int | None) -> Request:
    """Make a request of 4 tokens whose answer would have 3."""
    return Request(0, 0.0, 4, 3, max_tokens=max_tokens)


@pytest.mark.parametrize(("engine", "last"), [(Tgi, 0), (TrtLlm, 1), (Orca, 0)])
def test_what_an_engine_reserves_is_what_the_client_allows(engine: type, last: int) -> None:
    """Blocks of 4: 4 + 17 - 1 tokens are 5, whatever the answer and the default are; 4 + 4 are 2.

    Without max_tokens it is max_new_tokens; none is more than max_model_len has room for.
    TensorRT-LLM reserves a place for the last token, too, which begins a block of its own here.
    """
    scheduler = made(engine, counter(90), max_new_tokens=5, max_model_len=64)
    assert scheduler.reserved_blocks(request(17)) == 5 + last
    assert scheduler.reserved_blocks(request(None)) == 2 + last
    assert scheduler.reserved_blocks(request(1000)) == 16
    exact = made(engine, counter(90), max_new_tokens="exact", max_model_len=64)
    assert exact.reserved_blocks(request(17)) == 5 + last
    assert exact.reserved_blocks(request(None)) == 2


@pytest.mark.parametrize(("most", "admitted"), [(None, 5), (4, 5), (12, 2), (90, 1)])
def test_reserve_output_tokens_takes_max_tokens(most: int | None, admitted: int) -> None:
    """10 blocks of 4: 4 + 3 tokens are 2, 4 + 12 are 4, and none is more than the whole cache."""
    scheduler = fcfs(11, 4, reserve_output_tokens="max_tokens")
    for id in range(6):
        scheduler.add(Request(id, 0.0, 4, 3, max_tokens=most))
    assert len(scheduler.schedule(0.0).prefills) == admitted


class LeastAllowed:
    """Admits first whose client allows the least."""

    def key(self, request: Request) -> int:
        return request.max_tokens or 0


class RankedByAllowed:
    """The same, as an order of columns."""

    def rank(self, waiting, now):
        return waiting.max_tokens


@pytest.mark.usefixtures("few_cases")
def test_a_policy_may_read_it_as_a_column_too(tmp_path: Path) -> None:
    """One at a time: 20 before 40 before 200."""
    check_policy(LeastAllowed)
    check_policy(RankedByAllowed)
    text = SCENARIO.replace("POLICY", f"'{__name__}:RankedByAllowed'")
    found = play(tmp_path, text.replace("textbook,", "textbook, max_num_seqs: 1,")).requests
    order = found.sort_values("queue_time")["max_tokens"].tolist()
    assert order == [20, 20, 40, 40, 200, 200]
