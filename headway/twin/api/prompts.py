"""What an engine computes of a request: tokens of texts, and of images and clips between them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from headway.twin.api.bodies import refuse
from simulator.core.request import Item, Media, Segments
from simulator.workload.distributions import token_counts
from simulator.workload.multimodal import Multimodal

USUAL = Multimodal()  # 1,024 tokens


class Prompt(NamedTuple):
    """The tokens, and the text that they were, if it was one; those of an image or a clip are 0."""

    tokens: Sequence[int]
    text: str | None = None
    echo: Sequence[str] = ()  # what the answer repeats of it: the text of each token
    items: Sequence[Item] = ()  # where images and clips are
    unseen: Sequence[str] = ()  # kinds of a chat's parts that count nothing, as `image_url`

    def segments(self, size: int, salt: str) -> Segments:
        """Name the prompt block by block by its contents, so that equal beginnings are shared.

        With a `salt` only by prompts with the same, as vLLM's cache_salt: it is in the first name.
        Images and clips are named by their contents, too.
        """
        found: list[tuple[Any, int]] = []
        at = 0
        for item in (*self.items, Item(Media("", ""), len(self.tokens), len(self.tokens))):
            while at < item.start:
                end = min(at - at % size + size, item.start)
                found.append((hash(tuple(self.tokens[at:end])), end - at))
                at = end
            if item.end > item.start:
                found.append((item.media, item.end - item.start))
                at = item.end
        if salt:  # as numbers: the hash of a text is another in each process
            name, count = found[0]
            numbers = salt.encode(errors="surrogatepass")
            salted = hash((*self.tokens[:size], -1, *numbers))
            found[0] = (Media(name.modality, salted) if isinstance(name, Media) else salted, count)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class MediaLaws:
    """How many images and clips a prompt may have, and how many tokens each."""

    laws: Mapping[str, Multimodal]
    limits: Mapping[str, int]
    largest: int  # tokens of one, which the encoder's cache takes

    def check(self, counts: Mapping[str, int]) -> None:
        """Raise BadRequestError for more of a kind than vLLM's limit_mm_per_prompt allows."""
        for modality, most in self.limits.items():
            refuse({"images": counts.get(modality, 0) > most}, most=most, key=modality)

    def read(self, modality: str, part: Mapping[str, Any]) -> tuple[Media, int]:
        """Name an image or a clip by its contents, and draw its tokens by the scenario's law.

        The same contents have the same tokens each time. Raises BadRequestError for too many.
        """
        digest = blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).digest()
        name = int.from_bytes(digest, "big", signed=True)
        drawn = np.random.default_rng(name % 2**64).random(1)
        law = self.laws.get(modality, USUAL)
        size = int(token_counts(law.tokens, drawn)[0])
        most = self.largest
        refuse({"large image": size > most}, modality=modality, size=size, most=most)
        return Media(modality, name), size
