"""What an adapter (LoRA) weighs: two thin matrices beside each projection of a dense model.

As vLLM 0.33 lays them out, `max_lora_rank` wide whatever the adapter's own rank. With tensor
parallelism the first matrix is whole on each GPU and the second shared out where the projection's
outputs are; where its inputs are, it is the other way round (`fully_sharded_loras` is false).
Embedding and lm_head have room for an adapter, too, which usually has none for them.
"""

from typing import NamedTuple

from simulator.models.dtypes import HALF
from simulator.models.spec import ModelSpec
from simulator.util.errors import ScenarioError


class AdapterSize(NamedTuple):
    """Sizes of one adapter on each GPU."""

    weights: float  # in the layers
    tables: float  # of embedding and lm_head, reserved but rarely used
    moved: float  # bytes that kernels move for each token, the weights left out

    @property
    def slot_bytes(self) -> float:
        """Bytes set aside for it on the GPU."""
        return HALF * (self.weights + self.tables)


def adapter_size(model: ModelSpec, rank: int, tensor_parallel_size: int = 1) -> AdapterSize:
    """Work out the sizes; ValueError for models whose layers are not plain.

    A token's kernels read the inputs of each group of projections and read and write the outputs.
    """
    if model.num_experts or model.latent is not None or model.linear is not None:
        what = "experts" if model.num_experts else "latent or linear attention"
        what = f"adapters of {model.name}, with {what}, are not simulated"
        raise ScenarioError("engine.enable_lora", what)
    gpus, hidden = tensor_parallel_size, model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    inner = model.intermediate_size
    gated = query * (1 + model.attention_gate)
    # Projections that share inputs: inputs, outputs of each.
    wide = ((hidden, (gated, key, key)), (hidden, (inner, inner)))
    deep = ((query, (hidden,)), (inner, (hidden,)))
    weights = sum(rank * (one + out / gpus) for one, outs in wide for out in outs)
    weights += sum(rank * (one / gpus + out) for one, outs in deep for out in outs)
    moved = sum(one + 2 * sum(outs) / gpus for one, outs in wide)
    moved += sum(one / gpus + 2 * sum(outs) for one, outs in deep)
    layers, tables = model.num_hidden_layers, 2 * rank * (model.vocab_size + hidden)
    return AdapterSize(layers * weights, tables, HALF * layers * moved)
