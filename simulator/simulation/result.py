"""What `run` returns: the record of a run, its summary and its tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.results.record import Record

if TYPE_CHECKING:
    import pandas as pd


@dataclass(slots=True)
class Result(Record):
    """What happened: the facts, and the tables and metrics derived from them."""

    _summary: dict[str, Any] | None = None

    def summary(self) -> dict[str, Any]:
        """Metrics under the names of `vllm bench serve`, and a block `headway` of our own."""
        from simulator.diagnosis.rules import diagnose
        from simulator.results.metrics import summarize_record

        if self._summary is None:
            summary: dict[str, Any] = summarize_record(self)
            summary["headway"]["diagnosis"] = diagnose(self, summary)
            self._summary = summary
        return self._summary

    @property
    def requests(self) -> "pd.DataFrame":
        """One row per request that was sent, with the columns of requests.csv."""
        from simulator.results.frames import request_frame

        return request_frame(self)

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per step, or per stretch of `steps` equal ones, with the columns of steps.csv."""
        from simulator.results.frames import step_frame

        return step_frame(self)
