"""Which client, model or adapter (LoRA) each request names, drawn by weight."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from simulator.util.config import NonNegativeFinite, Share
from simulator.util.errors import HeadwayWarning
from simulator.util.from_mapping import Field
from simulator.workload.distributions import weighted_choice
from simulator.workload.unused import most_asked
from simulator.workload.workload import Ints


@dataclass(slots=True, eq=False)
class Adapters:
    """Requests that ask for adapters (LoRA): the k-th most popular in proportion to k ** -zipf.

    A share `base` of them asks for the model itself. Turns of a session ask for the same.
    """

    num_adapters: Annotated[int, Field(ge=1, le=1_000_000), "adapters, the most popular first"]
    zipf: Annotated[NonNegativeFinite, "weight of the k-th: k ** -zipf"] = 1.0
    base: Annotated[Share, "share of requests, or sessions, for the model itself"] = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each by name; "": the model itself."""
        popularity = np.arange(1.0, self.num_adapters + 1) ** -self.zipf
        shares = (1 - self.base) * popularity / popularity.sum()
        return {"": self.base} | {f"adapter-{k}": w for k, w in enumerate(shares.tolist(), 1)}


def warn_of_adapters(source: str, models: Iterable[str], own: str) -> None:
    """Warn where no request of a trace asks for the engine's own model, by a name that is known."""
    asked = Counter(models)
    if not asked[""]:
        text = f"{source}: no request asks for {own}: each name is taken as an adapter"
        text += f": {most_asked(asked)}; if one is the served model's, write base for it"
        warnings.warn(text, HeadwayWarning, stacklevel=4)


def draw_weighted(session: Ints, weights: Iterable[float], rng: "np.random.Generator") -> Ints:
    """Draw an index for each session, numbered from 0 on, in proportion to the weights."""
    sessions = int(session.max(initial=-1)) + 1
    return weighted_choice(np.array([*weights], np.float64), rng.random(sessions))[session]


def draw_names(
    session: Ints, weights: Mapping[str, float], rng: "np.random.Generator"
) -> list[str]:
    """Draw a name for each session, numbered from 0 on, in proportion to the weights."""
    names = [*map(str, weights)]  # YAML reads a 1 as a number
    return [names[k] for k in draw_weighted(session, weights.values(), rng).tolist()]
