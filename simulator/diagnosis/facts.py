"""What the rules of the diagnosis look at, and what they find."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from simulator.diagnosis.blocked_time import CAUSES, blocked_time
from simulator.results.request_table import RequestTable, gather_requests

SPARE = 0.25
"""Of the blocks: more than any head of a queue should need."""

if TYPE_CHECKING:
    from simulator.results.record import Record
    from simulator.scenario.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that stands out."""

    rule: str
    weight: float
    text: str
    knob: str  # a key of the scenario
    figures: dict[str, float | int | str]


class Facts:
    """What the rules look at."""

    def __init__(self, result: "Record", summary: Mapping[str, Any]) -> None:
        self.result = result
        self.engine = result.scenario.engine
        self.summary = summary
        self.gauges: Mapping[str, Any] = summary["headway"]
        self.table: RequestTable = gather_requests(
            result.workload, result.sent, result.logs, result.tries
        )
        done = self.done = self.table.completed
        self.time = {name: float(part[done].sum()) for name, part in result.time_parts().items()}
        self.time["queue_time"] = float(self.table.queue_time[done].sum())
        self.whole = float(self.table.e2el[done].sum()) or 1.0
        policy = self.engine.scheduling_policy
        self.policy = policy if isinstance(policy, str) else str(policy["policy"])

    @cached_property
    def engines(self) -> "list[EngineConfig]":
        """Give the engine of each replica: those of a cluster's groups may differ."""
        story, scenario = self.result.cluster, self.result.scenario
        if story is None:
            return [self.engine] * len(self.result.logs)
        kinds = {name: scenario.of_group(name).engine for name in set(story.groups)}
        return [kinds[name] for name in story.groups]

    def limit(self, key: str) -> str:
        """Give a number of the engines in words: one, or from the least to the most."""
        values = [getattr(engine, key) for engine in self.engines]
        least, most = min(values), max(values)
        return f"{least}" if least == most else f"{least} to {most}"

    @cached_property
    def own_rules(self) -> bool:
        """Tell whether a scheduler boards by rules of its own, not by those of vLLM."""
        from simulator.schedulers.vllm.scheduler import Scheduler

        return issubclass(self._found, Scheduler) and self._found is not Scheduler

    @property
    def spare(self) -> float:
        """Give the share of free blocks from which on waiting is for the scheduler's policy."""
        from simulator.schedulers.static import Static

        if issubclass(self._found, Static):
            return 0.0
        return SPARE if self.own_rules else inf

    @cached_property
    def _found(self) -> type:
        from simulator.scenario.policy_table import find_policy

        return find_policy(self.result.scenario)[0]

    @cached_property
    def waits(self) -> dict[str, float]:
        """Give the share of the requests' time that they wait for each cause."""
        return {cause: area / self._area * self._waited for cause, area in self._blocked[0].items()}

    @cached_property
    def memory_time(self) -> float:
        """Give the share of the busy time in which requests wait for blocks."""
        busy = sum(float((log.steps["end"] - log.steps["start"]).sum()) for log in self.result.logs)
        return self._blocked[1] / busy if busy else 0.0

    @property
    def _waited(self) -> float:
        names = ("queue_time", "preempted_time", "decode_queue_time")
        return sum(self.time.get(name, 0.0) for name in names) / self.whole

    @property
    def _area(self) -> float:
        return sum(self._blocked[0].values()) or 1.0

    @cached_property
    def _blocked(self) -> tuple[dict[str, float], float]:
        areas, held = dict.fromkeys(CAUSES, 0.0), 0.0
        for log, engine in zip(self.result.logs, self.engines, strict=True):
            if not log.step_rows:
                continue
            more, time = blocked_time(log, engine, self.spare)
            areas = {cause: areas[cause] + more[cause] for cause in CAUSES}
            held += time
        return areas, held

    def ms(self, key: str) -> float:
        """Give a statistic of the summary in ms."""
        return float(self.summary[f"{key}_ms"])
