"""A finding on a run and its advice: a key of the scenario and its value, in words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from simulator.scenario.load import with_keys
from simulator.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Advice:
    """A key of the scenario, what it is and what it should be."""

    direction: Literal["raise", "lower", "set"]
    key: str  # dotted
    value: Any  # now; None: the default
    to: Any
    also: tuple[tuple[str, Any], ...]  # further keys that must change with it, and to what

    def as_dict(self) -> dict[str, Any]:
        """Return it as summary.json has it."""
        found = {"direction": self.direction, "key": self.key, "from": self.value, "to": self.to}
        return found | ({"also": dict(self.also)} if self.also else {})


def follow(scenario: Scenario, advice: Mapping[str, Any]) -> Scenario:
    """Return the scenario with a piece of advice followed; HeadwayError where that cannot be."""
    return with_keys(scenario, {advice["key"]: advice["to"], **advice.get("also", {})})


def words(advice: Mapping[str, Any]) -> str:
    """Say it: `raise engine.max_num_seqs from 16 to 64`."""
    key, now, to = (advice[name] for name in ("key", "from", "to"))
    also = "".join(f" and set {k} to {_word(v)}" for k, v in advice.get("also", {}).items())
    if advice["direction"] == "set":
        return f"set {key} to {_word(to)} (now {_word(now)}){also}"
    return f"{advice['direction']} {key} from {_word(now)} to {_word(to)}{also}"


def _word(value: Any) -> str:
    """Write a value as YAML does."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def turn(key: str, value: Any, to: Any, also: Mapping[str, Any] | None = None) -> Advice:
    """Advise a value; numbers are raised or lowered, all else is set."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, to))
    direction: Literal["raise", "lower", "set"] = "set"
    if numbers:
        direction = "raise" if to > value else "lower"
    return Advice(direction, key, value, to, tuple((also or {}).items()))


class Finding(NamedTuple):
    """Something that stands out."""

    weight: float  # 0 to 1, about the share of the requests' time (or work) that is at stake
    text: str
    metric: str  # of the summary: what the advice is to improve
    advice: Sequence[Advice]  # the best first
    figures: Mapping[str, float | int | str] = {}  # that the summary lacks
