"""Published traces: every format as it comes, what is wrong in it, parts of it, Mooncake again."""

import gzip
import math
import time
import warnings

import numpy as np
import pytest

from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.workload.traces import read_trace
from simulator.workload.traces.detect import detect_format
from simulator.workload.workload import Workload

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1030, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3500, "input_length": 1024, "output_length": 9, "hash_ids": [0, 7]}\n'
)
SESSION = (
    '{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, '
    '"hash_ids": [1, 2]}\n'
    '{"timestamp": 100, "input_length": 3, "output_length": 3}\n'
    '{"session_id": "a", "delay": 2500, "input_length": 40, "output_length": 7}\n'
)
ONE = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "lengths": "num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.08\n",
    "mooncake": MOONCAKE,
    "custom": '{"prompt": "hello", "prompt_len": 12, "output_tokens": 8}\n',
    "llmservingsim": '{"arrival_time_ns": 5, "input_toks": 20, "output_toks": 4}\n',
}


def lengths(workload: Workload) -> tuple[list[int], list[int]]:
    """Return input and output lengths."""
    return workload.prompt_tokens.tolist(), workload.output_tokens.tolist()


# Formats.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ONE)
def test_format_is_told_by_the_first_line_packed_or_not(put, form, packed):
    """Neither the name nor the packing says which format it is."""
    content = ONE[form].encode()
    path = put(gzip.compress(content) if packed else content, "some.name")
    assert detect_format(path) == form
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        workload = read_trace(path)
    workload.check()
    assert workload.source == f"some.name ({form})"


def test_azure_2023(put):
    """Seven decimals, CRLF, no newline at the end; time starts at the first arrival."""
    workload = read_trace(put(AZURE))
    assert workload.arrival.tolist() == [0.0, 4.314579, 4.541877]
    assert lengths(workload) == ([374, 396, 879], [44, 109, 55])
    assert workload.segments is None


def test_azure_2024(put):
    """Six decimals or none, with +00:00."""
    workload = read_trace(put(AZURE_2024))
    assert workload.arrival.tolist() == [0.0, 0.99007]
    assert lengths(workload) == ([2162, 2399], [5, 6])


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2023-11-16T18:15:47.68059", 1.0),
        ("2023-11-16 20:15:46.68059+02:00", 0.0),
        ("2023-11-16 18:15:46.68059Z", 0.0),
        ('"2023-11-16 18:15:46.780590"', 0.1),
        (" 2023-11-16 18:15:46.680590100 ", 1e-7),
        ("2023-11-17 18:15:46.6805900", 86400.0),
    ],
)
def test_unusual_times_are_read_as_well(put, stamp, seconds):
    """What the fast way refuses is read line by line; blank lines do not matter."""
    head, first = AZURE.split("\r\n")[:2]
    workload = read_trace(put(f"\n{head}\n{first}\n\n{stamp},1.0,2\n\n"))
    assert workload.arrival.tolist() == [0.0, pytest.approx(seconds, abs=1e-12)]
    assert lengths(workload) == ([374, 1], [44, 2])


def test_burstgpt_leaves_out_failed_requests(put):
    """No response tokens means a failure: left out, and counted in a warning."""
    path = put(BURSTGPT)
    with pytest.warns(HeadwayWarning, match="1 request left out"):
        workload = read_trace(path)
    assert workload.arrival.tolist() == [0.0, 113.0]
    assert lengths(workload) == ([472, 417], [18, 276])


def test_burstgpt_goes_by_the_names_of_its_columns(put):
    """The later release has two more columns, and quotes do not matter."""
    path = put(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        'Log Type\n1.5,7,0.3,ChatGPT,10,20,30,"API log"\n'
    )
    assert lengths(read_trace(path)) == ([10], [20])


