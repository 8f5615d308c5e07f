"""Cases drawn at random, and what vLLM 0.33.0 and 0.32.0 decided on them in its own engine loop.

`headway.conformance.draw_cases` drew them, `headway.conformance.record_vllm` recorded them:
`golden/NAME.jsonl.gz` from 0.33.0, `golden/NAME.032.jsonl.gz` from 0.32.0.
"""

import gzip
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from headway.conformance.cases import read_cases
from headway.conformance.compare import conform, read_goldens, report
from headway.conformance.draw_cases import draw_case, main
from headway.conformance.replay import Replay
from headway.vllm.engine_fields import vllm_fields
from simulator.schedulers.vllm.rules import family_of, read_release
from simulator.util.errors import HeadwayError

HERE = Path(__file__).parent


KINDS = [
    ("drawn", 80, 4000, ""),  # more than a tenth meet the sleep after the last request
    ("windows", 60, 3000, "--windows"),  # KV cache groups: hits, evictions, what leaves a window
    ("retention", 60, 3900, "--retention"),  # of their blocks a part is cached, and prompts branch
    ("states", 60, 6000, "--states"),  # groups of them: where chunks end, what is found in time
    ("units", 60, 5500, "--states --units"),  # prompts match inside blocks, which are copied
    ("adapters", 60, 3500, "--loras"),  # one too many is passed over; no two share blocks
    ("offloading", 60, 4500, "--offloading"),  # its OffloadingConnector, with loads and stores
    ("images", 60, 3400, "--images"),  # what is encoded when, whose outputs are evicted
    ("connector", 60, 3400, "--connector"),  # likewise, and what its EC connector loads
    ("stops", 24, 1000, "--stops"),  # a stop token ends answers
    ("host-adapters", 24, 2200, "--offloading --loras --stops"),
    ("limits", 60, 4000, "--limits"),  # max_num_active_seqs, max_num_scheduled_tokens
    ("drafts", 60, 2800, "--drafts"),  # speculative decoding, four methods, in step or ahead
    ("draft-sizes", 24, 1200, "--draft-sizes"),  # as many drafts as the batch size says
    ("draft-adapters", 60, 3000, "--drafts --loras"),
    ("draft-offloading", 60, 4000, "--drafts --offloading"),
    ("draft-windows", 36, 2000, "--drafts --retention --stops"),
    ("stages", 60, 4400, "--stages --stops"),  # pipelines: batches in flight, in step or ahead
    ("draft-stages", 60, 3500, "--stages --drafts --stops"),
    ("draft-consumer", 60, 2400, "--consumer --drafts --stops"),  # KV from elsewhere, NIXL
    ("combos", 36, 2700, "--loras --images --retention --stops"),
]
NEWEST_ALONE = (
    *("drawn", "windows", "draft-windows", "draft-sizes", "units"),
    *("stages", "draft-stages", "draft-consumer"),
)
"""Kinds that were recorded from 0.33 alone."""


@pytest.mark.many
@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@pytest.mark.parametrize(
    ("kind", "count", "steps", "release"),
    [
        (kind, count, steps, release)
        for kind, count, steps, _ in KINDS
        for release in ("0.33", "0.32")
        if release == "0.33" or kind not in NEWEST_ALONE
    ],
)
def test_all_drawn_cases_agree_in_every_field(
    kind: str, count: int, steps: int, release: str, leap: bool
) -> None:
    golden = HERE / f"golden/{kind}{'.032' if release == '0.32' else ''}.jsonl.gz"
    outcomes = conform(HERE / f"cases/{kind}.jsonl.gz", golden, leap=leap)
    assert len(outcomes) == count
    assert not any(outcome.difference for outcome in outcomes), report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > steps
    assert {outcome.family for outcome in outcomes} == {family_of(read_release(release))}


@pytest.mark.parametrize(
    "kind",
    [
        *("retention", "states", "adapters", "offloading", "images", "connector", "drafts"),
        *("draft-adapters", "draft-offloading"),
    ],
)
def test_what_another_release_decides_differs(kind: str) -> None:
    """Of each kind some cases tell 0.32 from 0.33: the recordings hold the rules apart."""
    path = HERE / f"cases/{kind}.jsonl.gz"
    cases = read_cases(path)
    found = [
        golden.header["name"]
        for golden, other in zip(
            read_goldens(HERE / f"golden/{kind}.jsonl.gz", cases),
            read_goldens(HERE / f"golden/{kind}.032.jsonl.gz", cases),
            strict=True,
        )
        if [line for _, line in golden.lines] != [line for _, line in other.lines]
    ]
    assert found


