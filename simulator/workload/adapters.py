"""Which adapters (LoRA), or which of several models, requests ask for, drawn by popularity."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from simulator.util.from_mapping import Check, raise_if
from simulator.workload.distributions import are_numbers, weighted_choice
from simulator.workload.workload import Ints, Workload

MOST = 1_000_000


@dataclass(slots=True, eq=False)
class Adapters:
    """Requests that ask for adapters (LoRA): the k-th most popular in proportion to k ** -zipf.

    A share `base` of them asks for the model itself. Turns of a session ask for the same.
    """

    num_adapters: int
    zipf: float = 1.0
    base: float = 0.0

    def __post_init__(self) -> None:
        raise_if(
            (
                not 1 <= self.num_adapters <= MOST,
                "num_adapters",
                f"{self.num_adapters} is not from 1 to {MOST:,}",
            ),
            (not 0 <= self.zipf < inf, "zipf", f"{self.zipf} is not 0 or more"),
            (not 0 <= self.base <= 1, "base", f"{self.base} is not from 0 to 1"),
        )


def check_models(models: Any, adapters: Any) -> list[Check]:
    """Check the key that says which of several models requests ask for."""
    weights = [*models.values()] if isinstance(models, Mapping) else models
    good = models is None or (are_numbers(weights, 1) and 0 < sum(weights) < inf)
    named = not isinstance(models, Mapping) or all(isinstance(name, str) for name in models)
    return [
        (not good or not named, "models", "must be {name: weight}, weights 0 or more, not all 0"),
        (models is not None and adapters is not None, "models", "cannot be used with adapters"),
    ]


def draw_models(
    work: Workload, session: Ints, models: Mapping[str, float], rng: "np.random.Generator"
) -> None:
    """Let each session, numbered from 0 on, ask for a model, in proportion to the weights."""
    names, weights = [*models], np.array([*models.values()], np.float64)
    sessions = int(session.max(initial=-1)) + 1
    work.model = [
        names[k] for k in weighted_choice(weights, rng.random(sessions))[session].tolist()
    ]


def draw_adapters(
    work: Workload, session: Ints, spec: Adapters, rng: "np.random.Generator"
) -> None:
    """Let each session, numbered from 0 on, ask for an adapter: adapter-1 is the most popular."""
    popularity = np.arange(1.0, spec.num_adapters + 1) ** -spec.zipf
    weights = np.concatenate(([spec.base], (1 - spec.base) * popularity / popularity.sum()))
    sessions = int(session.max(initial=-1)) + 1
    names = ["", *(f"adapter-{k}" for k in range(1, spec.num_adapters + 1))]
    work.model = [
        names[k] for k in weighted_choice(weights, rng.random(sessions))[session].tolist()
    ]
