"""One request's story, from files."""

from pathlib import Path

import pytest

from headway.cli.main import main
from headway.runs.explain import explain
from simulator import load_scenario, run
from simulator.scenario.draw import make_workload
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError
from tests.diagnosis.test_rules import PAIR

STORY = """\
Request 1: 7 prompt tokens, 4 generated. It ended by itself.

         0.000 s  sent to the engine; 0 of 4 seats are taken, 0 requests wait
         0.000 s  scheduled for the first time
         1.000 s  first token (TTFT 1.000 s)
         6.000 s  last token (E2EL 6.000 s)

Where its 6.000 s went:
         1.000 s   16.7%  prefill
         2.000 s   33.3%  decode, as if alone
         2.000 s   33.3%  preempted, waiting to be admitted again
         1.000 s   16.7%  computing again what a preemption lost

The largest part, 33.3%, is decode, as if alone.
The run's median E2EL is 5.000 s; this request took 1.20 times that.
Each token after the first took 1666.67 ms on average; decoding as if alone, 666.67 ms.
It was preempted once: 2.000 s until it was admitted again, 1.000 s to compute again what was lost.
From being sent to its end the engine took 6 steps, 33% of them with prompts, with 1.3 requests in \
the batch on average.
It misses goodput.ttft (500 ms): 1,000.0 ms.
It meets goodput.e2el (6000 ms): 6,000.0 ms."""
GOODPUT = "goodput={ttft: 500, e2el: 6000}"


@pytest.fixture
def folder(write, tmp_path: Path) -> Path:
    """The files of a run of two requests, the second preempted once."""
    write_run(run(load_scenario(write(PAIR), [GOODPUT])), tmp_path / "out")
    return tmp_path / "out"


def test_the_story(folder: Path, capsys) -> None:
    """All of it, worked out in test_breakdown.py, and by the command."""
    assert explain(folder, 1) == STORY
    assert main(["explain", str(folder), "1"]) == 0
    assert capsys.readouterr().out == STORY + "\n"


def test_seats_of_a_static_batch(write, tmp_path: Path) -> None:
    """Answers of 5, 17 and 40 tokens: 35 and 23 of 40 steps idle, 57.5 %; the longest none."""
    text = """name: batch
engine: {name: textbook, scheduling_policy: static, max_num_seqs: 4, max_num_batched_tokens: 64,
         max_model_len: 64, enable_prefix_caching: false}
cost: {kind: linear, base: 1}
workload: {num_prompts: 3, request_rate: inf, input_len: 8,
           output_len: {kind: cycle, values: [5, 17, 40]}}
"""
    write_run(run(load_scenario(write(text))), tmp_path / "out")
    first, second, longest = (explain(tmp_path / "out", number) for number in range(3))
    assert "idle for 35 of the 40 steps of its batch (87.5%, 35.000 s)" in first
    assert "idle for 23 of the 40 steps of its batch (57.5%, 23.000 s)" in second
    assert "seat was idle" not in longest


def test_parquet(write, tmp_path: Path) -> None:
    """The same story from the other format."""
    pytest.importorskip("pyarrow")
    write_run(run(load_scenario(write(PAIR), [GOODPUT])), tmp_path / "out", "parquet")
    assert explain(tmp_path / "out", 1) == STORY


def test_held_by_the_client_and_rejected(write, tmp_path: Path) -> None:
    """One of two is too long; a third waits behind max_concurrency until the first ends at 4 s."""
    lines = ["18:00:00,7,4", "18:00:01,90,4", "18:00:01,7,1"]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "t.csv").write_text(text + "".join(f"2023-11-16 {line}\n" for line in lines))
    sets = ["workload={trace: {path: t.csv}, max_concurrency: 1}"]
    write_run(run(load_scenario(write(PAIR), sets)), tmp_path / "out")
    assert (
        "It was rejected: it could never fit, or a limit of the queue (503) kept it out."
        in explain(tmp_path / "out", 1)
    )
    third = explain(tmp_path / "out", 2)
    assert "1.000 s  due; the client keeps it back: max_concurrency" in third
    assert "4.000 s  sent to the engine; 0 of 4 seats are taken, 0 requests wait" in third
    assert "5.000 s  last token (E2EL 1.000 s)" in third


def test_how_full_the_engine_is_when_a_request_comes(write, tmp_path: Path) -> None:
    """The first has three steps before it at 2.5 s and two after; the third comes to none."""
    lines = ["18:00:00.0,7,4", "18:00:02.5,7,1", "18:00:09.5,7,1"]
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    (tmp_path / "t.csv").write_text(text + "".join(f"2023-11-16 {line}\n" for line in lines))
    sets = ["workload={trace: {path: t.csv}}"]
    write_run(run(load_scenario(write(PAIR), sets)), tmp_path / "out")
    second, third = (explain(tmp_path / "out", number) for number in (1, 2))
    assert "2.500 s  sent to the engine; 1 of 4 seats are taken, 0 requests wait" in second
    assert "9.500 s  sent to the engine; 0 of 4 seats are taken, 0 requests wait" in third


