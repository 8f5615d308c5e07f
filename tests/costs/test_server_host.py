"""The host of a server: on several GPUs, and behind its API servers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.core.request import Chunk, Request, Step
from simulator.costs.overhead import Overhead
from simulator.costs.piecewise import PiecewiseCost
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import resolve
from simulator.util.yaml_lines import SourceMap
from tests.support.costs import with_overhead

KERNELS = PiecewiseCost(dense=[[1, 1.0]])
PROMPT = Chunk(Request(0, 0.0, 4, 4), 0, 4)


def test_an_engine_on_several_gpus_has_a_host_of_its_own() -> None:
    """A process for each GPU: 0.25 s more, and as much in its interval. One GPU needs none."""
    terms = Overhead(host=0.5, host_ranks=0.25, host_interval=(0.25, 1.0))
    alone, two = (terms.of_server(ranks=ranks, api_servers=1) for ranks in (1, 2))
    assert (alone.host, alone.host_interval) == (0.5, (0.25, 1.0))
    assert (two.host, two.host_interval) == (0.75, (0.5, 1.25))
    assert [cost_on(gpus, tensor_parallel_size=gpus).host for gpus in (1, 2)] == [2e-3, 4e-3]


def test_no_step_is_delivered_before_the_api_server_has_streamed_the_one_before() -> None:
    """0.5 s for each of eight sequences, unless host or kernels take longer; two servers: half."""
    terms = Overhead(host=2.0, stream_per_sequence=0.5)
    for servers, many in ((1, 4.0), (2, 2.0)):
        own = terms.of_server(ranks=1, api_servers=servers)
        cost = with_overhead(own, KERNELS, overlapped=True)
        assert cost.execute(Step([], 8, 9)).seconds == many
        assert cost.execute(Step([], 2, 9)).seconds == 2.0
        assert cost.execute(Step([PROMPT], 7, 9)).seconds == many
        assert cost.decode_seconds(np.array([8, 2]), np.array([9, 9])).tolist() == [many, 2.0]
        cost = with_overhead(own, KERNELS, overlapped=False)
        times = [cost.execute(Step([], count, 9)).seconds for count in (8, 2)]
        assert times == [max(many, 3.0), 3.0]  # nothing hides the host's 2 s behind 1 s of kernels
        assert cost.decode_seconds(np.array([8, 2]), np.array([9, 9])).tolist() == times
        alone = with_overhead(replace(own, host=0.0), KERNELS, overlapped=False)
        assert alone.execute(Step([], 8, 9)).seconds == many
        assert alone.execute(Step([PROMPT], 7, 9)).seconds == many
        assert alone.leap(Step([], 2, 9), 2).seconds == [1.0, 1.0]
    one, four = (cost_on(1, api_server_count=count).stream_per_sequence for count in (1, 4))
    assert one == pytest.approx(4 * four)
    each, both = (
        cost_on(2, data_parallel_size=2, api_server_count=count).stream_per_sequence
        for count in (2, 1)
    )
    assert both == pytest.approx(2 * each)


def cost_on(gpus: int, **engine: Any) -> PiecewiseCost:
    """The cost of an engine core of today's release on so many H200."""
    scenario = {"model": "llama-3-8b", "gpu": {"name": "H200", "count": gpus}}
    engine = {"name": "vllm", **engine}
    cost = resolve(check_scenario({**scenario, "engine": engine}, SourceMap("x", {}))).cost
    assert isinstance(cost, PiecewiseCost)
    return cost
