"""Step for step the recorded decisions of vLLM, and what is said when they are not."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.cli.main import main
from simulator.conformance.cases import read_cases
from simulator.conformance.compare import conform, default_golden, report
from simulator.conformance.replay import Replay
from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError

STEP = {"base_ns": 100, "per_token_ns": 10, "per_context_token_ns": 1, "empty_ns": 50}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4}


@pytest.fixture(scope="session")
def recorded(data: Path) -> Path:
    """The folder of recorded schedules, beside that of the published data."""
    folder = data.parent / "oracle"
    if not (folder / "cases").is_dir():
        pytest.skip("no recorded schedules beside HEADWAY_DATA")
    return folder


def _case_files(folder: Path) -> Iterator[Path]:
    yield from sorted((folder / "cases").iterdir())


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_all_recorded_cases_agree_in_every_step(recorded: Path, leap: bool) -> None:
    """vLLM 0.33.0's decisions, all fields, through the replica that every simulation uses."""
    steps = 0
    for path in _case_files(recorded):
        outcomes = conform(path, leap=leap)
        assert not any(outcome.difference for outcome in outcomes), report(outcomes)
        steps += sum(outcome.steps for outcome in outcomes)
    assert steps > 80_000


def make(folder: Path, requests: list[tuple[int, int, int]], **more: object) -> Path:
    """Write a case of (arrival, prompt, output); `more` goes into its config."""
    case = {
        "schema": 1,
        "name": "small",
        "config": SMALL | {"num_gpu_blocks": 100, "enable_prefix_caching": False} | more,
        "step_time": STEP,
        "requests": [
            {"id": k, "arrival_ns": at, "prompt_len": prompt, "output_len": output}
            for k, (at, prompt, output) in enumerate(requests)
        ],
    }
    path = folder / "cases" / "small.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(case, indent=1))
    return path


def play(path: Path, leap: bool = False) -> list[dict]:
    """Give the rows of a case."""
    (case,) = read_cases(path)
    return [json.loads(row) for row in Replay(case, leap=leap).rows()]


def steps_of(rows: list[dict], *names: str) -> list[tuple]:
    return [tuple(row[name] for name in names) for row in rows if row["type"] == "step"]


@pytest.mark.parametrize("leap", [False, True])
def test_two_requests_by_hand(tmp_path: Path, leap: bool) -> None:
    """A prompt of 6 and one of 5 under a budget of 8: the second is cut to the 2 that are left.

    dur = 100 + 10 * tokens + context; blocks of 4 tokens, 99 of them usable.
    """
    rows = play(make(tmp_path, [(0, 6, 3), (0, 5, 2)]), leap)
    assert steps_of(rows, "t", "dur", "sched", "new", "finished", "free", "free_end") == [
        (0, 188, [[0, 6, 0], [1, 2, 0]], [[0, 0], [1, 0]], [], 96, 96),
        (188, 152, [[0, 1, 6], [1, 3, 2]], [], [], 95, 95),
        (340, 134, [[0, 1, 7], [1, 1, 5]], [], [0, 1], 95, 99),
    ]
    assert rows[-3:] == [
        {
            "type": "request",
            "id": 0,
            "arrival": 0,
            "first_scheduled": 0,
            "first_token": 188,
            "finish": 474,
            "output_tokens": 3,
            "cached": 0,
            "preemptions": 0,
        },
        {
            "type": "request",
            "id": 1,
            "arrival": 0,
            "first_scheduled": 0,
            "first_token": 340,
            "finish": 474,
            "output_tokens": 2,
            "cached": 0,
            "preemptions": 0,
        },
        {"type": "end", "steps": 3, "complete": True},
    ]


@pytest.mark.parametrize("leap", [False, True])
def test_async_scheduling_by_hand(tmp_path: Path, leap: bool) -> None:
    """A step is decided as the one before it begins; blocks are held for one step longer.

    One request: 2 steps at time 0, the third when the first has ended. The request that arrives
    at 105, while the first step runs, is seen at 134 and gets its first token two steps later.
    """
    path = make(tmp_path, [(0, 4, 3), (105, 3, 1)], async_scheduling=True)
    rows = play(path, leap)
    assert steps_of(rows, "t", "start", "dur", "sched", "new", "finished", "free", "free_end") == [
        (0, 0, 144, [[0, 4, 0]], [[0, 0]], [], 98, 97),
        (0, 144, 115, [[0, 1, 4]], [], [], 97, 96),
        (144, 259, 149, [[0, 1, 5], [1, 3, 0]], [[1, 0]], [0, 1], 96, 99),
    ]


