"""Images: which are encoded when, whose outputs are kept, and what a run makes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simulator import load_scenario, run
from simulator.core.request import Media, Request, Segments, Step
from simulator.features.images.images import EncoderLimits, Images, encoder_of
from simulator.features.images.work import work_of
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.scenario.draw import make_workload
from simulator.schedulers.vllm.rules import Release, rules_of
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError
from tests.support.engines import made

# A step takes 0.1 s, and 10 ms for each token of an image.
SCENARIO = """
model: llama-3-8b
gpu: {name: A100-80GB}
engine: {name: textbook, max_num_seqs: 8, max_num_batched_tokens: 512, max_model_len: 256,
         enable_prefix_caching: false, multimodal_config: {encoder_seconds: [[1, 0.01], [2, 0.02]]}}
cost: {kind: linear, base: 0.1}
workload:
  trace: {path: trace.csv}
  columns: arrival=arrival,prompt=prompt_tokens,output=output_tokens,images=images
  multimodal: {image: {tokens: 20}}
"""


def scheduler(size: int, budget: int, *, whole: bool = False, **options: Any) -> Scheduler:
    limits = EncoderLimits(size, budget, whole)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 100} | options
    blocks = options.pop("blocks", None) or BlockCounter(1000, 4)
    return made(Scheduler, blocks, features=[Images(limits)], **options)


def ask(id: int, *parts: int | tuple[str, int], output: int = 3) -> Request:
    """Make a request of texts, by their tokens, and named images."""
    prompt: Segments = tuple(
        (("in", id, k), part) if isinstance(part, int) else (Media("image", part[0]), part[1])
        for k, part in enumerate(parts)
    )
    tokens = sum(count for _, count in prompt)
    return Request(id, float(id), tokens, output, segments=prompt)


def steps(one: Scheduler, count: int) -> list[tuple[dict[int, int], dict[int, list[int]]]]:
    """Return so many steps: tokens of prompts and images encoded, by request."""
    found = []
    for _ in range(count):
        step = one.schedule(0.0)
        encoded = work.encoded if (work := work_of(step)) else {}
        tokens = {chunk.request.id: chunk.tokens for chunk in step.prefills}
        found.append((tokens, {request.id: items for request, items in encoded.items()}))
        if step.decodes or step.prefills:
            one.commit(step, [0.0])
    return found


def test_a_step_ends_before_an_image_that_the_budget_is_too_small_for() -> None:
    """5 + 10 + 5 + 10 + 5 tokens, 15 of the encoder a step: the second image waits for a step."""
    one = scheduler(100, 15)
    one.add(ask(0, 5, ("a", 10), 5, ("b", 10), 5))
    assert steps(one, 2) == [({0: 20}, {0: [0]}), ({0: 15}, {0: [1]})]


@pytest.mark.parametrize("release", [(0, 32, 0), (0, 33, 0)])
def test_the_budget_is_one_of_all_requests(release: Release) -> None:
    """Behind request 0 request 1 gets the text before its image, and request 2 nothing.

    Request 3 waits behind that, to 0.32; from 0.33 on request 2 is passed over.
    """
    one = scheduler(100, 15, rules=rules_of(release))
    for request in (ask(0, ("a", 10), 2), ask(1, 4, ("b", 10)), ask(2, ("c", 6), 3), ask(3, 7)):
        one.add(request)
    early, late = ({3: 7}, {}) if release >= (0, 33, 0) else ({}, {3: 7})
    assert steps(one, 3) == [
        ({0: 12, 1: 4} | early, {0: [0]}),
        ({1: 10}, {1: [0]}),  # 5 tokens are left
        ({2: 9} | late, {2: [0]}),
    ]


def test_who_is_passed_over_for_an_image_keeps_its_place() -> None:
    """Requests 1 and 2 want the cache that request 0's image has, 3 and 4 do not."""
    one = scheduler(10, 10, max_num_batched_tokens=14)
    for request in (ask(0, ("a", 10), 2), *(ask(k, (f"b{k}", 10)) for k in (1, 2)), ask(3, 1)):
        one.add(request)
    assert steps(one, 1) == [({0: 12, 3: 1}, {0: [0]})]
    assert [one.waiting.take().id for _ in range(2)] == [1, 2]


