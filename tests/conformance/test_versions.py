"""The rules of older vLLM releases: recorded from them, and by hand, step for step."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.conformance.cases import read_cases
from headway.conformance.compare import conform, conform_families, report
from headway.conformance.replay import Replay
from simulator.schedulers.vllm.rules import (
    CannotFollowError,
    Release,
    check_known,
    families,
    family_of,
    read_release,
)
from tests.support.conformance import make, recorded, steps_of


def play(path: Path, release: Release | None, leap: bool = False) -> list[dict]:
    """Return the rows of a case by the rules of a release."""
    (case,) = read_cases(path)
    return [json.loads(row) for row in Replay(case, leap=leap, release=release).rows()]


@pytest.mark.many
@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@recorded("oracle_versions/golden/*/*.jsonl.gz")
def test_recorded_releases_agree_in_every_step(path: Path, leap: bool) -> None:
    """Those of 0.15.1 to 0.33.0, each by the rules that its header names."""
    folder, name = path.parents[2], path.name.removesuffix(".jsonl.gz")
    case = folder / "cases" / path.name
    if not case.exists():
        case = folder.parent / "oracle" / "cases" / f"{name}.json"
    outcomes = conform(case, path, leap=leap)
    assert outcomes
    assert all(outcome.agrees for outcome in outcomes), report(outcomes)


@recorded("cases/parity/[klsv]*.cases.jsonl*")
def test_fresh_recordings_agree_in_every_field(path: Path) -> None:
    """Of 0.32, 0.33 and SGLang, drawn by others."""
    golden = path.with_name(path.name.replace(".cases.jsonl", ".golden.jsonl"))
    outcomes = conform(path, golden if golden.exists() else Path(f"{golden}.gz"))
    assert outcomes
    assert all(outcome.agrees for outcome in outcomes), report(outcomes)


def test_families_are_named_by_their_first_and_last_versions() -> None:
    """Thirteen of them; a version without a patch release is its last one that differs."""
    assert [*families()] == [
        *("0.10 to 0.11.0", "0.11.1 to 0.11.2", "0.12 to 0.16", "0.17 to 0.18", "0.19 to 0.22"),
        *("0.23", "0.24", "0.25 to 0.27", "0.28", "0.29 to 0.30", "0.31", "0.32", "0.33"),
    ]
    told = {"0.8.5": 0, "v0.11.0": 0, "0.11": 1, "0.11.1rc2": 1, "vllm:0.23.0+cu128": 5, "0.40": 12}
    for text, number in told.items():
        assert family_of(read_release(text)) == [*families()][number]
    assert family_of(None) == "0.33"
    assert read_release("nightly") is None


@pytest.mark.parametrize("text", ["0.7", "0.34", "1.0", "x", "0", "0.1", "", "0.15\n"])
def test_an_unknown_version_is_told_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"whose rules are known, 0\.10 to 0\.33 .*, not"):
        check_known(text)


def test_a_version_before_0_8_names_the_engine_that_it_ran() -> None:
    with pytest.raises(ValueError, match=r"not '0\.6\.6', which ran .* engine\.name=vllm-v0"):
        check_known("0.6.6")


@pytest.mark.parametrize("leap", [False, True])
def test_before_0_19_the_first_chunk_alone_must_fit(tmp_path: Path, leap: bool) -> None:
    """Five blocks of four. Request 0 holds two; the prompt of 1 needs four, its first chunk one."""
    path = make(tmp_path, [(0, 5, 3), (0, 16, 1)], num_gpu_blocks=6)
    assert steps_of(play(path, (0, 18, 1), leap), "sched")[0] == ([[0, 5, 0], [1, 3, 0]],)
    assert steps_of(play(path, (0, 19, 0), leap), "sched")[0] == ([[0, 5, 0]],)


@pytest.mark.parametrize("leap", [False, True])
def test_before_0_12_others_are_tried_behind_a_prompt_that_is_too_long(
    tmp_path: Path, leap: bool
) -> None:
    """A budget of 64 without chunks: 0 takes 40, 1 and 2 want 30 each, 3 has 10.

    Those set aside come back in reversed order: 2 is the head then.
    """
    requests = [(0, 40, 2), (0, 30, 1), (0, 31, 1), (0, 10, 2)]
    options = {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}
    path = make(tmp_path, requests, **options)
    assert steps_of(play(path, (0, 11, 2), leap), "sched", "waiting", "head")[:2] == [
        ([[0, 40, 0], [3, 10, 0]], 2, 2),
        ([[0, 1, 40], [3, 1, 10], [2, 31, 0], [1, 30, 0]], 0, None),
    ]
    assert steps_of(play(path, (0, 12, 0), leap), "sched", "waiting", "head")[:1] == [
        ([[0, 40, 0]], 3, 1)
    ]


@pytest.mark.parametrize("leap", [False, True])
def test_before_0_11_1_a_request_is_computed_once_more_after_its_end(
    tmp_path: Path, leap: bool
) -> None:
    """Asynchronous. The third step brings the last token of both; the fourth computes in vain."""
    path = make(tmp_path, [(0, 4, 3), (105, 3, 1)], async_scheduling=True)
    rows = play(path, (0, 11, 0), leap)
    assert steps_of(rows, "t", "start", "sched", "finished", "free", "free_end") == [
        (0, 0, [[0, 4, 0]], [], 98, 97),
        (0, 144, [[0, 1, 4]], [], 97, 96),
        (144, 259, [[0, 1, 5], [1, 3, 0]], [0, 1], 96, 99),
        (259, 408, [[0, 1, 6], [1, 1, 3]], [], 96, 99),
    ]
    assert [row["output_tokens"] for row in rows if row["type"] == "request"] == [3, 1]
    assert len(steps_of(play(path, (0, 11, 1), leap), "t")) == 3


@pytest.mark.parametrize("leap", [False, True])
def test_at_max_model_len_there_is_nothing_to_compute_in_vain(tmp_path: Path, leap: bool) -> None:
    """The last token would stand where no token may."""
    path = make(tmp_path, [(0, 61, 9)], async_scheduling=True, max_num_batched_tokens=64)
    assert len(steps_of(play(path, (0, 11, 0), leap), "t")) == 3


@pytest.mark.parametrize("leap", [False, True])
def test_before_0_24_freed_blocks_are_taken_in_turn(tmp_path: Path, leap: bool) -> None:
    """Four blocks of four; each request takes two, one of which ends up with a hash.

    After requests 0 and 1 the free list was: blank of 0, hash of 0, blank of 1, hash of 1. So 2
    takes the hash of 0 away, and 3, which begins as 0 does, finds nothing. From 0.24 on blanks
    go first.
    """
    requests = [(0, 5, 1), (300, 5, 1), (600, 5, 1), (900, 5, 1)]
    path = make(tmp_path, requests, num_gpu_blocks=5, enable_prefix_caching=True)
    case = json.loads(path.read_text())
    for number in (0, 3):
        case["requests"][number]["segments"] = [["same", 5]]
    path.write_text(json.dumps(case))
    assert play(path, (0, 23, 0), leap)[-2]["cached"] == 0
    assert play(path, (0, 24, 0), leap)[-2]["cached"] == 4


def test_before_0_31_a_cap_holds_for_a_request_that_is_alone(tmp_path: Path) -> None:
    path = make(tmp_path, [(0, 8, 1)], long_prefill_token_threshold=3)
    capped = [([[0, 3, 0]],), ([[0, 3, 3]],), ([[0, 2, 6]],)]
    assert steps_of(play(path, (0, 30, 0)), "sched") == capped
    assert steps_of(play(path, (0, 31, 0)), "sched") == [([[0, 8, 0]],)]


SELF_PREEMPTING = {"policy": "priority", "num_gpu_blocks": 4, "max_num_batched_tokens": 12}


def test_before_0_33_the_walk_ends_when_a_request_preempts_itself(tmp_path: Path) -> None:
    """Equal priority and arrival, three blocks: 0 lacks one and goes; has 1 its turn then?"""
    path = make(tmp_path, [(0, 8, 6), (0, 4, 6)], **SELF_PREEMPTING)
    for release, sched in (((0, 32, 0), []), ((0, 33, 0), [1])):
        gone = next(row for row in play(path, release) if row.get("preempted"))
        assert gone["preempted"] == [0]
        assert [entry[0] for entry in gone["sched"]] == sched


def test_options_that_a_release_lacks_have_no_effect(tmp_path: Path) -> None:
    """A recording names what was asked for, though its vLLM does not know it."""
    requests = [(0, 4, 9), (150, 4, 2)]
    plain = play(make(tmp_path, requests), (0, 23, 0))
    options = {
        "prefill_schedule_interval": 3,
        "watermark": 0.9,
        "long_prefill_token_threshold_adaptive": True,
    }
    path = make(tmp_path, requests, **options)
    assert play(path, (0, 23, 0)) == plain
    assert play(path, None) != plain


def _urgent_last(tmp_path: Path) -> Path:
    """Request 0 has its token of a step already when 1, more urgent, lacks a block."""
    path = make(tmp_path, [(0, 11, 9), (1, 7, 9)], policy="priority", num_gpu_blocks=7)
    case = json.loads(path.read_text())
    case["requests"][0]["priority"] = 5
    path.write_text(json.dumps(case))
    return path


def test_before_0_11_1_priorities_without_blocks_are_refused(tmp_path: Path, capsys) -> None:
    """In one line, with the steps that agree so far; the exit code is neither 0 nor 1."""
    path = _urgent_last(tmp_path)
    with pytest.raises(CannotFollowError, match=r"vLLM before 0\.11\.1"):
        play(path, (0, 11, 0))
    golden = tmp_path / "golden.jsonl"
    conform(path, write=golden)
    lines = golden.read_text().splitlines()
    header = json.loads(lines[0]) | {"vllm": "0.11.0"}
    golden.write_text("\n".join([json.dumps(header), *lines[1:]]))
    assert main(["conform", str(path), "--golden", str(golden)]) == 2
    told = capsys.readouterr().out
    assert told.count("cannot be simulated") == 1
    assert "steps agree, then stop (rules of vLLM 0.10 to 0.11.0)" in told


def test_a_recordings_version_is_followed_and_families_are_found(tmp_path: Path, capsys) -> None:
    """All but the newest end the walk when a request preempts itself."""
    path = make(tmp_path, [(0, 8, 3), (0, 4, 2)], **SELF_PREEMPTING)
    (case,) = read_cases(path)
    golden = tmp_path / "golden" / "small.jsonl"
    golden.parent.mkdir()
    golden.write_text("\n".join(Replay(case, release=(0, 32, 0)).log()))
    assert json.loads(golden.read_text().splitlines()[0])["vllm"] == "0.32.0"
    assert main(["conform", str(path), "--leap"]) == 0
    assert "steps agree (rules of vLLM 0.32)" in capsys.readouterr().out
    assert main(["conform", str(path), "--families"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line[0] for line in told] == ["*"] * 12 + [" "]
    assert told[-1].split() == ["vLLM", "0.33", "0", "of", "1", "cases", "agree"]
    assert "vLLM 0.11.1 to 0.11.2  1 of 1" in told[1]
    golden.write_text(golden.read_text().replace('"free":', '"free":1'))
    assert main(["conform", str(path), "--families"]) == 1
    assert not any(one.agrees for outcomes in conform_families(path).values() for one in outcomes)
    assert main(["conform", str(path), "--families", "--write", str(tmp_path / "x")]) == 2


@pytest.mark.parametrize("version", ['"newest"', "3", '""', "[]"])
def test_a_header_without_a_version_in_it_is_told(tmp_path: Path, capsys, version: str) -> None:
    path = make(tmp_path, [(0, 4, 1)])
    golden = tmp_path / "golden.jsonl"
    conform(path, write=golden)
    golden.write_text(golden.read_text().replace('"name"', f'"vllm":{version},"name"', 1))
    assert main(["conform", str(path), "--golden", str(golden)]) == 2
    assert "golden.jsonl:1: vllm: must be a version such as 0.25.1, not" in capsys.readouterr().err
