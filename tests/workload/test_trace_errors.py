"""What is wrong with a trace is told by file, line and column, all of it at once."""

import gzip
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.util.errors import HeadwayError, MappingError, TraceError
from simulator.workload.traces import FORMATS, read_trace
from simulator.workload.traces.documents import Row, json_objects
from simulator.workload.traces.fields import NO_DATE
from simulator.workload.traces.format import Problems
from simulator.workload.traces.hash_blocks import HashBlocks

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1030, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3500, "input_length": 1024, "output_length": 9, "hash_ids": [0, 7]}\n'
)
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
PLACE = "2023-11-16 18:15:46"


def complaints(path: Path, *args: str, **options: object) -> list[str]:
    """Return what is wrong with a file, without its name."""
    with pytest.raises((TraceError, MappingError)) as caught:
        read_trace(path, *args, **options)
    return [message.removeprefix(f"{path}:") for message in str(caught.value).split("\n")]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (f"{PLACE},abc,1", ["ContextTokens: 'abc' is not a whole number such as 64 (tokens)"]),
        (f"{PLACE},1_0,1", ["ContextTokens: '1_0' is not a whole number such as 64 (tokens)"]),
        (f"{PLACE},1.5,1", ["ContextTokens: '1.5' is not a whole number such as 64 (tokens)"]),
        (f"{PLACE},-5,1", ["ContextTokens: '-5' is negative"]),
        (f"{PLACE},1", ["GeneratedTokens: missing"]),
        (f"{PLACE},,1", ["ContextTokens: missing"]),
        (f"{PLACE},1,2,3", ["line: 4 values under 3 columns"]),
        (
            f"{PLACE},{'9' * 16},1",
            ["ContextTokens: '9999999999999999' is not a whole number such as 64 (tokens)"],
        ),
        (
            "yesterday,x,-1",
            [
                f"TIMESTAMP: 'yesterday' {NO_DATE}",
                "ContextTokens: 'x' is not a whole number such as 64 (tokens)",
                "GeneratedTokens: '-1' is negative",
            ],
        ),
        (
            "2023-13-16 18:15:46,1,1",
            [f"TIMESTAMP: '2023-13-16 18:15:46' {NO_DATE}"],
        ),
        (
            "2023-11-16 18:15:46.,1,1",
            [f"TIMESTAMP: '2023-11-16 18:15:46.' {NO_DATE}"],
        ),
    ],
)
def test_bad_azure_lines_are_named(put, line, wrong):
    """File, line, column and what is wrong, wherever the line stands."""
    assert complaints(put(f"{HEAD}{line}")) == [f"3: {text}" for text in wrong]
    assert complaints(put(f"{HEAD}\n{line}\n{PLACE},1,1\n")) == [f"4: {text}" for text in wrong]


def test_two_wrong_lines_do_not_make_up_for_each_other(put):
    """One value too many here and one too few there is not a right number of values."""
    path = put("num_prefill_tokens,num_decode_tokens\n1,2,3\n4\n")
    assert complaints(path) == [
        "2: line: 3 values under 2 columns",
        "3: num_decode_tokens: missing",
    ]


def test_only_the_first_twenty_problems_are_told(put):
    """The rest are counted; those that are all alike are one."""
    (told,) = complaints(put(HEAD + f"{PLACE},x,1\n" * 33))
    what = "3: ContextTokens: 'x' is not a whole number such as 64 (tokens)"
    assert told == f"{what}, and so in 32 more places"
    told = complaints(put(HEAD + f"{PLACE},x,1\n" * 32 + f"{PLACE},1,x\n"))
    assert len(told) == 21
    assert told[19] == "22: ContextTokens: 'x' is not a whole number such as 64 (tokens)"
    assert told[20] == " ... and 13 more"


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "--", "0x1"])
def test_bad_seconds(put, value):
    """A time in seconds is a plain number, finite and 0 or more."""
    path = put(f"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n{value},1,1\n")
    (told,) = complaints(path)
    assert told.startswith(f"3: arrived_at: '{value}' is ")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"timestamp": 1, ', "line: bad JSON: "),
        ("[1]", "line: not a JSON object"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp: 'x' is not a"),
        ('{"input_length": 1, "output_length": 1}', "timestamp: missing"),
        ('{"timestamp": 1, "output_length": 1}', "input_length: missing"),
        (
            '{"timestamp": 1, "text_input": "hi", "output_length": 1}',
            "input_length: missing; count",
        ),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length: true is not"),
        (
            '{"timestamp": 1, "input_length": 2.5, "output_length": 1}',
            "input_length: 2.5 is not a w",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": -1}',
            "output_length: -1 is negative",
        ),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
            "timestamp: missing",
        ),
        (f'{{"timestamp": {"9" * 400}, "input_length": 1, "output_length": 1}}', "timestamp: 9999"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}',
            "hash_ids: not a",
        ),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "hash_ids: 1 blocks of 512 tokens do not fit 600 tokens, which take 2: wrong",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "delay": 5}',
            "delay: needs a session_id",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "session_id": [5]}',
            "session_id: neither",
        ),
    ],
)
def test_bad_mooncake_lines_are_named(put, line, wrong):
    """Each bad line of a JSONL file is told with its column."""
    (told,) = complaints(put(MOONCAKE + line + "\n"))
    assert told.startswith(f"3: {wrong}")


