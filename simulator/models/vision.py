"""The encoder of images in front of a language model: a vision transformer, from config.json.

`vision_config` has other names in each family: Qwen2-VL and its successors say `depth`, and merge
`spatial_merge_size` squared patches into a token; SigLIP and CLIP, as in Gemma 3, say
`num_hidden_layers`, and `mm_tokens_per_image` beside the block says how many tokens an image is.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

QWEN_TOKENS = 16384
"""Of an image at most, by `max_pixels` of Qwen2-VL's and Qwen2.5-VL's preprocessor_config.json."""
SIZES = {
    "layers": ("depth", "num_hidden_layers"),
    "hidden_size": ("embed_dim", "hidden_size"),
    "intermediate_size": ("intermediate_size",),
}
"""Keys of each size, of which the first that is there counts."""


class VisionEncoder(NamedTuple):
    """The sizes of a vision transformer."""

    layers: int
    hidden_size: int
    intermediate_size: int
    output_size: int  # of a token, the language model's hidden size
    patches_per_token: int
    gated: bool  # its MLPs have three matrices, not two
    merges: bool  # the patches of a token pass through an MLP together
    window: int  # patches that one in a windowed layer attends to; 0: no layer has a window
    full_layers: int  # without a window
    most_tokens: int  # of an image

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrices."""
        matrices = 3 if self.gated else 2
        return self.hidden_size * (4 * self.hidden_size + matrices * self.intermediate_size)

    @property
    def projector_parameters(self) -> int:
        """Weights between the last layer and the language model."""
        if not self.merges:
            return self.hidden_size * self.output_size
        merged = self.hidden_size * self.patches_per_token
        return merged * (merged + self.output_size)

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
    if not isinstance(block, dict):
        return None
    found: dict[str, Any] = {
        size: next((block[name] for name in names if name in block), 0)
        for size, names in SIZES.items()
    }
    if not found["intermediate_size"]:
        found["intermediate_size"] = int(found["hidden_size"] * block.get("mlp_ratio", 0))
    merge, patch = block.get("spatial_merge_size", 0), block.get("patch_size", 0)
    side, tokens = block.get("image_size", 0), raw.get("mm_tokens_per_image", 0)
    patches = (side // patch) ** 2 if patch and side else 0
    merge = merge or block.get("pooling_kernel_size", 0)  # Gemma 4's
    per_token = merge**2 if merge else patches // tokens if patches and tokens else 1
    if not all(type(n) is int and n > 0 for n in (*found.values(), per_token)):
        return None
    pools = "pooling_kernel_size" in block
    window = block.get("window_size", 0)
    full = len(block["fullatt_block_indexes"]) if window else found["layers"]
    return VisionEncoder(
        **found,
        output_size=block.get("out_hidden_size", hidden_size),
        patches_per_token=per_token,
        gated=block.get("hidden_act") == "silu" or pools,
        merges=merge > 0 and not pools,
        window=(window // patch) ** 2 if window and patch else 0,
        full_layers=full,
        most_tokens=patches // per_token or QWEN_TOKENS * (merge > 0 and not pools),
    )
