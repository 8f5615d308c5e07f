"""What an engine loads onto each GPU, part by part, as its log's `Model loading took` counts.

Beside a checkpoint's modules: rows that pad the vocabulary, angles of rotary embeddings,
towers, layers that draft, and what kernels add: Marlin pads the experts of mxfp4 (gpt-oss), latent
attention is unpacked in 16 bits.
"""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from simulator.models.attention import LatentAttention
from simulator.models.dtypes import HALF
from simulator.models.modules import Module
from simulator.models.quantization import Quantization
from simulator.models.spec import ModelSpec, module_bytes

VOCABULARY = 64  # rows that a GPU's part of a table is a multiple of (vLLM, SGLang)
SECTIONS = 4  # times as many angles where pictures have positions of their own (MRotaryEmbedding)
EAGLE3_VOCABULARY = 32_000  # of the drafts, as the published heads have


class Sharing(NamedTuple):
    """How many GPUs share what."""

    tensor: int = 1
    data: int = 1
    whole_experts: bool = False  # each GPU has whole ones (expert parallelism)
    padding: tuple[int, int] = (256, 128)
    """Multiples to which kernels pad the hidden size and a GPU's part of an expert of mxfp4."""


class Loaded(NamedTuple):
    """Bytes on each GPU; `layers` and `rest` are the language model's."""

    layers: float  # that pipeline stages share out
    table: float  # an embedding or lm_head
    rest: float  # angles, the last norm, tables of the layers' own
    tower: float
    drafts: float

    def total(self, tables: int) -> int:
        """Bytes of all, with one table or both."""
        return int(sum(self) + (tables - 1) * self.table)


def loaded(
    model: ModelSpec,
    weights: str,
    sharing: Sharing,
    *,
    drafts: str | None = None,
    draft: ModelSpec | None = None,
    tower: bool = True,
) -> Loaded:
    """Work out what each GPU has; `weights` is the dtype, `auto` as published.

    `drafts` is the method of what drafts, `draft` its model. Raises ValueError where a checkpoint
    does not say its formats.
    """
    width = model.wide(weights)
    layers = _modules_bytes(model, weights, sharing, model.modules)
    if model.latent is not None:
        heads = model.num_attention_heads
        layers += HALF * model.num_hidden_layers * model.latent.unpacked(heads) / sharing.tensor
    rows = ceil(model.vocab_size / VOCABULARY / sharing.tensor) * VOCABULARY
    table = width * rows * model.hidden_size
    own = model.own_tables / sharing.tensor + model.hidden_size
    vision = HALF * model.vision.parameters / sharing.tensor if model.vision and tower else 0.0
    return Loaded(
        layers,
        table,
        width * own + _angles(model),
        vision,
        _drafting(model, weights, sharing, drafts, draft),
    )


def _modules_bytes(
    model: ModelSpec, weights: str, sharing: Sharing, modules: Iterable[Module]
) -> float:
    formats, width = model.formats(weights), model.wide(weights)
    return sum(_of_module(one, model, formats, width, sharing) for one in modules)


def _of_module(
    module: Module,
    model: ModelSpec,
    formats: Quantization | None,
    width: float,
    sharing: Sharing,
) -> float:
    """Bytes of a module on each GPU."""
    gpus, kv_heads = sharing.tensor, model.num_key_value_heads
    if not module.is_expert:
        return module_bytes(module, formats, width, gpus, kv_heads)
    spread = sharing.data * (gpus if sharing.whole_experts or sharing.data > 1 else 1)
    within = 1 if spread > sharing.data or sharing.data > 1 else gpus
    if formats is not None and formats.word == "mxfp4":
        module = _padded(module, within, sharing.padding)
    share = min(spread, model.num_experts)
    return module_bytes(module, formats, width, within) / share


def _padded(module: Module, gpus: int, multiples: tuple[int, int]) -> Module:
    """Pad an expert's matrix as the kernels do; its biases are left as they are."""
    if module.split == "whole":
        return module
    hidden, inner = multiples[0], multiples[1] * gpus
    rows, columns = (inner, hidden) if module.split == "outputs" else (hidden, inner)
    return module._replace(
        outputs=ceil(module.outputs / rows) * rows, inputs=ceil(module.inputs / columns) * columns
    )


def _angles(model: ModelSpec) -> float:
    """Bytes of the tables of rotary embeddings, one for each kind of layer that has its own."""
    if isinstance(model.latent, LatentAttention):
        sizes = [model.latent.qk_rope_head_dim]
    else:
        kinds = model.cached_layers if model.sliding_window and model.qk_norm else ["one"]
        sizes = [model.rotary_dim or model.head_size(kind) for kind in kinds]
    times = SECTIONS if model.vision is not None and model.vision.has_sections else 1
    if model.linear is not None and model.linear.is_mamba:
        return 0.0
    return HALF * times * model.max_position_embeddings * sum(sizes)


def _drafting(
    model: ModelSpec, weights: str, sharing: Sharing, method: str | None, draft: ModelSpec | None
) -> float:
    """Bytes of what drafts: a layer of MTP, EAGLE's layer and `fc`, EAGLE-3's, or a model."""
    hidden, gpus = model.hidden_size, sharing.tensor
    if draft is not None:
        own = loaded(draft, "auto", Sharing(gpus), tower=False)
        return own.total(1 if draft.tie_word_embeddings else 2)
    if method == "mtp":
        head = f"layers.{model.num_hidden_layers - 1}."
        last = (one for one in model.modules if one.name.startswith(head))
        named = (one._replace(name="mtp." + one.name) for one in last)
        return _modules_bytes(model, weights, sharing, named) + HALF * 2 * hidden * hidden
    if method not in ("eagle", "eagle3"):
        return 0.0
    query = model.num_attention_heads * model.head_dim
    wide = query + 2 * model.num_key_value_heads * model.head_dim
    inner = model.dense_intermediate_size or model.intermediate_size
    layer = (hidden * (wide + query) + 3 * hidden * inner) / gpus
    if method == "eagle":
        return HALF * (layer + 2 * hidden * hidden)
    tables = EAGLE3_VOCABULARY * hidden / gpus
    return HALF * (layer + hidden * wide / gpus + 3 * hidden * hidden + tables)
