"""`headway trace`: workloads described and converted."""

import re

from headway.cli.main import main
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


def test_convert_does_not_write_over_its_source(folder, capsys):
    """What is there stays as it is."""
    (folder / "t.csv").write_text(TRACE)
    (folder / "link.csv").symlink_to("t.csv")
    before = names(folder)
    for target in ("t.csv", "link.csv"):
        assert main(["trace", "convert", "t.csv", target]) == 2
        assert capsys.readouterr().err == (
            f"headway: error: {target}: cannot write: it is the file to read\n"
        )
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
        "before they were 60.0%: an id has 512 tokens, so shorter shared prefixes are lost\n"
    )
    (folder / "p.yaml").write_text(
        "workload: {num_prompts: 10, prefix_groups: {num_prefixes: 1, prefix_len: 1024}, "
        "input_len: 50, output_len: 2}\n"
    )
    assert main(["trace", "convert", "p.yaml", "p.jsonl"]) == 0
    assert capsys.readouterr().err == ""


def test_whole_seconds_are_parted_on_demand(folder, capsys):
    """What describe proposes works, and is refused where there is nothing to part."""
    rows = "".join(f"{k // 4},{50 + k},{5 + k}\n" for k in range(12))
    (folder / "t.csv").write_text("arrival,prompt_tokens,output_tokens\n" + rows)
    assert main(["trace", "describe", "t.csv"]) == 0
    assert "12 requests share theirs, 4 at most; trace convert --spread" in capsys.readouterr().out
    assert main(["trace", "convert", "t.csv", "m.jsonl", "--spread-seconds"]) == 0
    capsys.readouterr()
    assert main(["trace", "describe", "m.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "whole seconds" not in told
    assert "CV of gaps 0.00" in told
    assert main(["trace", "convert", "m.jsonl", "n.jsonl", "--spread-seconds"]) == 2
    assert capsys.readouterr().err == (
        "headway: error: --spread-seconds: m.jsonl: the times are finer than whole seconds\n"
    )
    assert not (folder / "n.jsonl").exists()


def test_measured_latencies_are_described(folder, capsys):
    """Of a run of Headway's own, too."""
    assert main(["run", "small.yaml", "--out", "o", "--quiet"]) == 0
    assert main(["trace", "describe", "o/requests.csv"]) == 0
    told = capsys.readouterr().out
    for name in ("TTFT", "TPOT", "E2EL"):
        assert re.search(rf"^{name} \(ms\)( +[\d.,]+){{7}}", told, re.MULTILINE)