def test_an_image_in_the_cache_is_not_encoded_again() -> None:
    """It is the oldest that goes when room is needed: b, since a was used after it."""
    one = scheduler(20, 20)
    for k, image in enumerate("abacba"):
        one.add(ask(k, (image, 10), 1, output=1))
        ((_, encoded),) = steps(one, 1)
        assert bool(encoded) == (k in {0, 1, 3, 4, 5}), k  # at 4 a has gone, at 5 it is missed


def test_the_cache_keeps_what_a_prompt_is_amid() -> None:
    """A chunk ends amid image a: its output is kept, and b does not fit beside it."""
    one = scheduler(10, 10, max_num_batched_tokens=8)
    one.add(ask(0, ("a", 10), ("b", 10)))
    assert steps(one, 4) == [({0: 8}, {0: [0]}), ({0: 2}, {}), ({0: 8}, {0: [1]}), ({0: 2}, {})]


def test_an_image_is_not_split_where_it_need_not_be() -> None:
    """disable_chunked_mm_input: the first step ends before the image."""
    one = scheduler(100, 100, whole=True, max_num_batched_tokens=12)
    one.add(ask(0, 5, ("a", 10), 5))
    assert steps(one, 2) == [({0: 5}, {}), ({0: 12}, {0: [0]})]


@pytest.mark.parametrize("release", [(0, 32, 0), (0, 33, 0)])
def test_an_image_that_no_chunk_holds_is_refused_where_none_is_split(release: Release) -> None:
    """From 0.33 on it would wait for ever: 12 tokens are a step, 7 of a long prompt."""
    rules, limits = rules_of(release), {"max_num_batched_tokens": 12}
    for more, tokens in (({}, 12), ({"long_prefill_token_threshold": 7}, 7)):
        one = scheduler(100, 100, whole=True, rules=rules, **limits, **more)
        assert one.fits(ask(0, ("a", tokens)))
        assert one.fits(ask(1, ("a", tokens + 1))) == (release < (0, 33, 0))
        assert scheduler(100, 100, rules=rules, **limits, **more).fits(ask(2, ("a", 20)))


@pytest.mark.parametrize(("release", "first"), [((0, 32, 0), 4), ((0, 33, 0), 0)])
def test_nor_is_an_image_at_which_a_chunk_begins(release: Release, first: int) -> None:
    """From 0.33 on; request 0 leaves 4 tokens of the budget."""
    one = scheduler(100, 100, whole=True, max_num_batched_tokens=12, rules=rules_of(release))
    one.add(ask(0, 8))
    one.add(ask(1, ("a", 10)))
    ((tokens, _),) = steps(one, 1)
    assert tokens.get(1, 0) == first


def test_images_in_the_prefix_cache_are_not_encoded() -> None:
    """The same two images in the same order; in another order nothing is shared."""
    blocks = BlockManager(1000, 4, prefix_caching=True)
    one = scheduler(100, 100, blocks=blocks)
    prompts: Sequence[tuple[str, str]] = (("a", "b"), ("a", "b"), ("b", "a"))
    cached = []
    for k, (first, second) in enumerate(prompts):
        request = ask(k, (first, 8), (second, 8), 2, output=1)
        one.features = scheduler(100, 100).features  # nothing is in the encoder's cache
        one.add(request)
        ((_, encoded),) = steps(one, 1)
        cached.append((request.cached, encoded))
    assert cached == [(0, {0: [0, 1]}), (16, {}), (0, {2: [0, 1]})]


def test_who_is_preempted_lets_go_of_its_images() -> None:
    one = scheduler(10, 10, max_num_batched_tokens=8)
    request = ask(0, ("a", 10), 4)
    one.add(request)
    step: Step = one.schedule(0.0)
    encoder = encoder_of(one)
    assert encoder.held == {request: {0}}
    one.commit(step, [0.0])
    one.preempt(request)
    assert not encoder.held
    assert encoder.reclaimable == 10


def test_too_large_or_too_many_images_are_refused() -> None:
    limits = EncoderLimits(10, 20, limit_mm_per_prompt=(("image", 2),))
    one = Scheduler(BlockCounter(1000, 4), features=[Images(limits)])
    assert one.fits(ask(0, ("a", 10), ("b", 10)))
    assert not one.fits(ask(1, ("a", 11)))
    assert not one.fits(ask(2, ("a", 1), ("b", 1), ("c", 1)))


