"""What `run` returns: the record of a run, its summary and its tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from simulator.results.record import Record

if TYPE_CHECKING:
    import pandas as pd


SHOWN = {
    "request_throughput": ("requests/s", "{:,.2f}"),
    "output_throughput": ("output tokens/s", "{:,.1f}"),
    "mean_ttft_ms": ("mean TTFT, ms", "{:,.1f}"),
    "p99_ttft_ms": ("P99 TTFT, ms", "{:,.1f}"),
    "mean_tpot_ms": ("mean TPOT, ms", "{:,.2f}"),
    "p99_tpot_ms": ("P99 TPOT, ms", "{:,.2f}"),
    "mean_e2el_ms": ("mean E2EL, ms", "{:,.1f}"),
    "p99_e2el_ms": ("P99 E2EL, ms", "{:,.1f}"),
}
"""What a notebook shows of a run: key of the summary, its name, its form."""


@dataclass(slots=True, repr=False, eq=False)
class Result(Record):
    """What happened: the facts, and the tables and metrics derived from them."""

    _summary: dict[str, Any] | None = None

    def whole(self) -> Self:
        """Return it; KeyboardInterrupt where it was broken off, as half of a run is no answer."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self

    def summary(self) -> dict[str, Any]:
        """Metrics under the names of `vllm bench serve`, and a block `headway` of our own."""
        from simulator.diagnosis.rules import diagnose
        from simulator.results.metrics import summarize_record

        if self._summary is None:
            summary: dict[str, Any] = summarize_record(self)
            summary["headway"]["diagnosis"] = diagnose(self, summary)
            self._summary = summary
        return self._summary

    def __repr__(self) -> str:
        """Tell what it is of and its main figures in a line; `summary()` has the rest."""
        summary, shown = self.summary(), ("request_throughput", "mean_ttft_ms")
        known = [key for key in shown if summary.get(key) is not None]
        figures = [f"; {SHOWN[key][0]} {SHOWN[key][1].format(summary[key])}" for key in known]
        return f"<Result of {self._title()}{''.join(figures)}>"

    def _repr_html_(self) -> str:
        """Show the most important figures as a table, for notebooks."""
        from html import escape

        summary = self.summary()
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th><td>{form.format(summary[key])}</td></tr>"
            for key, (name, form) in SHOWN.items()
            if summary.get(key) is not None
        )
        return f"<table><caption>{escape(self._title())}</caption>{rows}</table>"

    def _title(self) -> str:
        summary = self.summary()
        name = self.scenario.name or "a scenario"
        cut = ", interrupted" if self.interrupted else ""
        return f"{name}: {summary['completed']:,} requests in {summary['duration']:,.1f} s{cut}"

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
