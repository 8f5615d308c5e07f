"""SGLang with HiCache on, recorded: what is loaded, copied and evicted, step by step.

`recorded/` has 14 cases and what SGLang 0.5.23 did in each, on a CPU: 12 of those that
`python -m headway.sglang.parity --hicache --count 24 --seed 3 --record FOLDER` wrote, and two of
seed 1, in which copies leave a request that runs alone no memory, so that it is aborted.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.conformance.compare import conform, report
from headway.conformance.recorder import dump
from headway.sglang.draw_options import draw_with_host
from headway.sglang.parity import main
from simulator.kv_cache import hierarchical_cache
from simulator.kv_cache.hierarchical_cache import WRITE_POLICIES, HierarchicalCache

RECORDED = Path(__file__).parent / "recorded" / "cases" / "hicache.jsonl.gz"
GOLDEN = RECORDED.parents[1] / "golden" / RECORDED.name


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_hicache_decides_as_sglang_did(leap: bool) -> None:
    """Every step, every field."""
    outcomes = conform(RECORDED, leap=leap)
    assert len(outcomes) == 14
    assert all(one.agrees for one in outcomes), report(outcomes)


def test_the_cases_are_drawn_alike_and_make_it_hard() -> None:
    """Each policy, with and without overlap; loads, evictions from the host, waits for copies."""
    lines = gzip.decompress(RECORDED.read_bytes()).decode().splitlines()
    for line in lines:
        _, seed, number = json.loads(line)["name"].split("-")
        assert line == dump(draw_with_host(int(seed), int(number)))
    configs = [json.loads(line)["config"] for line in lines]
    found = {(one["hicache_write_policy"], one["disable_overlap_schedule"]) for one in configs}
    assert found == {(name, kind) for name in WRITE_POLICIES for kind in (False, True)}
    rows = [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]
    steps = [row for row in rows if row["type"] == "step"]
    assert sum(len(row["loaded"]) for row in steps) > 80
    freed = sum(row["host_free_end"] > row["host_free"] for row in steps)
    assert freed > 10
    assert sum(row["spins"] for row in steps) > 100
    assert sum(len(row["aborted"]) for row in steps) == 2


def _loads_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hierarchical_cache, "LEAST_LOAD", 1)


def _keeps_doubles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HierarchicalCache, "_drop_doubles", lambda *_: None)


def _holds_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HierarchicalCache, "_begin", lambda self, copies, now: [
        self._let_go(node) for node, _ in copies
    ])  # fmt: skip


def _copies_at_once(patch: pytest.MonkeyPatch) -> None:
    begin = HierarchicalCache._begin_stores
    patch.setattr(
        HierarchicalCache,
        "_begin_stores",
        lambda self, now, in_flight: begin(self, now, in_flight=False),
    )


@pytest.mark.parametrize(
    "fault", [_loads_anything, _keeps_doubles, _holds_nothing, _copies_at_once]
)
def test_a_fault_is_told_apart(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see a rule that is missing."""
    fault(monkeypatch)  # type: ignore[operator]
    outcomes = conform(RECORDED)
    assert not all(one.agrees for one in outcomes)


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_installed_sglang_decides_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hicache", "--count", "6", "--seed", "4"]) == 0
    assert "6 of 6 cases agree, " in capsys.readouterr().out