def test_lengths_with_and_without_arrivals(put):
    """Splitwise has arrivals in seconds; without them all arrive at once."""
    timed = read_trace(put("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,3,4\n2.0,5,6\n"))
    assert timed.arrival.tolist() == [0.0, 1.5]
    plain = read_trace(put("num_prefill_tokens,num_decode_tokens,x\n74,918,a\n290,905,b\n"))
    assert plain.arrival.tolist() == [0.0, 0.0]
    assert lengths(plain) == ([74, 290], [918, 905])


def test_mooncake_ids_become_blocks_of_512(put):
    """The last id covers what is left of the prompt; the same id is the same content."""
    workload = read_trace(put(MOONCAKE))
    assert workload.arrival.tolist() == [0.0, 2.5]
    assert lengths(workload) == ([1030, 1024], [50, 9])
    assert workload.segments == [
        ((("h", 0), 512), (("h", 1), 512), (("h", 2), 6)),
        ((("h", 0), 512), (("h", 7), 512)),
    ]


def test_mooncake_in_seconds_with_other_blocks(put):
    """guidellm writes seconds; vLLM's timed_trace has both as its defaults."""
    line = '{"timestamp": %s, "input_length": 20, "output_length": 2, "hash_ids": [4, 5]}\n'
    path = put(line % 1 + line % 2.5)
    workload = read_trace(path, time_unit="s", hash_block_size=16)
    assert workload.arrival.tolist() == [0.0, 1.5]
    assert workload.segments[0] == ((("h", 4), 16), (("h", 5), 4))
    timed = read_trace(path, "timed_trace")
    assert timed.arrival.tolist() == workload.arrival.tolist()
    assert timed.segments == workload.segments


def test_lines_that_say_how_large_their_blocks_are_are_in_seconds(put):
    """As `headway serve` writes them: nothing else need be said of the file."""
    line = '{"timestamp": %s, "input_length": 40, "output_length": 2, "hash_ids": [4, 5], '
    line += '"hash_block_size": %s}\n'
    path = put(line % (1, 32) + line % (2.5, 32))
    assert detect_format(path) == "timed_trace"
    workload = read_trace(path)
    assert workload.arrival.tolist() == [0.0, 1.5]
    assert workload.segments[0] == ((("h", 4), 32), (("h", 5), 8))
    assert read_trace(path, hash_block_size=32).segments == workload.segments
    for given, lines, told in (
        (16, line % (1, 32), "1: hash_block_size: 32, where 16 was said before"),
        (None, line % (1, 32) + line % (2, 24), "2: hash_block_size: 24, where 32 was said before"),
        (None, line % (1, '"x"'), "1: hash_block_size: 'x' is not a number of tokens"),
    ):
        with pytest.raises(HeadwayError, match=told):
            read_trace(put(lines), hash_block_size=given)


def test_aiperf_sessions_wait_for_the_answer_and_add_to_it(put):
    """A later turn has no time of its own; its prompt takes in the conversation so far."""
    workload = read_trace(put(SESSION))
    workload.check()
    assert workload.arrival.tolist()[:2] == [0.0, 0.1]
    assert math.isnan(workload.arrival[2])
    assert workload.after.tolist() == [-1, -1, 0]
    assert workload.delay.tolist() == [0.0, 0.0, 2.5]
    assert lengths(workload) == ([600, 3, 645], [5, 3, 7])
    history = ((("h", 1), 512), (("h", 2), 88), (("out", 0), 5))
    assert workload.segments[2][:3] == history
    assert sum(count for _, count in workload.segments[2]) == 645


def test_aiperf_sessions_with_whole_prompts(put):
    """A file whose later lines repeat the history is noticed, and read right when told so."""
    again = SESSION.replace('"input_length": 40', '"input_length": 700, "hash_ids": [1, 3]')
    path = put(again)
    with pytest.warns(HeadwayWarning, match="session_turns: whole"):
        read_trace(path)
    workload = read_trace(path, session_turns="whole")
    assert lengths(workload)[0] == [600, 3, 700]
    assert workload.segments[2] == ((("h", 1), 512), (("h", 3), 188))
    assert workload.after.tolist() == [-1, -1, 0]


