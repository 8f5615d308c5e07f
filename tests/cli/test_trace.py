"""`headway trace`: workloads described and converted."""

import re

from simulator.cli.main import main
from tests.support.commands import TRACE, names


def test_traces_are_described_and_converted(folder, capsys):
    """A trace, or what a scenario generates; what is written reads the same."""
    (folder / "t.csv").write_text(TRACE)
    assert main(["trace", "describe", "t.csv"]) == 0
    assert re.search(r"requests +4\n", capsys.readouterr().out)
    assert main(["trace", "convert", "t.csv", "m.jsonl.gz"]) == 0
    assert capsys.readouterr().out == "written to m.jsonl.gz: 4 requests\n"
    assert main(["trace", "describe", "m.jsonl.gz"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"format +mooncake\n", told)
    assert re.search(r"output tokens +26\n", told)
    assert main(["trace", "convert", "small.yaml", "s.jsonl"]) == 0
    assert capsys.readouterr().out == "written to s.jsonl: 40 requests\n"


def test_convert_writes_neither_over_its_source_nor_into_a_missing_folder(folder, capsys):
    """What is there stays as it is."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "link.csv").symlink_to("t.csv")
    before = names(folder)
    for target, wrong in (
        ("t.csv", "it is the file to read"),
        ("link.csv", "it is the file to read"),
        ("new/t.jsonl", "no folder new"),
    ):
        assert main(["trace", "convert", "t.csv", target]) == 2
        assert capsys.readouterr().err == f"headway: error: {target}: cannot write: {wrong}\n"
    assert (folder / "t.csv").read_text() == TRACE
    assert names(folder) == before


def test_convert_tells_what_prefix_sharing_is_lost(folder, capsys):
    """Ids of 512 tokens cannot tell of a common beginning of 100."""
    (folder / "p.yaml").write_text(
        "workload: {num_prompts: 10, prefix_groups: {num_prefixes: 1, prefix_len: 100}, "
        "input_len: 50, output_len: 2}\n"
    )
    assert main(["trace", "convert", "p.yaml", "p.jsonl"]) == 0
    assert capsys.readouterr().err == (
        "headway: warning: p.jsonl: 0.0% of its input tokens are a prefix of an earlier prompt, "
        "before they were 60.0%: an id stands for 512 tokens, so shorter shared prefixes are lost\n"
    )
    (folder / "p.yaml").write_text(
        "workload: {num_prompts: 10, prefix_groups: {num_prefixes: 1, prefix_len: 1024}, "
        "input_len: 50, output_len: 2}\n"
    )
    assert main(["trace", "convert", "p.yaml", "p.jsonl"]) == 0
    assert capsys.readouterr().err == ""
