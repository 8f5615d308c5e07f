"""Bytes of a trace: packed or plain, in which encoding, in which unit and century."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pytest

from headway.cli.main import main
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError, MappingError
from simulator.workload.traces import read_trace
from simulator.workload.traces.read import comes_in_pieces, read_pieces

TEXT = "arrival,prompt_tokens,output_tokens,client\n0,5,3,Möller\n1,6,4,Müller\n"
QWEN = '{{"chat_id": {0}, "parent_chat_id": -1, "timestamp": {0}, "input_length": 17, '
QWEN += '"output_length": 3, "hash_ids": [{0}, 99]}}\n'
PLAIN = '{{"timestamp": {0}, "input_length": 17, "output_length": 3, "hash_ids": [{0}, 99]}}\n'


def zipped(data, *names):
    """Pack the same bytes under each name."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, data)
    return whole.getvalue()


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        bz2.compress,
        lzma.compress,
        lambda data: zipped(data, "log/", "__MACOSX/._t.csv", "t.csv"),
        lambda data: zipped(data, "README.md", "log/LICENSE", "log/t.csv"),
        zstd,
        lambda data: zstd(data[:40]) + zstd(data[40:]),
        lambda data: data.decode().encode("utf-16"),
        lambda data: b"\xfe\xff" + data.decode().encode("utf-16-be"),
        lambda data: data.decode().encode("utf-32"),
        lambda data: b"\xef\xbb\xbf" + data,
    ],
)
def test_a_packed_file_reads_as_the_plain_one(put, pack):
    path = put("", "t.dat")
    path.write_bytes(pack(TEXT.encode()))
    work = read_trace(path)
    assert work.arrival.tolist() == [0, 1]
    assert work.client == ["Möller", "Müller"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zipped(b"a,b\n", "a.csv", "b.csv"), "has 2 files in it (a.csv, b.csv)"),
        (zipped(b"", "[Content_Types].xml", "xl/workbook.xml"), "is a workbook of Excel"),
        (b"7z\xbc\xaf\x27\x1c\0\x04", "is a 7z archive; unpack it"),
        (gzip.compress(b"x" * 257 + b"ustar\0"), "is a tar archive; unpack it"),
        (gzip.compress(b"PAR1abc"), "is Parquet in a packed file"),
        (gzip.compress(TEXT.encode())[:-9], "gzip: cut short or damaged"),
        (lzma.compress(TEXT.encode())[:-20], "lzma: cut short or damaged"),
        (bz2.compress(TEXT.encode())[:20] + b"xyz" * 30, "bz2: cut short or damaged"),
        (zipped(TEXT.encode() * 9, "t.csv")[:60], "zip: cut short or damaged"),
        (TEXT.encode("cp1252"), ":2: line: byte 0xf6 is not UTF-8; say its encoding"),
        (TEXT.encode("utf-16-le"), "(--encoding utf-16-le)"),
        (TEXT.encode("utf-16-be"), "(--encoding utf-16-be)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "packed",  # its bytes have the time
)
def test_what_cannot_be_read_is_named(put, data, said):
    path = put("", "t.dat")
    path.write_bytes(data)
    with pytest.raises(HeadwayError) as caught:
        read_trace(path)
    assert said in str(caught.value)


def test_an_encoding_may_be_told(put, capsys, monkeypatch):
    """Names stay apart, whole and a piece at a time; one that Python lacks is refused."""
    path = put("", "t.csv")
    path.write_bytes(TEXT.encode("cp1252"))
    assert read_trace(path, encoding="cp1252").client == ["Möller", "Müller"]
    monkeypatch.setattr("simulator.workload.traces.read.BLOCK", 8)
    given = {"encoding": "cp1252"}
    assert comes_in_pieces(path, None, given, "")
    pieces = [name for part in read_pieces(path, None, given, "") for name in part.client]
    assert pieces == ["Möller", "Müller"]
    assert main(["trace", "describe", str(path), "--encoding", "cp1252"]) == 0
    assert "Möller" in capsys.readouterr().out
    with pytest.raises(MappingError, match="encoding: 'cp0' is none that Python knows"):
        read_trace(path, encoding="cp0")


def test_a_scenario_may_say_both_encoding_and_format(put):
    path = put("", "t.csv")
    path.write_bytes(TEXT.encode("cp1252"))
    trace = {"path": str(path), "format": "requests", "encoding": "cp1252"}
    work = make_workload(load_scenario({"workload": {"trace": trace}}))
    assert work.client == ["Möller", "Müller"]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "t,prompt_tokens,output_tokens\n1751328000000,5,3\n",
            {"columns": "arrival=t:s,prompt=prompt_tokens,output=output_tokens"},
            ":2: t: 1751328000000 is the year 57467: its unit is ms, say arrival=t:ms",
        ),
        (
            "arrival,prompt_tokens,output_tokens\n1751328000,5,3\n1751328001000,5,3\n",
            {},
            ":3: arrival: 1751328001000 is the year 57467: its unit is ms, others are "
            "of this century",
        ),
        (
            '{"arrival": 1751328000000, "prompt_tokens": 5, "output_tokens": 3}\n'
            '{"arrival": 1751328001, "prompt_tokens": 5, "output_tokens": 3}\n',
            {},
            ":2: arrival: 1751328001 is the year 1970, others after 2000",
        ),
        (
            "arrival,prompt_tokens,output_tokens\n2126-03-30T02:00:00Z,5,3\n",
            {},
            ":2: arrival: 2126-03-30T02:00:00 is the year 2126",
        ),
        (
            PLAIN.format(1751328000000),
            {"format": "timed_trace"},
            ":1: timestamp: 1751328000000 is the year 57467: its unit is ms",
        ),
    ],
)
def test_a_century_that_cannot_be_is_refused(put, text, options, said):
    with pytest.raises(HeadwayError) as caught:
        read_trace(put(text), **options)
    assert said in str(caught.value)


def test_seconds_stay_seconds(put):
    """Qwen's traces are known by their keys; others by a fraction, where blocks have 16 tokens."""
    times = (0.5, 1.0, 2.5)
    for line in (QWEN, PLAIN):
        path = put("".join(line.format(t).replace(f"[{t}", f"[{int(2 * t)}") for t in times))
        assert read_trace(path, hash_block_size=16).arrival.tolist() == [0, 0.5, 2]
        told = read_trace(path, "mooncake", hash_block_size=16, time_unit="ms")
        assert told.arrival.tolist() == [0, 0.0005, 0.002]
    whole = put("".join(PLAIN.format(t) for t in (0, 500, 2000)))
    assert read_trace(whole, hash_block_size=16).arrival.tolist() == [0, 0.5, 2]


def test_a_benchmark_without_start_times_is_read_where_all_came_at_once(put):
    lists = {"input_lens": [5, 6], "output_lens": [2, 2], "ttfts": [0.1, 0.2], "itls": [[1], [1]]}
    path = put(json.dumps(lists | {"request_rate": float("inf"), "max_concurrency": None}))
    assert read_trace(path).arrival.tolist() == [0, 0]
    with pytest.raises(HeadwayError, match=r"request_rate 2.0, max_concurrency 8\) did not write"):
        read_trace(put(json.dumps(lists | {"request_rate": 2.0, "max_concurrency": 8})))
