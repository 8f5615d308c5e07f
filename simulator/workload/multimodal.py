"""Images and clips in prompts: how many, of how many tokens, and how often one comes again."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

import numpy as np

from simulator.core.multimodal_config import MODALITIES
from simulator.core.request import Media, Segments
from simulator.util.config import NonNegativeFinite
from simulator.util.errors import MappingError, warn
from simulator.util.from_mapping import from_mapping, parse_faults, raise_if, short_repr
from simulator.workload import distributions as laws
from simulator.workload.arrivals import Things
from simulator.workload.workload import Floats, Ints, Workload

ONE, TOKENS = laws.Fixed(1), laws.Fixed(1024)


@dataclass(slots=True, eq=False)
class Multimodal:
    """Images, or clips, of each request; their tokens come on top of the text's.

    With `distinct` each is one of so many, the k-th in proportion to k ** -zipf; else all are new.
    """

    items: Annotated[
        laws.Amounts | None, "images of a request; null: 1, or the trace's column `images`"
    ] = None
    tokens: Annotated[laws.Lengths, "tokens of each image, on top of the text's"] = TOKENS
    distinct: Annotated[Things | None, "different images; null: every image is new"] = None
    zipf: Annotated[NonNegativeFinite, "weight of the k-th: k ** -zipf"] = 1.0


def read_multimodal(given: object) -> dict[str, Multimodal]:
    """Read which images and clips prompts have, by their kind."""
    if not isinstance(given, Mapping) or not given or not {*given} <= {*MODALITIES}:
        known = ", ".join(f"{name}: {{...}}" for name in MODALITIES)
        raise MappingError("", f"must be a mapping of {known}, not {short_repr(given)}")
    asked = {name: given[name] or {} for name in MODALITIES if name in given}
    read = partial(from_mapping, Multimodal)
    wrong = (parse_faults(name, read, keys) for name, keys in asked.items())
    raise_if(others=chain.from_iterable(wrong))
    return {name: read(keys) for name, keys in asked.items()}


Multimodals = Annotated[Mapping[str, Multimodal], read_multimodal]


class MultimodalDraws:
    """Draws the images and clips of one request after the other."""

    def __init__(
        self,
        asked: Mapping[str, Multimodal],
        rng: "np.random.Generator",
        load: laws.TraceReader | None,
    ) -> None:
        self._kinds = []
        self._load = load
        for name, spec in asked.items():
            counts, items, sizes = rng.spawn(3)
            pool = self._sizes(spec, sizes.random(spec.distinct)) if spec.distinct else None
            self._kinds.append((name, spec, counts, items, pool))

    def _sizes(self, spec: Multimodal, u: Floats) -> Ints:
        return laws.token_counts(spec.tokens, u, self._load)

    def draw(self, first: int, count: int, images: Ints | None) -> tuple[list[Segments], Ints]:
        """Return what so many requests have, from number `first` on, and its tokens.

        `images` says how many images each has, where a trace does.
        """
        parts: list[Segments] = [()] * count
        for name, spec, counts, items, pool in self._kinds:
            if images is not None and name == "image":
                raise_if(
                    (spec.items is not None, f"{name}.items", "the trace has a column of them")
                )
                many = images
            else:
                law = ONE if spec.items is None else spec.items
                many = laws.token_counts(law, counts.random(count), self._load)
            u = items.random(int(many.sum()))
            owners = np.repeat(np.arange(count), many)
            if pool is None:
                sizes = self._sizes(spec, u)
                places = chain.from_iterable(map(range, many.tolist()))
                names: list[Any] = [*zip((owners + first).tolist(), places, strict=True)]
            else:
                weights = np.arange(1.0, len(pool) + 1) ** -spec.zipf
                chosen = laws.weighted_choice(weights, u)
                sizes, names = pool[chosen], chosen.tolist()
            for owner, key, size in zip(owners.tolist(), names, sizes.tolist(), strict=True):
                parts[owner] += ((Media(name, key), size),)
        totals = [sum(size for _, size in one) for one in parts]
        return parts, np.array(totals, np.int64)


def insert(workload: Workload, media: list[Segments], more: Ints) -> None:
    """Put images and clips, of `more` tokens, before the last run of each prompt of a trace.

    As vLLM's templates do before text. The tokens come on top, if the trace does not count them.
    """
    text = workload.prompt_tokens
    if workload.images_counted:
        short = np.maximum(more + 1 - text, 0)
        if short.any():
            what = f"images: prompts with fewer tokens than their images: {(short > 0).sum()}"
            warn(f"{workload.source}: {what}; raised by tokens: {short.sum():,}")
        text = np.maximum(text - more, 1)
    segments = workload.segments or [None] * len(workload)
    wholes = (parts or ((("in", i), int(text[i])),) for i, parts in enumerate(segments))
    workload.segments = [(*w[:-1], *m, *w[-1:]) for w, m in zip(wholes, media, strict=True)]
    workload.prompt_tokens = text + more
