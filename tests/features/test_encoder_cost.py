"""What encoding images costs, against sums by hand."""

import json
from pathlib import Path

import pytest

from simulator.build.kv_room import memory_budget
from simulator.core.engine_config import EngineConfig
from simulator.core.multimodal_config import MultimodalConfig
from simulator.core.request import Item, Media, Request, Step
from simulator.costs.linear import LinearCost
from simulator.costs.roofline import LAUNCH, efficiency_of
from simulator.features.images.cost import KERNELS, EncoderCost, encoder_cost
from simulator.features.images.work import KEY, EncoderWork
from simulator.models.gpus import GPUS
from simulator.models.kv_budget import MemoryBudget
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from tests.support.with_fields import with_fields

QWEN, GPU = load_model("qwen2.5-vl-7b"), GPUS["H100-80GB"]


def step(*sizes: int) -> Step:
    """A step that encodes images of so many tokens."""
    items = [Item(Media("image", k), 0, size) for k, size in enumerate(sizes)]
    request = with_fields(Request(0, 0.0, 1, 1), items=items)
    encoded = {request: [*range(len(sizes))]} if sizes else {}
    work = EncoderWork(encoded, [], [request], 0)
    return with_fields(Step([], 1, 1), work={KEY: work})


def roofline() -> EncoderCost:
    return encoder_cost(LinearCost(0.1), QWEN, GPU, 1)


def test_the_published_model_is_language_model_and_encoder() -> None:
    """8.29 billion weights on its card, 0.68 of them in front: 32 layers and the merger."""
    vision = QWEN.vision
    assert vision is not None
    layer = 4 * 1280 * 1280 + 3 * 1280 * 3420
    assert vision.parameters == 32 * layer + 5120 * 5120 + 5120 * 3584
    assert round((QWEN.parameters + vision.parameters) / 1e9, 2) == 8.29


def test_flops_of_an_image_by_hand() -> None:
    """256 tokens are 1,024 patches; in 28 layers each attends to 64, in 4 to all."""
    vision = QWEN.vision
    assert vision is not None
    products, attention = vision.flops(256)
    layer = 4 * 1280 * 1280 + 3 * 1280 * 3420
    assert products == 2 * (1024 * 32 * layer + 256 * (5120 * 5120 + 5120 * 3584))
    assert attention == 4 * 1280 * 1024 * (28 * 64 + 4 * 1024)


def test_one_image_by_roofline() -> None:
    """At the shares of the FLOP/s that the language model's kernels reach, and the launches."""
    vision, share = QWEN.vision, efficiency_of(GPU)
    assert vision is not None
    products, attention = vision.flops(1024)
    seconds = (products / share.compute + attention / share.attention) / GPU.bf16_flops
    cost, one = roofline(), step(1024)
    assert cost.execute(one).seconds == pytest.approx(0.1 + 32 * KERNELS * LAUNCH + seconds)
    assert cost.execute(one).features[KEY] == pytest.approx(cost.execute(one).seconds - 0.1)
    assert cost.unmeasured == "what encoding adds"


def test_a_tiny_image_takes_the_reading_of_the_weights() -> None:
    """1.35 GB at 78 % or so of the bandwidth: more than the products of one token."""
    vision, share = QWEN.vision, efficiency_of(GPU)
    assert vision is not None
    read = 2 * vision.parameters / (GPU.bandwidth * share.weights)
    assert roofline().execute(step(1)).seconds == pytest.approx(0.1 + 32 * KERNELS * LAUNCH + read)
    assert roofline().execute(step()).seconds == pytest.approx(0.1)


def test_a_table_of_ones_own() -> None:
    """Straight between its rows and beyond the last; images of a step are added up."""
    table = {"encoder_seconds": [[100, 0.01], [300, 0.05]]}
    raw = {"engine": {"multimodal_config": table}, "cost": {"kind": "linear", "base": 0.1}}
    cost = engine_specs(load_scenario(raw))[""].cost
    seconds = {50: 0.01, 100: 0.01, 200: 0.03, 300: 0.05, 400: 0.07}
    for tokens, expected in seconds.items():
        assert cost.execute(step(tokens)).seconds == pytest.approx(0.1 + expected)
    assert cost.execute(step(100, 300)).seconds == pytest.approx(0.16)
    assert not cost.unmeasured


def test_encoder_and_cache_take_room_from_the_kv_cache() -> None:
    """Weights in 16 bits, outputs of the hidden size; none if no image may come."""

    def budget(**keys: object) -> MemoryBudget:
        config = MultimodalConfig(**keys)
        return memory_budget(EngineConfig(multimodal_config=config), QWEN, GPU)

    assert QWEN.vision is not None
    plain, taken = memory_budget(EngineConfig(), QWEN, GPU), budget(encoder_cache_size=5000)
    assert taken.tower == plain.tower == 2 * QWEN.vision.parameters
    assert taken.kv_cache - plain.kv_cache == 2 * (16_384 - 5000) * 3584
    text = budget(limit_mm_per_prompt={"image": 0, "video": 0})
    assert text.tower == 0
    peak = 65_536 * (2 * 1280 + 2 * 3420) * 2  # of the patches of the largest image
    outputs = 2 * 16_384 * 3584
    saved = plain.tower + outputs + peak - text.activations
    assert text.kv_cache - plain.kv_cache == saved


@pytest.mark.parametrize(
    ("block", "per_token", "layers"),
    [
        ({"depth": 2, "embed_dim": 8, "mlp_ratio": 4, "spatial_merge_size": 2}, 4, 2),
        (
            {
                "num_hidden_layers": 3,
                "hidden_size": 8,
                "intermediate_size": 32,
                "image_size": 56,
                "patch_size": 14,
            },
            4,
            3,
        ),
    ],
    ids=["qwen2-vl", "siglip"],
)
def test_other_families(tmp_path: Path, block: dict, per_token: int, layers: int) -> None:
    """Qwen2-VL says mlp_ratio; Gemma 3 how many tokens an image is: 16 patches, 4 tokens."""
    plain = json.loads(Path("simulator/models/configs/tiny-test/config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain | {"vision_config": block, "mm_tokens_per_image": 4}))
    vision = load_model(path).vision
    assert vision is not None
    assert (vision.layers, vision.patches_per_token) == (layers, per_token)
    assert vision.layer_parameters == 4 * 8 * 8 + 2 * 8 * 32


def test_a_block_of_another_kind_is_none(tmp_path: Path) -> None:
    plain = json.loads(Path("simulator/models/configs/tiny-test/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(plain | {"vision_config": {"width": 3}}))
    assert load_model(tmp_path / "config.json").vision is None
