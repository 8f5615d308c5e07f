"""Decisions of SGLang, recorded and by hand, step for step."""

import json
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.conformance.cases import read_cases
from headway.conformance.compare import conform, report
from headway.conformance.sglang_replay import SglangReplay
from simulator.util.errors import HeadwayError
from tests.support.conformance import STEP, recorded, steps_of


@pytest.mark.many
@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@recorded("oracle_sglang/cases/*")
def test_recorded_cases_agree_in_every_step(path: Path, leap: bool) -> None:
    """SGLang 0.5.23's decisions, all fields."""
    outcomes = conform(path, leap=leap)
    assert outcomes
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)


HERE = Path(__file__).parent
SMALL = {
    "max_running_requests": 4,
    "chunked_prefill_size": 8,
    "context_length": 64,
    "max_total_tokens": 100,
}


def make(folder: Path, requests: list[dict[str, object]], **more: object) -> Path:
    """Write a case; `more` goes into its config."""
    numbered = [{"id": k, **request} for k, request in enumerate(requests)]
    case = {"schema": 1, "name": "small", "config": SMALL | more, "step_time": STEP}
    path = folder / "cases" / "small.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(case | {"requests": numbered}, indent=1))
    return path


def ask(at: int, prompt: int, output: int, **more: object) -> dict[str, object]:
    return {"arrival_ns": at, "prompt_len": prompt, "output_len": output, **more}


def play(path: Path, leap: bool) -> list[dict]:
    (case,) = read_cases(path)
    return [json.loads(row) for row in SglangReplay(case, leap=leap).rows()]  # type: ignore[arg-type]


@pytest.mark.parametrize("leap", [False, True])
def test_a_prompt_is_split_and_then_all_decode(tmp_path: Path, leap: bool) -> None:
    """Prompts of 6 and 5 in chunks of 8: 6 + 2, then 3, then both decode.

    dur = 100 + 10 * tokens + context. Of 100 tokens 89 are free, then one less for each decode;
    what ends leaves its prompt and all but its last token in the tree.
    """
    rows = play(make(tmp_path, [ask(0, 6, 3), ask(0, 5, 2)]), leap)
    names = ("t", "dur", "mode", "sched", "chunked", "free", "full", "running", "evictable_end")
    assert steps_of(rows, *names) == [
        (0, 188, "prefill", [[0, 6, 0], [1, 2, 0]], 1, 92, False, 0, 0),
        (188, 135, "prefill", [[1, 3, 2]], None, 89, False, 1, 0),
        (323, 133, "decode", [[0, 1, 6], [1, 1, 5]], None, 87, False, 2, 6),
        (456, 118, "decode", [[0, 1, 7]], None, 86, False, 1, 14),
    ]
    assert rows[-1] == {"type": "end", "steps": 4, "complete": True}
    assert [row["reason"] for row in rows[-3:-1]] == ["FINISH_LENGTH"] * 2


@pytest.mark.parametrize("leap", [False, True])
def test_overlap_chooses_before_it_knows(tmp_path: Path, leap: bool) -> None:
    """A stop at the second token of at most 9: a further decode is on its way when it comes out.

    Each step is chosen when the one before it begins.
    """
    path = make(tmp_path, [ask(0, 6, 2, max_new_tokens=9)], disable_overlap_schedule=False)
    rows = play(path, leap)
    assert steps_of(rows, "t", "start", "dur", "sched", "finished", "free", "free_end") == [
        (0, 0, 166, [[0, 6, 0]], [], 94, 93),
        (0, 166, 117, [[0, 1, 6]], [0], 93, 92),
        (166, 283, 118, [[0, 1, 7]], [], 92, 92),
    ]
    assert rows[-2]["finish"] == 283
    assert rows[-2]["reason"] == "FINISH_MATCHED_TOKEN"


