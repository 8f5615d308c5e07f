"""Cases drawn at random, and what vLLM 0.33.0 decided on them in its own engine loop.

`conformance.draw_cases` drew them, `conformance.record_vllm` recorded them.
"""

from pathlib import Path

import pytest

from conformance.cases import read_cases
from conformance.compare import conform, report
from conformance.draw_cases import draw_case, main
from conformance.replay import Replay

HERE = Path(__file__).parent


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@pytest.mark.parametrize(
    ("kind", "count", "steps"),
    [
        ("drawn", 80, 4000),  # more than a tenth meet the sleep after the last request
        ("windows", 60, 3000),  # several KV cache groups: hits, evictions, what leaves a window
        ("adapters", 60, 3000),  # one too many is passed over; no two share blocks
        ("offloading", 60, 4000),  # vLLM 0.32: its OffloadingConnector, with loads and stores
        ("images", 120, 7000),  # vLLM 0.32: what is encoded when, whose outputs are evicted
        ("connector", 120, 7000),  # vLLM 0.32: likewise, and what its EC connector loads
    ],
)
def test_all_drawn_cases_agree_in_every_field(
    kind: str, count: int, steps: int, leap: bool
) -> None:
    outcomes = conform(HERE / f"cases/{kind}.jsonl.gz", leap=leap)
    assert len(outcomes) == count
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > steps


def test_a_seed_draws_the_same_cases(tmp_path: Path) -> None:
    """Those of the recording; another seed draws others."""
    out = tmp_path / "drawn.jsonl.gz"
    assert main([str(out), "--count", "80", "--seed", "1"]) == 0
    assert out.read_bytes() == (HERE / "cases/drawn.jsonl.gz").read_bytes()
    assert draw_case(2, 0) != draw_case(1, 0)
    kinds = {"windows": ("--windows", 60), "adapters": ("--loras", 60)}
    kinds |= {"images": ("--images", 120), "connector": ("--connector", 120)}
    kinds["offloading"] = "--offloading", 60
    for kind, (option, count) in kinds.items():
        assert main([str(out), "--count", str(count), "--seed", "1", option]) == 0
        assert out.read_bytes() == (HERE / f"cases/{kind}.jsonl.gz").read_bytes()


def test_fresh_cases_leap_as_they_step(tmp_path: Path) -> None:
    """Every draw is a case that Headway plays to its end."""
    out = tmp_path / "fresh.jsonl"
    assert main([str(out), "--count", "60", "--seed", "7"]) == 0
    for case in read_cases(out):
        assert list(Replay(case).rows()) == list(Replay(case, leap=True).rows()), case.name
