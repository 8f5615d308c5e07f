"""Every shipped profile against the data sheet, and against its neighbours.

Kernels alone, without what the engine adds. A step moves its share of the weights and of the
cache, and does its share of the FLOPs; it launches a dozen kernels a layer, and adds up twice a
layer where GPUs share it.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from simulator.core.request import Chunk, Request, Step
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import PROFILES, named_hardware, read_profile, shipped_profiles
from simulator.models.dtypes import HALF
from simulator.models.gpus import GPUS, NVLINK, Gpu
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec

NOBODY = Request(-1, 0.0, 1, 1)
NAMES = [name for name in shipped_profiles() if ".cpu." not in name]
LAUNCHES = 60e-6  # s a layer, at most: kernels and two all-reduces of few bytes
EXPERT_LAUNCHES = 80e-6  # s: routing, sorting, experts and a shared one besides
LATENT_LAUNCHES = 150e-6  # s: six products of few tokens, and the attention between them
EXPERT_SLACK = 1.25  # on comparisons: an engine takes another kernel on each GPU and for each dtype
WORST_LINK = 0.1  # of its bandwidth, in an all-reduce
NEWER = ("a100", "h100", "h200", "b200")


@dataclass(frozen=True)
class Shipped:
    """A profile and what its name says."""

    cost: PiecewiseCost
    model: ModelSpec
    gpu: Gpu
    gpus: int
    dtype: str
    cache: str

    @property
    def slack(self) -> float:
        """How much further comparisons may be off."""
        return EXPERT_SLACK if self.model.num_experts else 1.0

    @property
    def launches(self) -> float:
        """The seconds that a step takes however little it does."""
        model = self.model
        each = LAUNCHES + (model.num_experts > 0) * EXPERT_LAUNCHES
        each += (model.latent is not None) * LATENT_LAUNCHES
        return model.num_hidden_layers * each

    def decode(self, count: int, context: int = 1024) -> float:
        """Return the seconds of a step of so many decodes."""
        return float(self.cost.decode_seconds(np.array([count]), np.array([count * context]))[0])

    def prompt(self, tokens: int) -> float:
        """Return the seconds of a step of one prompt."""
        return self.cost.execute(Step([Chunk(NOBODY, 0, tokens)])).seconds

    def moving(self, count: int, context: int = 1024) -> float:
        """Return the seconds in which the memory delivers what such a step reads."""
        model = self.model
        matrices = model.matrix_bytes(model.expected_experts(count), self.dtype)
        size = matrices + HALF * model.head_parameters
        read = count * context * model.kv_bytes_per_token(self.cache, self.gpus)
        return (size / self.gpus + read) / self.gpu.bandwidth

    def computing(self, tokens: int) -> float:
        """Return the seconds of a prompt's FLOPs at the data sheet's rate."""
        model = self.model
        flops = self.gpu.flops(self.dtype)
        if self.dtype == "nvfp4":
            flops = 2 * (self.gpu.fp8_flops or flops)
        linear = 2 * model.matrix_bytes(model.num_experts_per_tok, None) * tokens / flops
        pairs = model.attention_flops_per_pair * tokens * (tokens + 1) / 2 / self.gpu.bf16_flops
        return (linear + pairs) / self.gpus

    def adding_up(self, tokens: int) -> float:
        """Return the seconds of the all-reduces of so many tokens over a bad link."""
        if self.gpus == 1:
            return 0.0
        size = 2 * (self.gpus - 1) / self.gpus * tokens * self.model.hidden_size * HALF
        return 2 * self.model.num_hidden_layers * size / (WORST_LINK * self.gpu.link_bandwidth)


@cache
def shipped(name: str) -> Shipped:
    profile, told = read_profile(PROFILES / f"{name}.yaml"), named_hardware(name)
    assert isinstance(profile.cost, PiecewiseCost)
    return Shipped(
        profile.cost,
        load_model(name.rsplit(".", 2)[0]),
        GPUS[str(told["gpu"])],
        int(str(told["tensor_parallel_size"])),
        str(told["dtype"]),
        str(told["kv_cache_dtype"]),
    )


def a_decode_reads_its_weights_and_its_cache(name: str) -> None:
    one = shipped(name)
    assert one.moving(1) < one.decode(1) < 2.5 * one.moving(1) + one.launches
    assert one.moving(256) < one.decode(256)


def a_prompt_computes_its_products(name: str) -> None:
    """At 25 to 95 % of the FLOP/s of the data sheet, all-reduces and launches aside."""
    one = shipped(name)
    beside = one.launches + one.adding_up(2048)
    least = one.computing(2048)
    assert least / 0.95 < one.prompt(2048) < least / 0.25 + beside + one.moving(2048, 0)


def more_work_takes_longer(name: str) -> None:
    """Far beyond the tables, too; a stair's edge may go down a little, never the whole stair."""
    one = shipped(name)
    decodes = [one.decode(count) for count in (1, 8, 64, 256, 1024)]
    assert all(b > 0.85 * a for a, b in pairwise(decodes))
    assert decodes[-1] > 1.3 * decodes[0]
    contexts = [one.decode(32, context) for context in (64, 512, 4096, 32768)]
    assert contexts == sorted(contexts)
    prompts = [one.prompt(2**k) for k in range(12, 18)]  # 4,096 to 131,072 tokens
    assert all(1.5 * a < b < 4.1 * a for a, b in pairwise(prompts))
    assert one.prompt(2048) < 0.8 * one.prompt(4096)