def test_replicas_with_different_seats(write, tmp_path: Path) -> None:
    """How many seats there are is told where all groups have as many."""
    for seats, told in ((2, "; 0 seats are taken"), (4, "; 0 of 4 seats are taken")):
        groups = f"{{groups: {{a: {{}}, b: {{engine: {{max_num_seqs: {seats}}}}}}}}}"
        result = run(load_scenario(write(PAIR), [f"cluster={groups}"]))
        write_run(result, tmp_path / str(seats))
        assert told in explain(tmp_path / str(seats), 0)


def _replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / "requests.csv").unlink(), "requests.csv: no such file"),
        (lambda out: (out / "summary.json").write_text("{"), "summary.json: damaged"),
        (lambda out: (out / "scenario.yaml").write_text("a: ["), "scenario.yaml: damaged"),
        (lambda out: (out / "summary.json").write_text("[]"), "summary.json: damaged"),
        (lambda out: (out / "requests.csv").write_bytes(b"\xff\xfe"), "requests.csv: damaged"),
        (
            lambda out: _replaced(out / "requests.csv", "swap_time", "other"),
            "requests.csv: has no column swap_time",
        ),
        (
            lambda out: _replaced(out / "requests.csv", "1,,", "5,,"),
            "requests.csv:3: damaged: this is not the row of request 1",
        ),
        (
            lambda out: _replaced(out / "requests.csv", "6.000000000", "six"),
            "requests.csv:3: e2el: 'six' is no number",
        ),
        (
            lambda out: _replaced(out / "requests.csv", ",stop", ""),
            "requests.csv: damaged: line 2 has not as many cells as the first",
        ),
        (
            lambda out: _replaced(out / "summary.json", '"num_prompts": 2', '"num_prompts": 3'),
            "requests.csv: damaged: it has 2 of the 3 requests of summary.json",
        ),
        (
            lambda out: _replaced(out / "steps.csv", "duration", "other"),
            "steps.csv:2: duration: there is no such column",
        ),
        (
            lambda out: _replaced(out / "requests.csv", "1,,", ",,"),
            "requests.csv:3: damaged: this is not the row of request 1",
        ),
        (
            lambda out: _replaced(
                out / "summary.json", '"median_e2el_ms": 5000.0', '"median_e2el_ms": []'
            ),
            "summary.json: median_e2el_ms: [] is not a number",
        ),
        (
            lambda out: _replaced(out / "scenario.yaml", "ttft: 500.0", "ttft: soon"),
            "scenario.yaml: goodput.ttft: must be a number, not 'soon'",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_told(folder: Path, damage, message: str) -> None:
    """In one line, with file and line."""
    damage(folder)
    with pytest.raises(HeadwayError) as caught:
        explain(folder, 1)
    assert str(caught.value).startswith(f"{folder}/{message}")
    assert "\n" not in str(caught.value)


def test_no_such_folder_or_request(folder: Path, capsys) -> None:
    """Exit code 2 and one line."""
    assert main(["explain", str(folder / "no"), "0"]) == 2
    assert capsys.readouterr().err.startswith(f"headway: error: {folder}/no: no such folder")
    assert main(["explain", str(folder), "2"]) == 2
    assert "no request 2; there are 2, from 0 on" in capsys.readouterr().err


CELLS = ("id", "prompt_tokens", "arrival", "queue_time", "e2el", "preempted_time", "tpot")


@pytest.mark.many
@pytest.mark.parametrize("name", ["requests", "steps"])
@pytest.mark.parametrize("value", ["", "six", "inf", "nan", "0", "-1", "2.5", "1e400"])
def test_any_cell_may_be_spoilt(folder: Path, name: str, value: str) -> None:
    """Each in turn: either there is a story, or the line and the column are told."""
    path = folder / f"{name}.csv"
    head, *lines = [line.split(",") for line in path.read_text().splitlines()]
    at = 1 if name == "requests" else 0
    told = {}
    for column in range(len(head)):
        spoilt = [list(cells) for cells in lines]
        spoilt[at][column] = value
        path.write_text("\n".join(map(",".join, [head, *spoilt])) + "\n")
        try:
            assert explain(folder, 1).startswith("Request 1")
        except HeadwayError as error:
            told[head[column]] = str(error)
    if "damaged: it has" in told.get(
        "steps", ""
    ):  # a number, but not the count that summary.json has
        del told["steps"]
    if "requests are completed" in told.get("finish_reason", ""):  # not as many as summary.json has
        del told["finish_reason"]
    assert all(message.startswith(f"{path}:{at + 2}: ") for message in told.values())
    if value in ("", "six"):
        assert told.keys() >= ({*CELLS} if name == "requests" else {"start", "steps", "waiting"})


def test_a_request_of_a_class_is_told_by_its_bounds(write, tmp_path: Path) -> None:
    scenario = load_scenario(write(PAIR), ["goodput={ttft: 500, client paid: {e2el: 5000}}"])
    load = make_workload(scenario)
    load.client = ["paid", "paid"]
    write_run(run(scenario, workload=load), tmp_path / "out")
    story = explain(tmp_path / "out", 1).splitlines()
    assert story[-1] == "It misses goodput.client paid.e2el (5000 ms): 6,000.0 ms."