@pytest.mark.parametrize("leap", [False, True])
def test_async_engine_naps_after_a_step_that_schedules_nothing(tmp_path: Path, leap: bool) -> None:
    """One seat: while the last token of a request is on its way, there is nothing to schedule."""
    path = make(tmp_path, [(0, 4, 1), (0, 4, 1)], async_scheduling=True, max_num_seqs=1)
    assert steps_of(play(path, leap), "t", "start", "sched") == [
        (0, 0, [[0, 4, 0]]),
        (194, 194, [[1, 4, 0]]),
    ]


def test_priority_takes_tokens_back_from_the_least_urgent(tmp_path: Path) -> None:
    """Six blocks of four. Both run; when request 0, urgent, lacks a block, request 1 goes,

    though it was admitted first and has its token of this step already: the budget gets it back.
    """
    path = make(tmp_path, [(0, 11, 9), (1, 7, 9)], policy="priority", num_gpu_blocks=7)
    case = json.loads(path.read_text())
    case["requests"][0]["priority"] = 5
    path.write_text(json.dumps(case))
    rows = play(path)
    (gone,) = [row for row in rows if row.get("preempted")]
    assert gone["preempted"] == [0]
    assert [entry[0] for entry in gone["sched"]] == [1]
    assert gone["tokens"] == 1


def test_exact_ties_make_the_first_in_running_order_the_victim(tmp_path: Path) -> None:
    """Equal priority and arrival: request 0 lacks a block, preempts itself; request 1 goes on."""
    path = make(tmp_path, [(0, 4, 6), (0, 4, 6)], policy="priority", num_gpu_blocks=4)
    rows = play(path)
    gone = next(row for row in rows if row.get("preempted"))
    assert gone["preempted"] == [0]
    assert [entry[0] for entry in gone["sched"]] == [1]


def test_prefill_is_held_for_an_interval_while_decodes_run(tmp_path: Path) -> None:
    """With an interval of 3 the second request, there from 150 on, waits for two decode steps."""
    path = make(tmp_path, [(0, 4, 9), (150, 4, 2)], prefill_schedule_interval=3)
    sched = [[entry[:2] for entry in row[0]] for row in steps_of(play(path), "sched")]
    assert sched[:5] == [[[0, 4]], [[0, 1]], [[0, 1]], [[0, 1], [1, 4]], [[0, 1], [1, 1]]]


def test_an_adaptive_cap_is_the_fair_share_of_the_budget(tmp_path: Path) -> None:
    """A cap of 1 rises to 8 // 2 tokens for two requests."""
    options = {"long_prefill_token_threshold": 1, "long_prefill_token_threshold_adaptive": True}
    path = make(tmp_path, [(0, 12, 1), (0, 12, 1)], **options)
    assert steps_of(play(path), "sched")[0] == ([[0, 4, 0], [1, 4, 0]],)


@pytest.mark.parametrize("leap", [False, True])
def test_an_arrival_behind_the_head_may_let_the_head_fit(tmp_path: Path, leap: bool) -> None:
    """Four requests share the budget of 16: the head's first chunk shrinks to the block left.

    Request 0 holds six of the seven blocks. Alone with it, request 1 would take 8 tokens, two
    blocks; a leap that missed the arrivals of 2 and 3 would keep it waiting.
    """
    path = make(
        tmp_path,
        [(0, 21, 8), (450, 12, 1), (580, 1, 1), (581, 1, 1)],
        max_num_batched_tokens=16,
        num_gpu_blocks=8,
        long_prefill_token_threshold=1,
        long_prefill_token_threshold_adaptive=True,
        reserve_full_isl=False,
    )
    assert steps_of(play(path, leap), "t", "sched")[2:5] == [
        (447, [[0, 1, 21]]),
        (579, [[0, 1, 22]]),
        (712, [[0, 1, 23], [1, 4, 0]]),
    ]


def test_blocks_are_handed_out_in_the_order_of_the_running_list() -> None:
    """Also where a prompt under a cap stands before a decode: which block is whose decides later
    who finds what in the prefix cache."""
    scheduler = Scheduler(
        BlockManager(20, 4, prefix_caching=True),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=4,
    )
    long, short = Request(0, 0.0, 40, 1), Request(1, 0.0, 4, 5)
    scheduler.add(long)
    scheduler.add(short)
    scheduler.commit(scheduler.schedule(0.0), [1.0])
    scheduler.schedule(1.0)
    assert (long.blocks, short.blocks) == ([1, 3], [2, 4])


def test_max_steps_cuts_a_case(tmp_path: Path) -> None:
    """Who has not ended has no finish; asynchronous, the step in flight is counted, not told."""
    for asynchronous, told in ((False, 3), (True, 2)):
        path = make(tmp_path, [(0, 4, 9)], async_scheduling=asynchronous)
        case = json.loads(path.read_text()) | {"max_steps": 3}
        path.write_text(json.dumps(case))
        for leap in (False, True):
            rows = play(path, leap)
            assert rows[-1] == {"type": "end", "steps": 3, "complete": False}
            assert len(steps_of(rows, "t")) == told
            assert (rows[-2]["finish"], rows[-2]["output_tokens"]) == (None, told)