def test_a_mooncake_file_is_no_timed_trace_by_its_blocks(put):
    """vLLM's default of 16 tokens per id does not fit ids of 512, and that is told once."""
    assert complaints(put(MOONCAKE), "timed_trace") == [
        "1: hash_ids: 3 blocks of 16 tokens do not fit 1030 tokens, which take 65, and so in 1 "
        "more line; 512 tokens fit every line: say hash_block_size: 512"
    ]


def test_ids_of_16_tokens_in_a_mooncake_file_are_told_once(put):
    """With what would read them; other problems are told beside."""
    line = '{{"timestamp": {0}, "input_length": {0}, "output_length": 1, "hash_ids": {1}}}\n'
    good = "".join(line.format(n, list(range(-(-n // 16)))) for n in range(10, 60))
    (told,) = complaints(put(good))
    assert told == (
        "8: hash_ids: 2 blocks of 512 tokens do not fit 17 tokens, which take 1, and so in 42 more "
        "lines; 16 tokens fit every line: say hash_block_size: 16, and time_unit: s if times "
        "are in seconds (format: timed_trace is both)"
    )
    assert len(read_trace(put(good), "timed_trace")) == 50
    assert len(read_trace(put(good), hash_block_size=16)) == 50
    told = complaints(put(good + line.format(-1, [1]) + line.format(40, [1])))
    assert told[0].endswith("which take 1, and so in 42 more lines: wrong hash_block_size?")
    assert [text.split(": is")[0] for text in told[1:]] == [
        "51: timestamp: -1 is negative",
        "51: input_length: -1 is negative",
    ]


@given(st.integers(1, 40), st.lists(st.integers(1, 200), min_size=1), st.booleans())
def test_the_size_that_is_proposed_fits(size, lengths, open_end):
    """Ids of some size are told to be so, or of another size that fits every line as well."""

    def check(blocks: HashBlocks) -> HashBlocks:
        for number, tokens in enumerate([*lengths, 2000]):
            count = tokens // size if open_end and tokens > size else -(-tokens // size)
            blocks.check(Row(number, {}, Problems(Path("x"))), count, tokens)
        return blocks

    found = check(HashBlocks(512, open_end=open_end))
    assert found.least <= size <= found.most
    assert found.misfits
    for good in {found.least, found.most}:
        assert not check(HashBlocks(good, open_end=open_end)).misfits


@pytest.mark.parametrize(
    "line",
    [b"a\rTIMESTAMP,b", b'"\rx', b"\x00\xff\xfe\r\x01", b"\x1cx", b'{"a":' + b"[" * 100_000],
)
def test_a_first_line_that_is_no_text(put, line):
    """It is told with its line, whether a format is named or guessed."""
    (told,) = complaints(put(line))
    assert told.startswith(("1: format: ", "1: line: bad JSON: ", "1: line: byte 0xff"))
    for name in FORMATS:
        assert complaints(put(line + b"\n1,2,3\n"), name)[0].startswith("1: ")


FORMED = st.sampled_from([AZURE.encode(), MOONCAKE.encode(), b'{"prompt_len": 4, "output_len": 3}'])


@pytest.mark.filterwarnings("ignore::simulator.util.errors.HeadwayWarning")  # of their order
@given(FORMED, st.binary(max_size=40), st.integers(0, 200), st.sampled_from([None, *FORMATS]))
def test_any_bytes_are_read_or_refused(tmp_path_factory, text, noise, at, name):
    """Never anything but a workload or a HeadwayError."""
    path = tmp_path_factory.mktemp("noise") / "trace"
    path.write_bytes(text[:at] + noise + text[at + len(noise) :])
    with suppress(HeadwayError):
        read_trace(path, name).check()


def test_bad_llmservingsim_lines_are_named(put):
    """Ids that do not fit the tokens are as wrong as a missing number."""
    path = put(
        '{"arrival_time_ns": 5, "input_toks": 20, "output_toks": 4, "hash_ids": [1, 2, 3]}\n'
        '{"arrival_time_ns": -5, "input_toks": 20}\n'
    )
    assert complaints(path) == [
        "1: hash_ids: 3 blocks of 16 tokens do not fit 24 tokens, which take 2; 8 tokens fit every "
        "line: say hash_block_size: 8",
        "2: arrival_time_ns: -5 is negative",
        "2: output_toks: missing",
    ]


def test_unknown_missing_and_empty(put, tmp_path):
    """What cannot be a trace says so in one line, with the formats there are."""
    assert complaints(put("a,b\n1,2\n"))[0].startswith(
        "1: format: 'a,b' begins no known format. Known are: azure, burstgpt, "
    )
    lines = "arrival,prompt_tokens,output_tokens\nnan,5,3\n"
    assert complaints(put(lines)) == [
        "2: arrival: 'nan' is no time, as 12.5 or 2023-11-16 18:15:46"
    ]
    assert complaints(put(""))[0] == "1: the file is empty: it has no request"
    for form in ("guidellm", "vllm_bench", "weka", "otel"):
        assert complaints(put(" \n"), format=form) == ["1: the file is empty: it has no request"]
    assert complaints(put(AZURE.split("\r\n", maxsplit=1)[0])) == [" no requests in it"]
    assert complaints(tmp_path / "nothing") == [" no such file"]
    assert complaints(tmp_path) == [" cannot be read: Is a directory"]
    assert complaints(put(AZURE), "burstgpt")[0].startswith("1: Timestamp: missing column")
    assert complaints(put(AZURE), "bogus")[0].startswith("format: 'bogus' is not known")


def test_a_place_is_data(put):
    """File, line and field of every fault can be read without a look at the message."""
    path = put(f"{HEAD}{PLACE},abc,1\n{PLACE},2,-1\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.path, error.line, error.field) == (path, 3, "ContextTokens")
        assert error.more == ((path, "'-1' is negative", 4, "GeneratedTokens"),)
        assert error.messages[0] == f"{path}:3: ContextTokens: {error.what}"
    with pytest.raises(TraceError) as caught:
        read_trace(path.with_name("nothing"))
    assert (caught.value.line, caught.value.field, caught.value.more) == (None, "", ())


def test_lines_are_counted_of_objects_that_span_some(put):
    """One after the other, in a page, in a list, and after blank lines."""
    text = '\n{"data": [\n{"a": 0},\n3]}\n{"c":\n1} {"d": 2}\n[{"e": 3},\n{"f": 4}]\n'
    path = put(text)
    problems = Problems(path)
    found = json_objects(path, problems, lambda one: ("data",) if "data" in one else None)
    lines = [(line, *one) for line, one in found]
    assert lines == [(3, "a"), (5, "c"), (6, "d"), (7, "e"), (8, "f")]
    assert problems.faults == [(path, "not a JSON object", 4, "line")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("azure_llm_2023_conv.csv.gz", ("Splitwise, ISCA'24", "CC-BY-4.0", "Trace_conv.csv")),
        ("AzureLLMInferenceTrace_code.csv", ("Splitwise, ISCA'24", "CC-BY-4.0", "Trace_code.csv")),
        ("AzureLLMInferenceTrace_conv_1week.csv", ("DynamoLLM", "CC-BY-4.0")),
        ("mooncake_fast25_conversation.jsonl", ("Apache-2.0", "kvcache-ai/Mooncake")),
        ("BurstGPT_1.csv", ("CC-BY-4.0", "HPMLL/BurstGPT")),
    ],
)
def test_a_well_known_trace_that_is_missing(tmp_path, name, says):
    """The error says whose it is, its licence, how to get it and where to put it."""
    (told,) = complaints(tmp_path / "traces" / name)
    assert all(part in told for part in (*says, "HEADWAY_DATA", name))


def test_truncated_gzip(put):
    """A download that broke off is an error, not a shorter trace."""
    (told,) = complaints(put(gzip.compress(AZURE.encode())[:-12]))
    assert told.startswith("1: gzip: cut short or damaged")


def test_options_that_do_not_belong_are_refused(put):
    """An option is never ignored."""
    path = put(AZURE)
    assert complaints(path, time_unit="s", chars_per_token=4.0) == [
        "time_unit: not an option of format azure, only of timed_trace or mooncake",
        "chars_per_token: not an option of format azure, only of sharegpt or custom",
    ]
    path = put(MOONCAKE)
    assert complaints(path, time_unit="us", hash_block_size=0, session_turns="x") == [
        "time_unit: 'us' is neither 's' nor 'ms'",
        "hash_block_size: 0 is not a number above 0",
        "session_turns: 'x' is neither 'delta' nor 'whole'",
    ]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'[{"timestamp": "2026-03-02T09:00:00Z", "prompt_tokens": 1}, {"ti', ":1: line: bad JSON"),
        (b"[]", ":1: line: no requests in it"),
        (b'{"data": []}', ":1: line: no requests in it"),
        (
            gzip.compress(gzip.compress(b"arrival\n", mtime=0), mtime=0),
            "is packed twice: unpack the gzip file",
        ),
        (bytes(range(256)), "byte 0x80 is not UTF-8 beside NUL bytes: no text"),
    ],
    ids=["torn", "empty", "empty page", "packed twice", "binary"],
)
def test_what_holds_no_requests_is_called_by_its_cause(put, data, why):
    """A list that is torn or empty, a file packed twice, and bytes that are no text."""
    with pytest.raises(HeadwayError, match=why):
        read_trace(put(data))


def test_what_is_no_text_is_called_so(put):
    with pytest.raises(HeadwayError, match="is not Parquet"):
        read_trace(put("arrival,prompt_tokens,output_tokens\n0,5,3\n", "t.parquet"), None)
