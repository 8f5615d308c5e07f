"""Headway beside a recording: what is said when they differ, or when one is damaged."""

import gzip
import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.conformance.compare import conform, default_golden
from simulator.util.errors import HeadwayError
from tests.support.conformance import make


@pytest.fixture
def golden(tmp_path: Path) -> tuple[Path, Path]:
    """A case and its own log, where the command looks for it."""
    path = make(tmp_path, [(0, 6, 3), (0, 5, 2), (300, 20, 6)], num_gpu_blocks=9)
    target = tmp_path / "golden" / "small.jsonl"
    assert conform(path, write=target) == []
    return path, target


def test_a_written_log_is_a_golden_file(
    golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What --write writes, packed or not, agrees with the next run."""
    path, log = golden
    assert default_golden(path) == log
    assert main(["conform", str(path)]) == 0
    packed = log.with_suffix(".jsonl.gz")
    assert main(["conform", str(path), "--leap", "--write", str(packed)]) == 0
    assert f"written to {packed}" in capsys.readouterr().out
    assert gzip.decompress(packed.read_bytes()) == log.read_bytes()
    log.unlink()
    assert main(["conform", str(path)]) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"free":3', '"free":2'),
        ("[2,8,8]", "[2,7,8]"),
        ('"waiting":1', '"waiting":2'),
        ('"head":2', '"head":null'),
        ('"finished":[0,1]', '"finished":[1,0]'),
        ('"cached":0', '"cached":4'),
        ('"complete":true', '"complete":false'),
    ],
)
def test_any_wrong_field_is_found(
    golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str], old: str, new: str
) -> None:
    """One field of one row changed: both rows are shown, and the exit code is 1."""
    path, log = golden
    text = log.read_text()
    assert old in text
    line = text[: text.index(old)].count("\n") + 1
    log.write_text(text.replace(old, new, 1))
    assert main(["conform", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"small.jsonl:{line})" in told
    assert "recorded" in told
    assert told.count("\n* ") == 1
    assert main(["conform", str(path), "--json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)
    assert not outcome["agrees"]
    assert outcome["difference"]["place"].endswith(f"small.jsonl:{line}")


def test_a_difference_tells_the_state_of_the_requests(golden: tuple[Path, Path]) -> None:
    """Of those that the differing field is about."""
    path, log = golden
    log.write_text(log.read_text().replace("[[0,1,6],[1,3,2]]", "[[0,1,6],[1,2,2]]"))
    (outcome,) = conform(path)
    assert outcome.steps == 1
    assert outcome.difference is not None
    assert outcome.difference.fields == ["sched"]
    assert outcome.difference.states == [
        "request 1: running, arrival 0, priority 0, prompt 5, answer 1 of 2, computed 5, "
        "preempted 0 times"
    ]


def test_missing_and_surplus_steps_are_differences(golden: tuple[Path, Path]) -> None:
    """A recording with a step less, or with one more, does not agree."""
    path, log = golden
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3] + lines[4:]))
    assert main(["conform", str(path)]) == 1
    log.write_text("".join([*lines[:3], lines[2], *lines[3:]]))
    assert main(["conform", str(path)]) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [*lines[:3], lines[3][:20]], "small.jsonl:4: the recording breaks off"),
        (lambda lines: [*lines[:3], lines[3][:40], *lines[4:]], "small.jsonl:4: bad JSON"),
        (lambda lines: lines[:-1], "breaks off: no record of type end"),
        (lambda lines: lines[1:], "small.jsonl:1: type: must begin with a record of type case"),
        (lambda lines: [lines[0].replace("small", "other"), *lines[1:]], "1: name: is of case 'ot"),
        (
            lambda lines: [lines[0].replace('"block_size":4', '"block_size":8'), *lines[1:]],
            "small.jsonl:1: config.block_size: recorded with 8, not 4",
        ),
        (
            lambda lines: [lines[0].replace('"block_size"', '"swap_space":1,"block_size"')],
            "small.jsonl:1: config.swap_space: an option that Headway does not know",
        ),
        (lambda lines: [*lines[:2], lines[2].replace('"free":', '"fre":'), *lines[3:]], "missing"),
        (
            lambda lines: [
                *lines[:2],
                lines[2].replace('"free":', '"extra":1,"free":'),
                *lines[3:],
            ],
            "small.jsonl:3: extra: a field that Headway does not know",
        ),
        (lambda lines: [*lines, *lines], "has 2 recordings for 1 cases"),
    ],
)
def test_a_damaged_recording_is_told_in_one_line(
    golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str], edit, message: str
) -> None:
    """With file and line, and exit code 2."""
    path, log = golden
    log.write_text("\n".join(edit(log.read_text().splitlines())))
    assert main(["conform", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("small.jsonl") == told.count("\n")


def test_a_truncated_gzip_file_is_an_error(golden: tuple[Path, Path]) -> None:
    """Not a traceback."""
    path, log = golden
    packed = log.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes())[:-20])
    log.unlink()
    with pytest.raises(HeadwayError, match="damaged gzip file"):
        conform(path)


def test_a_recording_may_be_written_by_any_json_writer(golden: tuple[Path, Path]) -> None:
    """With spaces, and keys in another order: as many steps agree."""
    path, log = golden
    (plain,) = conform(path)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(dict(reversed(row.items()))) + "\n" for row in rows))
    (outcome,) = conform(path)
    assert outcome.agrees
    assert outcome.steps == plain.steps > 0


@pytest.mark.parametrize("options", [["--write", "{case}"], ["--write", "{log}"],
                                     ["--golden", "{log}", "--write", "{log}"]])  # fmt: skip
def test_what_is_read_is_not_written_over(
    golden: tuple[Path, Path], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Neither the case nor its recording."""
    path, log = golden
    before = path.read_bytes(), log.read_bytes()
    words = [word.format(case=path, log=log) for word in options]
    assert main(["conform", str(path), *words]) == 2
    assert "is read here" in capsys.readouterr().err
    assert (path.read_bytes(), log.read_bytes()) == before


@pytest.mark.parametrize("interval", [None, 0, 12])
def test_a_recording_without_retention_agrees_under_null_or_the_default(
    tmp_path: Path, interval: int | None
) -> None:
    """Neither the case nor its recording names the interval; any other one is a difference."""
    options = {"kv_cache_groups": [0, 8], "enable_prefix_caching": True}
    path = make(tmp_path, [(0, 40, 2)], **options, prefix_cache_retention_interval=interval)
    log = default_golden(path).with_suffix("")
    conform(path, write=log)
    make(tmp_path, [(0, 40, 2)], **options)
    head, *rows = log.read_text().splitlines(keepends=True)
    header = json.loads(head)
    assert header["config"].pop("prefix_cache_retention_interval") == interval
    log.write_text(json.dumps(header | {"vllm": "0.33.0"}) + "\n" + "".join(rows))
    (outcome,) = conform(path)
    assert outcome.agrees == (interval != 12)