def test_a_seed_draws_the_same_cases(tmp_path: Path) -> None:
    """Those of the recording; another seed draws others."""
    out = tmp_path / "drawn.jsonl.gz"
    assert draw_case(2, 0) != draw_case(1, 0)
    for kind, count, _, options in KINDS:
        assert main([str(out), "--count", str(count), "--seed", "1", *options.split()]) == 0
        assert out.read_bytes() == (HERE / f"cases/{kind}.jsonl.gz").read_bytes()


def test_no_image_is_longer_than_a_step_may_schedule() -> None:
    """Whole images (disable_chunked_mm_input) of more tokens would wait for ever."""
    for number in range(400):
        config = (case := draw_case(1, number, ["images", "limits"]))["config"]
        named = [part for one in case["requests"] for part in one.get("segments", ())]
        sizes = [count for name, count in named if name.startswith("image:")]
        if config["disable_chunked_mm_input"] and config.get("max_num_scheduled_tokens"):
            assert max(sizes, default=0) <= config["max_num_scheduled_tokens"]


def test_fresh_cases_leap_as_they_step(tmp_path: Path) -> None:
    """Every draw is a case that Headway plays to its end."""
    out = tmp_path / "fresh.jsonl"
    assert main([str(out), "--count", "60", "--seed", "7"]) == 0
    for case in read_cases(out):
        assert list(Replay(case).rows()) == list(Replay(case, leap=True).rows()), case.name


@pytest.mark.parametrize("leap", [False, True], ids=["stepwise", "leaping"])
@pytest.mark.parametrize("release", ["030", "031"])
def test_states_without_exports_agree_with_the_first_releases(release: str, leap: bool) -> None:
    """Recorded from 0.30.0 and 0.31.0, whose kernels export no states."""
    golden = HERE / f"golden/old-states.{release}.jsonl.gz"
    outcomes = conform(HERE / "cases/old-states.jsonl.gz", golden, leap=leap)
    assert [outcome for outcome in outcomes if outcome.agrees] == outcomes, report(outcomes)
    assert sum(outcome.steps for outcome in outcomes) > 6000


def test_a_request_preempts_itself_for_ever_where_vllm_lets_it() -> None:
    """Drafts beside a window: 18 tokens and the slots of 4 drafts want more than 15 blocks."""
    (outcome,) = conform(HERE / "cases/livelock.json")
    assert outcome.agrees
    assert outcome.steps == 300


def test_what_is_no_field_of_an_instance_is_not_recorded() -> None:
    """vLLM's classes have constants, and arguments that only `__init__` sees."""

    @dataclass
    class SchedulerConfig:
        constant: ClassVar[int] = 1
        argument: InitVar[bool] = False
        max_num_seqs: int = 8

    block = SimpleNamespace(scheduler_config=SchedulerConfig(), lora_config=None)
    assert vllm_fields(block) == {"SchedulerConfig": {"max_num_seqs": 8}}


def test_each_field_of_the_derived_configuration_is_known(tmp_path: Path) -> None:
    """Recordings have what vLLM's own `create_engine_config` derived; a new field is refused."""
    cases, golden = HERE / "cases/states.jsonl.gz", HERE / "golden/states.jsonl.gz"
    derived = read_goldens(golden, read_cases(cases))[0].header["derived"]
    assert derived["SchedulerConfig"]["max_num_batched_tokens"] == 9
    assert len([name for block in derived.values() for name in block]) > 100
    damaged = tmp_path / "new.jsonl"
    text = gzip.decompress(golden.read_bytes()).decode()
    damaged.write_text(text.replace('"SchedulerConfig":{', '"SchedulerConfig":{"brand_new":1,', 1))
    with pytest.raises(HeadwayError, match=r"does not know SchedulerConfig\.brand_new"):
        conform(cases, damaged)
