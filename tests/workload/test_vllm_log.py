"""The lines that vLLM logs of requests, by release: what is told, and what is not."""

import pytest

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.traces import read_trace
from tests.workload.test_ledger import told

KNOBS = "SamplingParams(n={}, temperature=0.7, stop=[], max_tokens={}, guided=Params(x=1))"
FORMS = {
    "0.3": "INFO {} async_llm_engine.py:371] Received request {}: prompt: 'max_tokens=1', "
    "sampling params: {}, prompt token ids: {}.",
    "0.9": "INFO {} [logger.py:43] Received request {}: prompt: 'prompt_token_ids: [1]', "
    "params: {}, prompt_token_ids: {}, prompt_embeds shape: None, lora_request: None.",
    "0.11": "(APIServer pid=7) INFO {} [logger.py:39] Received request {}: params: {}, "
    "lora_request: None.\nDEBUG 01-01 00:00:09 [logger.py:45] Request {} details: "
    "prompt: 'hi', prompt_token_ids: {}, prompt_embeds shape: None.",
}
BANNER = "INFO 12-31 23:59:50 [__init__.py:244] Automatically detected platform cuda.\n"
ROWS = [("12-31 23:59:58", 20, 40), ("01-01 00:00:01", 30, 33), ("01-01 00:00:01", 7, 3)]


def log(form, rows=ROWS, n=1):
    lines = []
    for k, (when, most, size) in enumerate(rows):
        values = [
            when,
            f"cmpl-{k}",
            KNOBS.format(n, most),
            [*range(32), *range(50 * k, 50 * k + 8)],
        ]
        values[3] = values[3][:size]
        values[3:3] = [f"cmpl-{k}"] if form == "0.11" else []
        lines.append(FORMS[form].format(*values))
    return BANNER + "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", FORMS)
def test_requests_of_each_release(put, form):
    """A clock without a year passes New Year; token ids tell what prompts share."""
    work, said = told(put(log(form)))
    assert work.arrival.tolist() == [0, 3, 3]
    assert work.prompt_tokens.tolist() == [40, 33, 3]
    assert work.output_tokens.tolist() == work.max_tokens.tolist() == [20, 30, 7]
    assert shared_prefix_tokens(work) == 32
    assert said == [
        "max_tokens: answers that are not logged, and are taken as long as it allows: 3"
    ]


def test_answers_that_are_logged_and_requests_that_were_aborted(put):
    text = log("0.9") + (
        "INFO 01-01 00:00:02 [logger.py:60] Generated response cmpl-0 (streaming complete): "
        "output: 'x', output_token_ids: [5, 6, 7], finish_reason: stop\n"
        "INFO 01-01 00:00:02 [async_llm.py:431] Aborted request cmpl-2.\n"
    )
    work, said = told(put(text))
    assert work.output_tokens.tolist() == [3, 30]
    assert (
        said[0] == "1 request left out: failed or cancelled when recorded, or without output tokens"
    )
    assert said[1] == "requests left out as cancelled when recorded: 1"
    assert said[2].endswith("as long as it allows: 1")


@pytest.mark.parametrize(
    "line",
    ["Aborted request(s) cmpl-2,cmpl-9.", "Request cmpl-2 aborted.", "Request cmpl-2 failed."],
)
def test_requests_that_later_releases_aborted(put, line):
    text = f"{log('0.9')}INFO 01-01 00:00:02 [async_llm.py:431] {line}\n"
    work, said = told(put(text))
    assert work.output_tokens.tolist() == [20, 30]
    assert (
        said[0] == "1 request left out: failed or cancelled when recorded, or without output tokens"
    )


def test_a_name_that_comes_again_is_another_request(put):
    """Clients may name their requests, and name two alike."""
    work, _ = told(put(log("0.9").replace("cmpl-1", "cmpl-0")))
    assert work.output_tokens.tolist() == [20, 30, 7]


def test_several_answers_and_lengths_that_were_cut(put):
    rows = [("12-01 10:00:00", 6, 16)] * 4
    work, said = told(put(log("0.9", rows, n=2)))
    assert work.output_tokens.tolist() == [6] * 8
    assert said[0].startswith("n: requests that ask for several answers, each played as a request")
    assert said[2] == (
        "prompt_token_ids: 8 prompts of 16 tokens, and none is longer: does --max-log-len cut them?"
    )


