"""The energy of the GPUs of a run, and what a token takes of it."""

from dataclasses import dataclass
from typing import Any

from simulator.models.power import HIGH, LOW

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Energy:
    """What some GPUs took while they were paid for; of several groups the sum."""

    joules: float
    kg_co2: float

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(self.joules + other.joules, self.kg_co2 + other.kg_co2)


def energy_summary(energy: Energy | None, duration: float, tokens: float) -> dict[str, Any]:
    """Give the keys of a run of so many s that brought out so many tokens; null: not known."""
    joules = energy.joules / tokens if energy and tokens else None
    return {
        "power_w": energy.joules / duration if energy and duration else None,
        "joules_per_output_token": joules,
        "joules_per_output_token_low": None if joules is None else LOW * joules,
        "joules_per_output_token_high": None if joules is None else HIGH * joules,
        "wh_per_million_output_tokens": None if joules is None else joules * 1e6 / 3600.0,
        "kg_co2_per_million_output_tokens": (
            energy.kg_co2 * 1e6 / tokens if energy and tokens else None
        ),
    }