def test_custom_needs_lengths_or_an_explicit_estimate(put):
    """Text alone has no length in tokens; nothing is guessed in silence."""
    path = put(
        '{"prompt": "ten chars.", "output_tokens": 3}\n{"input_len": 9, "output_len": 4}\n'
        '{"prompt": ""}\n'
    )
    with pytest.raises(HeadwayError) as caught:
        read_trace(path)
    assert caught.value.messages == [
        f"{path}:1: prompt: counting its tokens needs a tokenizer: add their number as prompt_len, "
        "or estimate it by --chars-per-token 4, in a scenario trace: {chars_per_token: 4}",
        f"{path}:3: prompt: neither a text nor, as prompt_len, its length in tokens",
        f"{path}:3: output_tokens or output_len: missing",
    ]
    path = put("".join(path.read_text().splitlines(keepends=True)[:2]))
    workload = read_trace(path, chars_per_token=4)
    assert lengths(workload) == ([3, 9], [3, 4])
    assert workload.arrival.tolist() == [0.0, 0.0]


def test_llmservingsim_blocks_cover_the_prompt_then_the_output(put):
    """A prompt's last tokens take the id they share with the output, or a name of their own."""
    line = '{"arrival_time_ns": %d, "input_toks": 20, "output_toks": %d, "hash_ids": %s}\n'
    workload = read_trace(put(line % (10**9, 12, [1, 2]) + line % (3 * 10**9, 4, [1])))
    assert workload.arrival.tolist() == [0.0, 2.0]
    assert workload.segments == [
        ((("h", 1), 16), (("h", 2), 4)),
        ((("h", 1), 16), (("tail", 1), 4)),
    ]


def test_requests_out_of_order_are_sorted(put):
    """Sorted by arrival, stably, with their contents and links, and told."""
    line = '{"timestamp": %d, "input_length": %d, "output_length": 1}\n'
    path = put(SESSION.replace('"timestamp": 0', '"timestamp": 50') + line % (20, 8))
    with pytest.warns(HeadwayWarning, match="requests earlier than one before them: 1"):
        workload = read_trace(path)
    workload.check()
    assert lengths(workload)[0] == [8, 600, 645, 3]
    assert workload.after.tolist() == [-1, -1, 1, -1]
    assert workload.segments[2][2] == (("out", 1), 5)
    assert np.nanmax(workload.arrival) == pytest.approx(0.08)


# The published files.


def test_published_azure(data):
    """The full 2023 conversation trace, in less than 0.08 s of CPU."""
    path = data / "traces" / "azure_llm_2023_conv.csv.gz"
    took = []
    for _ in range(3):
        start = time.process_time()
        workload = read_trace(path, "azure")
        took.append(time.process_time() - start)
    workload.check()
    assert (len(workload), workload.total_input, workload.total_output) == (
        19_366,
        22_361_870,
        4_088_665,
    )
    assert min(took) < 0.08
    rebased = read_trace(data / "traces" / "vidur_splitwise_conv.csv.gz")
    assert np.abs(workload.arrival - rebased.arrival).max() < 1e-6
    assert lengths(workload) == lengths(rebased)


@pytest.mark.parametrize(
    ("name", "form", "requests"),
    [
        ("azure_llm_2023_code.csv.gz", "azure", 8_819),
        ("mooncake_fast25_conversation.jsonl.gz", "mooncake", 12_031),
        ("mooncake_fast25_synthetic.jsonl.gz", "mooncake", 3_993),
        ("sarathi_sharegpt_8k_lengths.csv.gz", "lengths", 30_731),
        ("llmservingsim_sharegpt-qwen3-32b-300-sps10.jsonl.gz", "llmservingsim", 300),
    ],
)
def test_published_files(data, name, form, requests):
    """Every published file is read whole, by its first line."""
    path = data / "traces" / name
    workload = read_trace(path)
    workload.check()
    assert detect_format(path) == form
    assert len(workload) == requests
    assert workload.arrival[0] == 0.0