@pytest.mark.parametrize("leap", [False, True])
def test_two_end_in_the_order_of_their_batch(tmp_path: Path, leap: bool) -> None:
    """Step 7, chosen while step 6 runs, retracts request 2 and puts 1 before 0: 6 has 0 first."""
    options = {"init_new_token_ratio": 0.0, "min_new_token_ratio_factor": 0.0}
    options |= {"disable_overlap_schedule": False, "disable_radix_cache": True}
    options |= {"chunked_prefill_size": 32, "max_total_tokens": 34}
    asked = [ask(0, 10, 5, max_new_tokens=8), ask(0, 6, 5, max_new_tokens=8), ask(300, 5, 9)]
    steps = steps_of(play(make(tmp_path, asked, **options), leap), "finished", "retracted")
    assert steps[6:8] == [([0, 1], []), ([], [2])]


def test_a_written_log_is_a_golden_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in one command with others; a wrong ratio is found."""
    path = make(tmp_path, [ask(0, 6, 3), ask(0, 5, 2)])
    log = tmp_path / "golden" / "small.jsonl"
    assert main(["conform", str(path), "--write", str(log)]) == 0
    assert main(["conform", str(path), str(path), "--leap"]) == 0
    assert "2 of 2 cases agree, 8 steps" in capsys.readouterr().out
    log.write_text(log.read_text().replace('"ratio":0.698996667', '"ratio":0.6', 1))
    assert main(["conform", str(path)]) == 1
    assert "step 2 differs in ratio" in capsys.readouterr().out
    assert main(["conform", str(path), str(path), "--write", str(log)]) == 2


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"page_size": 0}, ": config.page_size: must be a whole number >= 1, not 0"),
        ({"schedule_policy": "sjf"}, ": config.schedule_policy: must be an order of SGLang's"),
        ({"max_num_seqs": 4}, ": config.max_num_seqs: an option that Headway does not know"),
        (
            {"schedule_policy": "lpm", "enable_priority_scheduling": True},
            ": config.schedule_policy: with priorities must be fcfs or lof",
        ),
        ({"context_length": 6}, ": requests.0.prompt_len: must be less than context_length (6)"),
    ],
)
def test_bad_cases_are_told_by_field(tmp_path: Path, config: dict, told: str) -> None:
    with pytest.raises(HeadwayError) as error:
        conform(make(tmp_path, [ask(0, 6, 3)], **config))
    assert told in error.value.messages[0]


EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "acceptance": 1}


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_drawn_cases_with_drafts_agree_in_every_step(leap: bool) -> None:
    """EAGLE of SGLang 0.5.23: chains and trees, with its overlap and without."""
    outcomes = conform(HERE / "cases/eagle.jsonl.gz", leap=leap)
    assert len(outcomes) == 24
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)


def test_drafts_take_memory_ahead(tmp_path: Path) -> None:
    """2 drafts, all right: 3 tokens a step, and 2 * 3 slots beyond those stored.

    A prompt of 6 leaves 94 of 100 free; a decode takes the slots 7 to 12, the next one 3 more. In
    the end all 12 tokens are stored, the last one, too, since a draft behind it was right: 11
    pairs in the tree.
    """
    rows = play(make(tmp_path, [ask(0, 6, 6)], **EAGLE), False)
    names = ("mode", "sched", "free", "finished", "free_end", "evictable_end")
    assert steps_of(rows, *names) == [
        ("prefill", [[0, 6, 0]], 94, [], 94, 0),
        ("decode", [[0, 3, 6]], 88, [], 88, 0),
        ("decode", [[0, 3, 9]], 85, [0], 89, 11),
    ]


def test_a_step_ahead_counts_what_is_known(tmp_path: Path) -> None:
    """The second decode is decided when nobody knows that the first one brings 3 tokens."""
    path = make(tmp_path, [ask(0, 6, 8)], disable_overlap_schedule=False, **EAGLE)
    assert steps_of(play(path, False), "sched", "free", "finished") == [
        ([[0, 6, 0]], 94, []),
        ([[0, 3, 6]], 88, []),
        ([[0, 3, 9]], 88, []),
        ([[0, 3, 12]], 85, [0]),
    ]
