"""What is simulated is what SGLang decides: against recordings, and where SGLang is installed live.

`recorded/` has 14 cases and what SGLang 0.5.23 did in each with the same policy in it, written on a
CPU by `python -m headway.sglang.parity --count 14 --seed 3 --record recorded`. `options.jsonl.gz`
has ten of `--options --seed 1`, in which Headway decided otherwise before.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.conformance.case_model import SglangCase, SglangConfig
from headway.conformance.cases import read_cases, write_lines
from headway.conformance.compare import conform, report
from headway.conformance.recorder import dump
from headway.conformance.sglang_replay import SglangReplay
from headway.sglang import draw_options
from headway.sglang.parity import POLICIES, draw_case, main
from simulator.kv_cache.radix_cache import EVICTION_POLICIES
from simulator.schedulers.sglang.queue_order import ORDERS
from simulator.util.errors import HeadwayError

RECORDED = Path(__file__).parent / "recorded" / "cases" / "policies.jsonl.gz"
CASES = [case for case in read_cases(RECORDED) if isinstance(case, SglangCase)]
GOLDEN = RECORDED.parents[1] / "golden" / RECORDED.name
OPTIONS = RECORDED.with_name("options.jsonl.gz")

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_a_policy_decides_as_sglang_did_with_it(leap: bool) -> None:
    """Every step, every field."""
    outcomes = conform(RECORDED, leap=leap)
    assert len(outcomes) == 14
    assert all(one.agrees for one in outcomes), report(outcomes)


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
def test_options_decide_as_sglang_did(leap: bool) -> None:
    """A split prompt that is forgotten, who may be preempted, and a prompt that goes on alone."""
    outcomes = conform(OPTIONS, leap=leap)
    assert len(outcomes) == 10
    assert all(one.agrees for one in outcomes), report(outcomes)


def test_cases_of_options_are_drawn_alike_and_have_them_all() -> None:
    lines = gzip.decompress(OPTIONS.read_bytes()).decode().splitlines()
    for line in lines:
        number = int(json.loads(line)["name"].rpartition("-")[2])
        assert line == dump(draw_options.draw_case(1, number))
    drawn = [draw_options.draw_case(2, number) for number in range(400)]
    configs = [case["config"] for case in drawn]
    policies = {config["schedule_policy"] for config in configs}
    assert policies == {name for name in ORDERS if name != "random"}
    evictions = {config["radix_eviction_policy"] for config in configs}
    assert evictions == EVICTION_POLICIES.keys() - {"tlru"}
    left = SglangConfig.model_fields.keys() - {key for config in configs for key in config}
    host = {"enable_hierarchical_cache", "hicache_ratio", "hicache_write_policy"}
    drafts = {key for key in left if key.startswith("speculative_")} | {"acceptance"}
    assert left == {"hash_id_tokens", "scheduling_policy", *host, *drafts}


def test_a_split_prompt_without_memory_waits() -> None:
    """SGLang ends with an error there; here nobody has more memory than there is."""
    case = SglangCase.model_validate(draw_options.draw_case(1, 382))
    rows = [json.loads(row) for row in SglangReplay(case).rows()]
    assert rows[-1]["complete"]
    assert min(row["free"] for row in rows if row["type"] == "step") == 0


def test_the_recordings_have_every_policy_and_make_it_hard() -> None:
    found = {
        (case.config.scheduling_policy["policy"], case.config.disable_overlap_schedule)
        for case in CASES
        if case.config.scheduling_policy is not None
    }
    assert found == {(name, kind) for name in POLICIES for kind in (False, True)}
    rows = [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]
    steps = [row for row in rows if row["type"] == "step"]
    assert sum(bool(row["retracted"]) for row in steps) > 20
    assert sum(row["waiting"] > 3 for row in steps) > 1000
    assert {row["mode"] for row in steps} == {"prefill", "decode", "mixed"}


@pytest.mark.parametrize("name", POLICIES)
def test_another_order_is_told_apart(name: str, tmp_path: Path) -> None:
    """The comparison would see it: fcfs in the place of the policy."""
    raw = [
        json.loads(line)
        for line, case in zip(
            gzip.decompress(RECORDED.read_bytes()).splitlines(), CASES, strict=True
        )
        if (case.config.scheduling_policy or {})["policy"] == name
    ]
    lines = gzip.decompress(GOLDEN.read_bytes()).decode().splitlines()
    starts = [k for k, line in enumerate(lines) if line.startswith('{"type":"case"')]
    kept: list[str] = []
    for case, first, last in zip(CASES, starts, [*starts[1:], len(lines)], strict=True):
        if case.name in {one["name"] for one in raw}:
            kept += [_without_policy(lines[first]), *lines[first + 1 : last]]
    for one in raw:
        del one["config"]["scheduling_policy"]
    write_lines(tmp_path / "cases.jsonl", map(dump, raw))
    write_lines(tmp_path / "golden.jsonl", kept)
    outcomes = conform(tmp_path / "cases.jsonl", tmp_path / "golden.jsonl")
    assert not all(one.agrees for one in outcomes)


def _without_policy(line: str) -> str:
    header = json.loads(line)
    del header["config"]["scheduling_policy"]
    return dump(header)


@needs_sglang
@pytest.mark.parametrize("more", [(), ("--options",)])
def test_the_installed_sglang_decides_alike(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--count", "14", "--seed", "4", *more]) == 0
    assert "14 of 14 cases agree, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scheduling_policy": "sjf"}, "scheduling_policy: must be an object such as"),
        ({"schedule_policy": "lof"}, "scheduling_policy: needs schedule_policy fcfs"),
        ({"scheduling_policy": {"policy": "srpt"}}, "srpt lets waiting requests displace"),
        ({"scheduling_policy": {"policy": "sjf", "age": 3}}, "age: sjf takes no such argument"),
    ],
)
def test_a_case_with_a_wrong_policy_is_refused(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    raw = draw_case(1, 0)
    raw["config"] |= config
    path = tmp_path / "case.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(HeadwayError, match=message) as caught:
        SglangReplay(read_cases(path)[0])  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
