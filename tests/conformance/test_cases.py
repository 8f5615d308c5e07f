"""Case files: one case or many, and what is wrong with them."""

import gzip
import json
from pathlib import Path

import pytest

from headway.cli.main import main
from tests.support.conformance import make


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fcfs"', "fcfs", "small.json:5: bad JSON"),
        ('"policy": "fcfs"', '"policy": "lifo"', "5: config.policy: must be fcfs or priority"),
        ('"policy": "fcfs"', '"policy": ["fcfs"]', "must be fcfs or priority, not ['fcfs']"),
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