@pytest.fixture
def golden(tmp_path: Path) -> tuple[Path, Path]:
    """A case and its own log, where the command looks for it."""
    path = make(tmp_path, [(0, 6, 3), (0, 5, 2), (300, 20, 6)], num_gpu_blocks=9)
    target = tmp_path / "golden" / "small.jsonl"
    assert conform(path, write=target) == []
    return path, target


def test_a_written_log_is_a_golden_file(golden: tuple[Path, Path]) -> None:
    """What --write writes, packed or not, agrees with the next run."""
    path, log = golden
    assert default_golden(path) == log
    assert main(["conform", str(path)]) == 0
    packed = log.with_suffix(".jsonl.gz")
    assert main(["conform", str(path), "--leap", "--write", str(packed)]) == 0
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
        (lambda lines: [*lines, *lines], "holds 2 recordings for 1 cases"),
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fcfs"', "fcfs", "small.json:5: bad JSON"),
        ('"policy": "fcfs"', '"policy": "lifo"', "5: config.policy: must be fcfs or priority"),
        ('"policy"', '"num_scheduler_steps"', "5: config.num_scheduler_steps: an option that Head"),
        ('"max_num_seqs": 4', '"max_num_seqs": 0', "config.max_num_seqs: must be a whole number"),
        ('"max_num_seqs": 4', '"max_num_seqs": 99', "max_num_batched_tokens: must be >= max_num_s"),
        ('"schema": 1', '"schema": 2', "small.json:2: schema: must be 1, not 2"),
        ('"prompt_len": 6', '"prompt_len": "6"', "prompt_len: must be a whole number >= 1"),
        ('"prompt_len": 6', '"prompt_len": 64', "prompt_len: must be less than max_model_len (64)"),
        ('"id": 0', '"id": 0, "prompt": 6', "requests.0.prompt: Headway does not know this key"),
        ('"id": 0', '"id": 7', "requests.0.id: must be 0, its position, not 7"),
        ('"output_len": 3', '"output_len": 3, "segments": [["a", 5]]', "must add up to prompt_len"),
        ('"output_len": 3', '"output_len": 3, "segments": 5', "must be a list of [name, tokens]"),
        ('"output_len": 3', '"output_len": 3, "hash_ids": []', "fewer tokens than prompt_len"),
        ('"base_ns": 100', '"base_ns": -1', "step_time.base_ns: must be a whole number >= 0"),
    ],
)
def test_a_damaged_case_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    """The option that Headway does not know is named; exit code 2."""
    path = make(tmp_path, [(0, 6, 3)], policy="fcfs")
    text = path.read_text().replace('"config": {', '"config": {\n  "policy": "fcfs",', 1)
    text = text.replace(',\n  "policy": "fcfs"\n', "\n", 1)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert main(["conform", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told, told
    assert told.count("\n") == 1


def test_a_file_of_many_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One case in a line, packed; a mistake is told with its line."""
    one = json.loads(make(tmp_path, [(0, 6, 3)]).read_text())
    many = tmp_path / "cases" / "many.jsonl.gz"
    lines = [json.dumps(one | {"name": name}) for name in "abc"]
    many.write_bytes(gzip.compress("\n".join(lines).encode()))
    log = tmp_path / "golden" / "many.jsonl.gz"
    assert main(["conform", str(many), "--write", str(log)]) == 0
    told = capsys.readouterr().out
    assert told == f"written to {log}; no recording to compare it with\n"
    assert main(["conform", str(many)]) == 0
    assert "3 of 3 cases agree" in capsys.readouterr().out
    rows = gzip.decompress(log.read_bytes()).decode()
    log.write_bytes(gzip.compress(rows[::-1].replace('0:"eerf"', '1:"eerf"', 1)[::-1].encode()))
    assert main(["conform", str(many)]) in {0, 1}
    lines[1] = "{}"
    many.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert main(["conform", str(many)]) == 2
    assert "many.jsonl.gz:2: schema: must be 1" in capsys.readouterr().err


def test_a_truncated_gzip_file_is_an_error(golden: tuple[Path, Path]) -> None:
    """Not a traceback."""
    path, log = golden
    packed = log.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes())[:-20])
    log.unlink()
    with pytest.raises(HeadwayError, match="damaged gzip file"):
        conform(path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_never_fits_blocks_the_queue_as_in_vllm(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Headway's own runs reject it; a case plays what vLLM's scheduler does."""
    path = make(tmp_path, [(0, 30, 2), (5, 4, 2)], num_gpu_blocks=5, async_scheduling=asynchronous)
    rows = play(path)
    assert steps_of(rows, "t") == []
    assert rows[-1] == {"type": "end", "steps": 0, "complete": False}
