"""The studio's worker: a process that simulates what the page asks for, coarse first, then full.

What is asked for last counts: a run that nobody waits for any more ends within a few events.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from math import isnan
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np

from headway.figures.data import Run
from headway.report.html.charts import distributions, over_time
from headway.report.html.page import page
from headway.report.metric_rows import metric_value
from headway.studio.knobs import KEYS, own_sizes
from headway.traffic.describe import describe
from simulator.diagnosis.feasibility import obstacles
from simulator.diagnosis.levels import BROKEN
from simulator.diagnosis.rules import NOTHING, told_findings
from simulator.results.steady_state import trend_warning
from simulator.scenario.draw import make_workload
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import engine_specs
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, one_line
from simulator.util.yaml_lines import dump_yaml

BUTTONS = 3  # of a finding, at most: each turns one knob
COARSE = 10  # a first look is at a tenth of the requests
FEW = 500  # requests, of which there is no first look
FIRST = 2000  # requests of a first look at most
MOST_REQUESTS = 200_000  # of a run on the page
BINS = 240  # of time
LEVELS = ("arrivals", "prompts", "running", "waiting", "kv", "tokens")
FIGURES = (
    "output_throughput",
    "request_throughput",
    "slo_attainment",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "gpu_busy_fraction",
    "kv_cache_usage_mean",
    "preemptions",
    "dollars_per_million_output_tokens",
)


Kind = Literal["run", "page"]


@dataclass(frozen=True, slots=True)
class Job:
    """A run that the page asks for, or a page of the run to take away."""

    ticket: int
    scenario: str
    overrides: tuple[str, ...]
    kind: Kind = "run"
    trace: str = ""  # the name that an uploaded trace has where it comes from; "": none is


class Superseded(Exception):  # noqa: N818  # no error: another job is wanted
    """Somebody wants another job."""


class Worker:
    """The process, as the server sees it."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._wanted = context.Value("q", 0)
        self.pipe, far = context.Pipe()
        self._process = context.Process(target=_work, args=(far, self._wanted), daemon=True)
        self._process.start()
        far.close()

    def submit(self, job: Job) -> None:
        """Ask for a job, in place of any that is under way."""
        self._wanted.value = job.ticket
        self.pipe.send(asdict(job))

    def cancel(self) -> None:
        """Want no job."""
        self._wanted.value = 0

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(5)
        self.pipe.close()


def _work(pipe: Connection, wanted: Any) -> None:
    """Do jobs until the parent is gone."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    warnings.simplefilter("ignore")
    while True:
        try:
            job = Job(**pipe.recv())
        except (EOFError, OSError):
            return
        try:
            if wanted.value != job.ticket:
                raise Superseded
            for answer in answers(job, partial(_stale, wanted, job.ticket)):
                pipe.send({"ticket": job.ticket} | answer)
        except Superseded:
            pipe.send({"ticket": job.ticket, "cancelled": True, "last": True})
        except HeadwayError as error:
            pipe.send({"ticket": job.ticket, "errors": error.messages, "last": True})
        except Exception as error:  # a fault of ours: the page says so, the worker goes on
            text = f"{type(error).__name__}: {one_line(error)}"
            pipe.send({"ticket": job.ticket, "errors": [text], "last": True})


def _stale(wanted: Any, ticket: int) -> bool:
    return bool(wanted.value != ticket)


def answers(job: Job, stale: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield what is known: of a tenth of the requests, 2,000 at most, then of all.

    Raises Superseded where `stale()` says that nobody wants it any more.
    """
    scenario = load_scenario(job.scenario, list(job.overrides), own_code=False)
    load = make_workload(scenario)
    if len(load) > MOST_REQUESTS:
        text = f"{len(load):,} requests are more than {MOST_REQUESTS:,}, which the studio takes"
        raise HeadwayError(text)
    told = [str(one) for one in obstacles(scenario, load)]
    told += [note for spec in engine_specs(scenario).values() for note in spec.notes]
    traffic = describe(load, "")
    whole = len(load)
    coarse = [] if whole <= FEW or job.kind == "page" else [min(whole // COARSE, FIRST)]
    for count in (*coarse, whole):
        if stale():
            raise Superseded
        part = load if count == whole else load.rows(np.arange(count))
        result = run(scenario, workload=part, stop=lambda _sent, _logs: stale())
        if result.interrupted or stale():
            raise Superseded
        shown = Run.of(scenario.name, result)
        if job.kind == "page":
            yield {"page": page([shown]), "last": True}
            return
        found = view(scenario, shown, job.trace)
        advice = [one for one in found["advice"] if not told or one["text"] != NOTHING]
        found["advice"] = [{"text": text} for text in told] + advice
        last = count == whole
        yield found | {"traffic": traffic, "coarse": not last, "last": last}


def _findings(own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what stands out, with its knob in words and what of it this page turns, each alone."""
    names = {key: name for name, key in KEYS.items()}
    known = {one["text"]: one for one in own.get("diagnosis") or ()}
    for text, knob in told_findings(own):
        found = known.get(text, {})
        offers = (one for one in found.get("advice", ()) if knob and one["key"] in names)
        turn = {names[one["key"]]: one["to"] for one in islice(offers, BUTTONS)}
        more = {"plan": text.startswith(BROKEN), "rule": found.get("rule")}
        yield {"text": text, "knob": knob, "turn": turn} | more


def view(scenario: Scenario, found: Run, trace: str) -> dict[str, Any]:
    """Get what the page shows of a run; `trace` is what an uploaded one is called, if there is."""

    summary, resolved = found.summary, scenario.resolved()
    if trace:
        resolved["workload"]["trace"]["path"] = trace
        del resolved["description"]  # of another workload
    figures = {key: metric_value(summary, key) for key in FIGURES}
    edges = np.linspace(0.0, found.end or 1.0, BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    levels = over_time(found, edges)
    requests = found.requests
    for name, weights in (("arrivals", None), ("prompts", requests["prompt_tokens"])):
        counts, _ = np.histogram(requests["arrival"], edges, weights=weights)
        levels[name] = (counts / np.diff(edges)).tolist()
    own = summary["headway"]
    bounds = {name: own.get(f"slo_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    grows = [{"text": text, "plan": True} for text in filter(None, [trend_warning(own)])]
    advice = [*grows, *_findings(own)] or [{"text": NOTHING}]
    return {
        "requests": len(found.requests),
        "figures": {
            k: v for k, v in figures.items() if isinstance(v, int | float) and not isnan(v)
        },
        "parts": {one["bound"]: one["value"] for one in own.get("slo") or ()},
        "cdf": {name: distributions([found], name) for name in ("ttft", "tpot", "e2el")},
        "time": [float(f"{value:.6g}") for value in middle],
        "levels": {name: levels[name] for name in LEVELS},
        "bounds": {name: value for name, value in bounds.items() if value is not None},
        "advice": advice + [{"text": str(text)} for text in own.get("warnings") or []],
        "sizes": own_sizes(scenario),
        "yaml": dump_yaml(resolved),
    }
