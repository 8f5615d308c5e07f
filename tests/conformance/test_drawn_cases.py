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
def test_all_drawn_cases_agree_in_every_field(leap: bool) -> None:
    """More than a tenth of them meet the sleep after the last request."""
    outcomes = conform(HERE / "cases/drawn.jsonl.gz", leap=leap)
    assert len(outcomes) == 80
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > 4000


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_cases_with_windows_agree_in_every_field(leap: bool) -> None:
    """Several KV cache groups: hits, evictions and what leaves a window when."""
    outcomes = conform(HERE / "cases/windows.jsonl.gz", leap=leap)
    assert len(outcomes) == 60
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > 3000


def test_a_seed_draws_the_same_cases(tmp_path: Path) -> None:
    """Those of the recording; another seed draws others."""
    out = tmp_path / "drawn.jsonl.gz"
    assert main([str(out), "--count", "80", "--seed", "1"]) == 0
    assert out.read_bytes() == (HERE / "cases/drawn.jsonl.gz").read_bytes()
    assert draw_case(2, 0) != draw_case(1, 0)
    kinds = ("windows", "--windows", 60), ("adapters", "--loras", 60), ("images", "--images", 120)
    for kind, option, count in kinds:
        assert main([str(out), "--count", str(count), "--seed", "1", option]) == 0
        assert out.read_bytes() == (HERE / f"cases/{kind}.jsonl.gz").read_bytes()


def test_fresh_cases_leap_as_they_step(tmp_path: Path) -> None:
    """Every draw is a case that Headway plays to its end."""
    out = tmp_path / "fresh.jsonl"
    assert main([str(out), "--count", "60", "--seed", "7"]) == 0
    for case in read_cases(out):
        assert list(Replay(case).rows()) == list(Replay(case, leap=True).rows()), case.name


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_cases_with_adapters_agree_in_every_field(leap: bool) -> None:
    """Requests whose adapter is one too many are passed over; no two adapters share blocks."""
    outcomes = conform(HERE / "cases/adapters.jsonl.gz", leap=leap)
    assert len(outcomes) == 60
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > 3000


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_cases_with_images_agree_in_every_field(leap: bool) -> None:
    """vLLM 0.32.0: which images are encoded when, and whose outputs leave the encoder's cache."""
    outcomes = conform(HERE / "cases/images.jsonl.gz", leap=leap)
    assert len(outcomes) == 120
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > 7000
