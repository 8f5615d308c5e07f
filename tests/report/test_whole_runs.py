"""The band of whole runs that stands beside that of steps."""

import re
from pathlib import Path

import pytest

from headway.report.text import cost_lines


@pytest.mark.parametrize(
    ("profile", "unmeasured", "figures"),
    [
        ("llama-3-8b.a100.bf16", None, ("TTFT 6.4,", "P99 TTFT 17.3", "TPOT 11 |")),
        ("mixtral-8x7b.h100.bf16", None, ("| experts on vLLM, TP 2 to 8 | 46 |",)),
        ("roofline", "kernels of llama-3-8b on MI300X", ("by roofline | 53 |",)),
        ("linear", None, ()),
    ],
)
def test_how_far_whole_runs_of_a_kind_were_off(profile, unmeasured, figures) -> None:
    """The figures are those of docs/accuracy.md."""
    gauges = {"profile": profile, "step_times": {"unmeasured": unmeasured}}
    page = " ".join((Path(__file__).parents[2] / "docs" / "accuracy.md").read_text().split())
    told = [line for line in cost_lines([""], [gauges]) if line.startswith("Whole runs: ")]
    assert len(told) == bool(figures)
    for figure in figures:
        number = re.findall(r"[\d.]+", figure)[-1]
        assert figure in page
        assert f"{float(number):.0f} %" in told[0]