def test_the_finer_clock_of_what_wraps_the_log(put):
    lines = log("0.3").replace(BANNER, "").splitlines()
    text = "".join(f"2026-01-01T00:00:00.{k}00Z stdout F {line}\n" for k, line in enumerate(lines))
    work, _ = told(put(text), format="vllm_log")
    assert work.arrival == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            log("0.11").replace("DEBUG", "TRACE"),
            ":2: prompt_token_ids: cmpl-0: not logged, as from 0.11",
        ),
        (log("0.9").replace("max_tokens=20", "max_tokens=None"), ":2: .*max_tokens: missing"),
        (BANNER, ":1: format: is a server's log of its throughput"),
    ],
)
def test_what_a_log_does_not_tell_is_refused_by_name(put, text, wrong):
    with pytest.raises(HeadwayError, match=wrong):
        read_trace(put(text))


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")
def test_several_answers_share_out_the_tokens_that_are_logged(put):
    """As requests of one prompt, as in vLLM; a column that counts rows is none of answers."""
    head = "arrival,prompt_tokens,output_tokens,n,ttft,e2e\n"
    work = read_trace(put(f"{head}0,100,10,4,0.1,1.1\n1,50,7,1,0.1,0.7\n2,50,1,3,0.1,0.1\n"))
    assert work.output_tokens.tolist() == [3, 3, 2, 2, 7, 1]
    assert work.arrival.tolist() == [0, 0, 0, 0, 1, 2]
    assert shared_prefix_tokens(work) == 300
    rows = read_trace(put("n,arrival,prompt_tokens,output_tokens\n1,0,9,5\n2,1,9,5\n3,2,9,5\n"))
    assert rows.output_tokens.tolist() == [5, 5, 5]


def test_one_answer_of_several_where_a_session_has_one_place(put):
    row = '{{"timestamp": {}, "input_length": 9, "output_length": 6, "n": 3}}'
    with pytest.warns(HeadwayWarning, match="played as one of all their tokens: 2"):
        work = read_trace(put("\n".join(row.format(k) for k in (0, 1))))
    assert work.output_tokens.tolist() == [6, 6]


@pytest.mark.parametrize("form", ["0.9", "0.11"])
def test_a_streamed_answer_is_the_sum_of_its_pieces(put, form):
    """And how it ended; what it says of itself is no end."""
    piece, whole = (
        f"Generated response cmpl-0 (streaming {what})" for what in ("delta", "complete")
    )
    stamp = "INFO 01-01 00:00:02 [logger.py:60]"
    ids = " details: output_token_ids: {}\n" + f"{stamp} {piece}" if form == "0.11" else ""
    told_ids = "" if ids else "output_token_ids: {}, "
    text = "".join(
        f"{stamp} {piece}{ids.format([k, k])}: output: 'finish_reason: error', "
        f"{told_ids.format([k, k])}finish_reason: None\n"
        for k in range(3)
    )
    text += (
        f"{stamp} {whole}: output: 'x', output_token_ids: None, finish_reason: streaming_complete\n"
    )
    work, said = told(put(log(form) + text))
    assert work.output_tokens.tolist() == [6, 30, 7]
    assert said[0].endswith("taken as long as it allows: 2")


@pytest.mark.parametrize(("reason", "size"), [("stop", 3), ("abort", 2), ("error", 2)])
def test_a_reason_to_finish_says_whether_an_answer_came(put, reason, size):
    ids = ", output_token_ids: [5, 6], finish_reason: "
    end = (
        f"INFO 01-01 00:00:02 [logger.py:60] Generated response cmpl-0: output: 'x'{ids}{reason}\n"
    )
    assert len(told(put(log("0.9") + end))[0]) == size


def test_tokens_of_a_prompt_may_come_before_its_request(put):
    """As 0.11 and later log them; an id that comes again is another request."""
    banner, *lines = log("0.11").splitlines()
    swapped = [line for k in range(0, len(lines), 2) for line in (lines[k + 1], lines[k])]
    again = [line.replace(":58", ":59") for line in swapped[:2]]
    text = "\n".join([banner, *swapped, *again]).replace("12-31", "01-01")
    work, _ = told(put(text + "\n"))
    assert sorted(work.prompt_tokens.tolist()) == [3, 33, 40, 40]
