"""The block `engine.multimodal_config`: images and clips in prompts, by vLLM's names."""

from itertools import pairwise
from typing import Annotated, Any

from simulator.util.config import Config, Count, WholeNumber
from simulator.util.errors import MappingError
from simulator.util.from_mapping import Field, short_repr

MODALITIES = ("image", "video", "audio")


def _modalities(value: object) -> object:
    """Let through a mapping whose keys are modalities."""
    if isinstance(value, dict) and not {*value} <= {*MODALITIES}:
        raise MappingError("", f"the keys are of {', '.join(MODALITIES)}, not {short_repr(value)}")
    return value


def _ascending(value: Any) -> Any:
    """Let through pairs of tokens and seconds, the tokens ascending."""
    if value is None:
        return None
    good = isinstance(value, list) and bool(value) and all(map(_is_pair, value))
    if not good or any(one[0] >= two[0] for one, two in pairwise(value)):
        raise MappingError(
            "", "must be a list of [tokens, seconds], all above 0, the tokens ascending"
        )
    return value


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    tokens, seconds = pair
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return type(tokens) is int and tokens >= 1 and number and 0 < seconds <= 1e6


class MultimodalConfig(Config):
    """What an engine takes of images and clips, and what its encoder costs."""

    limit_mm_per_prompt: Annotated[dict[str, WholeNumber], _modalities] = Field(
        {},
        description="most images of a prompt, {image: 4}; with 0 of each the encoder is not loaded",
    )
    max_num_encoder_input_tokens: Count | None = Field(
        None,
        description="most encoder tokens of a step; null: max_num_batched_tokens, or the model's "
        "largest image (1,024 without a vision_config)",
    )
    encoder_cache_size: Count | None = Field(
        None,
        description="tokens of encoder outputs kept; null: as max_num_encoder_input_tokens",
    )
    disable_chunked_mm_input: bool = Field(
        False, description="no chunk of a prompt ends within an image that it begins"
    )
    encoder_seconds: Annotated[list[list[float]] | None, _ascending] = Field(
        None,
        description="[tokens, seconds] of encoding one; null: by roofline, from the model's "
        "vision_config",
    )

    def takes(self, *modalities: str) -> bool:
        """Whether items of any of these may come; else vLLM does not load their encoder.

        As get_limit_per_prompt (0.33), which limits nothing that is not named.
        """
        return any(self.limit_mm_per_prompt.get(one, 1) for one in modalities)

    @property
    def takes_any(self) -> bool:
        """Whether images may come, or clips that are named."""
        return self.takes("image", *self.limit_mm_per_prompt)