def test_text_pays_nothing_for_an_encoder() -> None:
    """Steps without images say nothing of it, and leap."""
    one = scheduler(100, 100)
    one.add(ask(0, 8, output=50))
    step = one.schedule(0.0)
    one.commit(step, [0.0])
    assert work_of(step) is None
    assert one.horizon(one.schedule(0.0)) > 10


def write(folder: Path, *rows: str) -> Path:
    head = "arrival,prompt_tokens,output_tokens,images\n"
    (folder / "trace.csv").write_text(head + "".join(f"{row}\n" for row in rows))
    path = folder / "s.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_run_encodes_what_its_trace_has(tmp_path: Path) -> None:
    """Two images of 20 tokens are 0.4 s before a step of 0.1; their tokens come on top of 10."""
    result = run(load_scenario(write(tmp_path, "0,10,1,2", "2,10,1,0", "4,10,2,1")))
    assert result.requests.prompt_tokens.tolist() == [50, 10, 30]
    assert result.requests.e2el.tolist() == pytest.approx([0.5, 0.1, 0.4])
    own = result.summary()["headway"]
    assert own["encoded_items"] == 3
    assert own["encoded_tokens"] == 60
    assert own["encoding_time"] == pytest.approx(0.6)
    (finding,) = [one for one in own["diagnosis"] if one["rule"] == "encoder"]
    assert finding["figures"]["encoding_share"] == pytest.approx(0.6)


def test_a_larger_encoder_cache_is_advised_to_the_group_that_lacks_it(tmp_path: Path) -> None:
    keys = ("max_num_encoder_input_tokens", "encoder_cache_size")
    more = [f"engine.multimodal_config.{key}=45" for key in keys]
    more.append("cluster={groups: {a: {replicas: 1}, b: {replicas: 1}}}")
    scenario = load_scenario(write(tmp_path, *["0,10,5,2"] * 40), more)
    found = run(scenario).summary()["headway"]["diagnosis"]
    (advice,) = [one["advice"][0] for one in found if one["rule"] == "encoder"]
    assert advice["key"].startswith("cluster.groups.")


def test_a_run_with_images_leaps_as_it_steps(tmp_path: Path) -> None:
    """To the last bit, some images several times, budget and cache being scarce."""
    rows = [f"{k / 3},{20 + k % 50},{1 + 3 * k % 40},{k * k % 7}" for k in range(80)]
    more = ["workload.multimodal.image.distinct=9"]
    keys = ("max_num_encoder_input_tokens", "encoder_cache_size")
    more += [f"engine.multimodal_config.{key}=45" for key in keys]
    for asynchronous in ("false", "true"):
        options = [*more, f"engine.async_scheduling={asynchronous}"]
        scenario = load_scenario(write(tmp_path, *rows), options)
        one, other = (run(scenario, stepwise=stepwise) for stepwise in (False, True))
        assert one.requests.equals(other.requests)
        own, alike = (result.summary()["headway"] for result in (one, other))
        assert own["encoded_items"] == alike["encoded_items"] < sum(k * k % 7 for k in range(80))
        assert own["encoder_waiting_time"] == pytest.approx(alike["encoder_waiting_time"])
        assert own["encoder_waiting_time"] > 0


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("engine.multimodal_config", "null", "workload.multimodal: needs engine.multimodal_"),
        ("engine.multimodal_config.encoder_seconds", "null", "has no vision_config that is known"),
        ("engine.multimodal_config.encoder_seconds", "[[0, 0.0], [9, 1.0]]", "all above 0, the"),
        ("engine.enable_lora", "true", "multimodal_config: needs enable_lora: false"),
        ("engine.scheduling_policy", "srpt", "multimodal_config: srpt has no encoder"),
        ("engine.version", "0.31.0", "multimodal_config: needs the rules of vLLM 0.32 or"),
        ("engine.pipeline_parallel_size", "2", "needs pipeline_parallel_size: 1"),
        ("workload.multimodal.image.items", "2", "the trace has a column of them"),
        ("workload.multimodal.image.distinct", "0", "distinct"),
        ("workload.multimodal.image.zipf", "-1", "zipf: must be at least 0, not -1"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, key: str, value: str, says: str) -> None:
    """One line each."""
    with pytest.raises(HeadwayError) as caught:
        make_workload(load_scenario(write(tmp_path, "0,10,1,2"), [f"{key}={value}"]))
    (line,) = caught.value.messages
    assert says in line
