"""The encoder of images in front of a language model: a vision transformer, from config.json.

`vision_config` has other names in each family: Qwen2-VL and its successors say `depth`, and merge
`spatial_merge_size` squared patches into a token; SigLIP, CLIP and Pixtral, as in Gemma 3, LLaVA
and Mistral Small, say `num_hidden_layers`; `mm_tokens_per_image` or `spatial_merge_size` beside the
block say how many tokens an image is.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from simulator.models.config_keys import MOST

TEXT_ALONE = "engine.multimodal_config={limit_mm_per_prompt: {image: 0, audio: 0, video: 0}}"
"""What sets that nothing but text may come, so that no encoder is loaded."""
POSITIONS = 10240  # a side, in Gemma 4's table of positions (position_embedding_size)
TILE = 64  # numbers, of which the sizes of SigLIP's quantized matrices are multiples
QWEN_TOKENS = 16384
"""Of an image at most, by `max_pixels` of Qwen2-VL's and Qwen2.5-VL's preprocessor_config.json."""


class VisionEncoder(NamedTuple):
    """The sizes of a vision transformer."""

    layers: int
    hidden_size: int
    intermediate_size: int
    output_size: int  # of a token, the language model's hidden size
    patches_per_token: int
    gated: bool  # its MLPs have three matrices, not two
    merges: bool  # the patches of a token pass through an MLP together
    has_sections: bool  # pictures have positions of their own (MRotaryEmbedding)
    window: int  # patches that one in a windowed layer attends to; 0: no layer has a window
    full_layers: int  # without a window
    most_tokens: int  # of an image
    projectors: int = 1  # and those of inner layers (DeepStack)
    is_whole: bool = False  # on each GPU of a group (Gemma 4's)
    told_weights: int = 0  # layers times squared size as SGLang reads them, in Qwen's not its own
    beside: int = 0  # weights of a table of positions, a wider MLP between
    audio: int = 0  # weights of an audio encoder
    modalities: tuple[str, ...] = ("image",)  # that pass through it, but for audio

    @property
    def quantizes(self) -> int:
        """Weights that vLLM (0.32) has in a checkpoint's formats: no MLP of SigLIP's width."""
        narrow = 0 if self.intermediate_size % TILE == 0 or self.has_sections else 2
        mlps = narrow * self.layers * self.hidden_size * self.intermediate_size
        return self.parameters + self.beside - mlps

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrices."""
        matrices = 3 if self.gated else 2
        return self.hidden_size * (4 * self.hidden_size + matrices * self.intermediate_size)

    @property
    def projector_parameters(self) -> int:
        """Weights between layers and the language model."""
        if not self.merges:
            return self.hidden_size * self.output_size
        merged = self.hidden_size * self.patches_per_token
        return self.projectors * merged * (merged + self.output_size)

    @property
    def parameters(self) -> int:
        """All weights, but for norms and the embedding of patches."""
        return self.layers * self.layer_parameters + self.projector_parameters

    def flops(self, tokens: int) -> tuple[float, float]:
        """Return the FLOPs of an image of so many tokens: of matrix products, of attention."""
        patches = tokens * self.patches_per_token
        products = 2 * (patches * self.layers * self.layer_parameters)
        products += 2 * tokens * self.projector_parameters
        seen = self.full_layers * patches
        seen += (self.layers - self.full_layers) * min(patches, self.window)
        return float(products), 4.0 * patches * seen * self.hidden_size


def read_vision(raw: Mapping[str, Any], hidden_size: int) -> VisionEncoder | None:
    """Read a config.json's `vision_config`; None: there is none, or one of another kind."""
    block = raw.get("vision_config")
    if not isinstance(block, Mapping):
        return None
    sizes = {key: n for key, n in block.items() if type(n) is int and 0 < n <= MOST}

    def first(*keys: str) -> int:
        return next((sizes[key] for key in keys if key in sizes), 0)

    layers, hidden = first("depth", "num_hidden_layers"), first("embed_dim", "hidden_size")
    inner, ratio = first("intermediate_size"), block.get("mlp_ratio")
    inner = inner or (int(hidden * ratio) if isinstance(ratio, int | float) else 0)
    patch, tokens = first("patch_size"), raw.get("mm_tokens_per_image") or 0
    halves = 0.5 in (block.get("pixel_shuffle_ratio"), raw.get("downsample_ratio"))
    merge = first("spatial_merge_size") or raw.get("spatial_merge_size") or 2 * halves
    pools = first("pooling_kernel_size")  # Gemma 4's
    patches = (first("image_size") // patch) ** 2 if patch else 0
    per_token = (merge or pools) ** 2 or (patches // tokens if patches and tokens else 1)
    if min(layers, hidden, inner, per_token) < 1 or ("depth" in block and not merge):
        return None
    output = first("out_hidden_size") or hidden_size
    audio = raw.get("audio_config") or {}
    squares = (audio.get("hidden_size") or 0) ** 2 * (audio.get("num_hidden_layers") or 0)
    # Squares of the hidden size in a layer of Gemma 4's audio encoder: MLPs 16, attention 5,
    # convolution 3.
    beside = 2 * POSITIONS * hidden * (pools > 0)
    if str(raw.get("model_type")).startswith("glm4v"):  # gate, up and down behind the layers
        beside = output * (output + 3 * inner) - (hidden * per_token) ** 2
        inner = output
    if "downsample_ratio" in raw:  # the second matrix of InternVL's projector is narrower
        beside = output**2 - (hidden * per_token) ** 2
    gated = block.get("hidden_act") == "silu" or pools > 0 or block.get("model_type") == "pixtral"
    of_clips = "depth" in block or pools > 0 or "downsample_ratio" in raw  # InternVL has the last
    full, window = block.get("fullatt_block_indexes"), first("window_size")
    inner_layers = block.get("deepstack_visual_indexes")
    return VisionEncoder(
        layers,
        hidden,
        inner,
        output_size=output,
        patches_per_token=per_token,
        gated=gated,
        merges=merge > 0,
        has_sections="depth" in block,
        window=(window // patch) ** 2 if patch else 0,
        full_layers=len(full) if isinstance(full, list) and window else layers,
        projectors=1 + len(inner_layers or ()),
        most_tokens=patches // per_token or QWEN_TOKENS * ("depth" in block),
        is_whole=pools > 0,
        told_weights=sizes.get("num_hidden_layers", 24) * sizes.get("hidden_size", 1024) ** 2,
        beside=beside,
        audio=24 * squares * (pools > 0),
        modalities=("image", "video") if of_clips else ("image",),
    )
