"""A measured GPU's kernels on another: each term by what the data sheets of the two say.

Products go by bandwidth where they wait for weights and by FLOP/s where they do not, attention of
decodes by bandwidth, that of prompts by FLOP/s, launches and the wait for the longest sequence not
at all: every other term takes the ratio of the two GPUs' rooflines at the same efficiencies
(`roofline.py`). All-reduces are those of the other GPU's link.
"""

from dataclasses import replace

import numpy as np

from simulator.core.engine_config import EngineConfig
from simulator.costs.noise import REGIMES
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.roofline import all_reduce, lacking_sums, roofline
from simulator.costs.terms import TERMS, WINDOW_TERMS
from simulator.models.dtypes import HALF
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec

SCALED = 0.1
"""Standard deviation of log(measured / predicted) of steps for what data sheets do not tell."""
LEAST_LEFT = 0.5  # of a step's products and sums, the products at least


def scale_cost(
    cost: PiecewiseCost, model: ModelSpec, engine: EngineConfig, measured: Gpu, gpu: Gpu
) -> PiecewiseCost:
    """Return a cost of kernels that was measured on one GPU as it should be on another."""
    gpus = engine.tensor_parallel_size
    dtype, cache = engine.weight_dtype, engine.cache_dtype
    theirs, ours = (
        roofline(model, one, tensor_parallel_size=gpus, dtype=dtype, kv_cache_dtype=cache)
        for one in (measured, gpu)
    )
    tokens, seconds = np.array(cost.dense, float).T
    sums = [
        2 * model.num_hidden_layers * all_reduce(one, gpus, tokens * model.hidden_size * HALF)
        for one in (measured, gpu)
    ]
    alone = [
        np.array([one.dense_seconds(int(count)) for count in tokens]) - passed
        for one, passed in zip((theirs, ours), sums, strict=True)
    ]
    products = np.maximum(seconds - sums[0], LEAST_LEFT * seconds)
    dense = products * alone[1] / alone[0] + sums[1]
    slower = measured.bandwidth / gpu.bandwidth
    terms = {}
    for name in (*TERMS, *WINDOW_TERMS, "state_per_sequence", "decode_least", "mixed_least"):
        value, one, other = (getattr(each, name) for each in (cost, theirs, ours))
        terms[name] = value * (other / one if one and other else slower)
    residuals = {
        one: float(np.hypot((cost.residuals or {}).get(one, 0.0), SCALED)) for one in REGIMES
    }
    return replace(
        cost,
        dense=np.column_stack([tokens, np.maximum.accumulate(dense)]).tolist(),
        **terms,
        name=f"{cost.name} scaled to {gpu.name}",
        residuals=residuals,
        unmeasured=f"kernels of {model.name} on {gpu.name}{lacking_sums(gpu, gpus)}",
    )