def more_gpus_are_faster_but_no_miracle(name: str) -> None:
    """Half as many take less than twice as long and, with NVLink, no shorter."""
    many = shipped(name)
    half = name.replace(f"-tp{many.gpus}", f"-tp{many.gpus // 2}").replace("-tp1", "")
    if half == name or half not in NAMES:  # half as many GPUs do not hold the model
        return
    few = shipped(half)
    for count in (16, 64, 256):
        assert few.decode(count) < 2.15 * few.slack * many.decode(count)
    assert few.prompt(4096) < 2.15 * few.slack * many.prompt(4096)
    if many.gpu.link_bandwidth > NVLINK:
        assert many.decode(64) < 1.1 * few.decode(64)  # quantized, sums may outweigh the products
        assert many.prompt(4096) < few.slack * few.prompt(4096)


def newer_gpus_are_faster(name: str) -> None:
    """A100, H100, H200, B200; H100 and H200 differ by memory alone."""
    if shipped(name).gpu.name != "H200":
        return
    there = [name.replace("h200", key) for key in NEWER if name.replace("h200", key) in NAMES]
    decodes = [shipped(one).decode(8) for one in there]
    prompts = [shipped(one).prompt(4096) for one in there]
    slack = 1.1 * shipped(name).slack
    assert all(b < slack * a for a, b in pairwise(decodes))
    assert all(b < slack * a for a, b in pairwise(prompts))
    h100 = name.replace("h200", "h100")
    if h100 in NAMES:
        assert shipped(h100).decode(8) < 4.8 / 3.35 * 1.05 * shipped(name).decode(8)
        assert shipped(h100).prompt(4096) < 1.3 * shipped(name).prompt(4096)


def fewer_bytes_are_faster(name: str) -> None:
    wide = name.replace(".fp8", ".bf16")
    if name.endswith(".fp8") and wide in NAMES:
        for count in (1, 16, 64):
            # On eight B200s a layer's products are so small that reading less saves nothing.
            one, two = shipped(name), shipped(wide)
            assert one.decode(count) < 1.1 * one.slack * two.decode(count)
        assert shipped(name).prompt(4096) < 1.1 * shipped(name).slack * shipped(wide).prompt(4096)


def a_million_cached_tokens_are_in_range_or_all_that_the_memory_holds(name: str) -> None:
    one = shipped(name)
    each = one.model.kv_bytes_per_token(one.cache, one.gpus)
    assert one.cost.limits is not None
    assert one.cost.limits["context"][1] >= min(1_000_000, int(one.gpu.memory / each))


LAWS = (
    a_decode_reads_its_weights_and_its_cache,
    a_prompt_computes_its_products,
    more_work_takes_longer,
    more_gpus_are_faster_but_no_miracle,
    newer_gpus_are_faster,
    fewer_bytes_are_faster,
    a_million_cached_tokens_are_in_range_or_all_that_the_memory_holds,
)


@pytest.mark.many
@pytest.mark.parametrize("model", sorted({name.rsplit(".", 2)[0] for name in NAMES}))
def test_every_law_holds_for_every_profile(model: str) -> None:
    """All of a model in one test: its profiles are read once."""
    broken = []
    for name in NAMES:
        if name.rsplit(".", 2)[0] != model:
            continue
        for law in LAWS:
            try:
                law(name)
            except AssertionError as error:
                broken.append(f"{name}, {law.__name__}: {error}")
    assert not broken, "\n".join(broken)
