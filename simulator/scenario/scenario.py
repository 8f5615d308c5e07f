"""The scenario: everything that a run depends on, as one YAML file says it.

vLLM's spelling for every knob it has. What the file leaves out has the default written here; what
it says wrongly is refused, all mistakes at once, each with its line.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from simulator.scenario.cluster_config import ClusterConfig, GroupConfig, fill_in
from simulator.scenario.engine_config import INT32, Count, EngineConfig, GpuConfig
from simulator.scenario.engines import named
from simulator.scenario.frontend_config import FrontendConfig
from simulator.scenario.plan_config import PlanConfig
from simulator.scenario.sweep_config import SweepConfig
from simulator.util.config import Config
from simulator.util.errors import HeadwayError
from simulator.util.files import resolve
from simulator.util.yaml_lines import Places, faults

if TYPE_CHECKING:
    from simulator.workload.generate import Generator
    from simulator.workload.lengths import Load
    from simulator.workload.workload import Frontend, Workload

READING = {"time_unit", "hash_block_size", "session_turns", "chars_per_token"}
"""Keys of a trace that say how to read it; the others say which part to take."""

Milliseconds = Annotated[float, Field(gt=0)]


def _predictor(value: object) -> object:
    """Check a length predictor; let a kind alone stand for the mapping."""
    from simulator.policies.predictor import parse_predictor

    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, dict):
        parse_predictor(value)
    return value


class GoodputConfig(Config):
    """The service level that a request must meet to count as goodput; null: not asked."""

    ttft: Milliseconds | None = Field(None, description="time to first token, ms, at most")
    tpot: Milliseconds | None = Field(None, description="time per output token, ms, at most")
    e2el: Milliseconds | None = Field(None, description="time to last token, ms, at most")


class TraceConfig(Config):
    """A published trace, and the part of it to play."""

    path: str = Field(description="the file, plain or packed by gzip")
    format: (
        Literal[
            "azure", "burstgpt", "lengths", "mooncake", "timed_trace", "custom", "llmservingsim"
        ]
        | None
    ) = Field(None, description="null: as its first line tells")
    start_s: Annotated[float, Field(ge=0)] | None = Field(
        None, description="leave out what arrives before, s"
    )
    end_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="leave out what arrives from then on, s"
    )
    skip: Annotated[int, Field(ge=0, le=INT32)] = Field(
        0, description="first requests to leave out"
    )
    limit: Count | None = Field(None, description="requests, at most")
    rate_scale: Annotated[float, Field(gt=0)] = Field(
        1.0, description="2: requests come twice as fast"
    )
    repeat: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        1, description="times to play it, end to end"
    )
    max_input_len: Count | None = Field(None, description="leave out longer prompts, tokens")
    max_output_len: Count | None = Field(None, description="leave out longer answers, tokens")
    time_unit: Literal["s", "ms"] | None = Field(
        None, description="of the timestamps of mooncake (null: ms) and timed_trace (null: s)"
    )
    hash_block_size: Count | None = Field(
        None, description="tokens that a hash id stands for; null: 512, timed_trace: 16"
    )
    session_turns: Literal["delta", "whole"] | None = Field(
        None, description="a later turn tells what it adds (null: delta) or its whole prompt"
    )
    chars_per_token: Annotated[float, Field(gt=0)] | None = Field(
        None, description="to estimate the lengths of the prompts of custom"
    )

    @model_validator(mode="after")
    def _check_window(self) -> "TraceConfig":
        if self.end_s is not None and self.end_s <= (self.start_s or 0):
            raise ValueError(f"end_s: must be more than start_s ({self.start_s or 0})")
        return self


class WorkloadConfig(Config):
    """A trace, or else the keys of a generator (`simulator.workload.generate.Generator`)."""

    model_config = ConfigDict(extra="allow")
    trace: TraceConfig | None = Field(None, description="a trace to play; null: generate")
    max_concurrency: Count | None = Field(
        None, description="requests sent and unfinished, at most; null: no limit"
    )
    client_latency: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="s between a client and the scheduler, the way back included"
    )
    frontend: FrontendConfig | None = Field(
        None,
        description="in place of it: client, server (vLLM's, as timed by its clients or by itself) "
        "or a mapping; null: requests reach the scheduler as they are sent",
    )

    @model_validator(mode="after")
    def _check_generator(self) -> "WorkloadConfig":
        if self.frontend is not None and self.client_latency:
            raise ValueError("client_latency: give it as frontend.latency, in ms")
        given = self.model_extra or {}
        if self.trace is None:
            self.generator  # noqa: B018
        elif given:
            known = [*type(self).model_fields]
            raise ValueError(
                "\n".join(
                    f"{key}: goes with a generator; beside trace there is {', '.join(known[1:])}"
                    for key in given
                )
            )
        return self

    @property
    def generator(self) -> "Generator":
        """Give the generator that the keys describe."""
        from simulator.util.from_mapping import build
        from simulator.workload.generate import Generator

        return build(
            Generator, (self.model_extra or {}) | {"max_concurrency": self.max_concurrency}
        )


class Scenario(Config):
    """One run: a model on a GPU under a workload."""

    name: Annotated[str, Field(pattern=r"^\w[\w .,+=-]*$", max_length=100)] = Field(
        "scenario", description="names the output folder; default: the file's name"
    )
    description: str = Field("", description="a line for reports")
    model: str = Field(
        "llama-3-8b", description="a shipped config.json by name, or the path of one or its folder"
    )
    gpu: GpuConfig = GpuConfig()
    engine: EngineConfig = EngineConfig()
    cost: dict[str, Any] | None = Field(
        None,
        description="{profile: name or path}, or {kind: linear, roofline or piecewise, ...}; "
        "null: the shipped profile of this model and GPU, else roofline",
    )
    cluster: ClusterConfig | None = Field(
        None, description="several replicas behind a router, see fleet.md; null: one engine"
    )
    predictor: Annotated[dict[str, Any], BeforeValidator(_predictor)] | None = Field(
        None,
        description="{kind: oracle, noisy, bucketed or percentile, ...}: predicts the lengths of "
        "answers for the policies that want them, see below; null: nobody does",
    )
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    goodput: GoodputConfig = GoodputConfig()
    sweep: SweepConfig | None = Field(
        None, description="what `headway sweep` varies; other commands take no notice of it"
    )
    plan: PlanConfig = Field(
        default_factory=PlanConfig,
        description="what `headway plan` finds out; other commands take no notice of it",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of all random numbers")
    _folder: Path = PrivateAttr(default=Path())
    _places: Places | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            raw = fill_in(raw)
        if isinstance(raw, dict) and "engine" in raw:
            return raw | {"engine": named(raw["engine"], raw.get("gpu"), raw.get("model"))}
        return raw

    @property
    def folder(self) -> Path:
        """Where relative paths are looked up first: the folder of the scenario's file."""
        return self._folder

    def of_group(self, name: str) -> "Scenario":
        """Give the scenario of one replica of a group of the cluster."""
        group = self.cluster.kinds[name] if self.cluster is not None else GroupConfig()
        own = {
            "gpu": group.gpu or self.gpu,
            "engine": group.engine or self.engine,
            "cost": group.cost or (None if group.gpu else self.cost),
            "cluster": None,
        }
        return self.model_copy(update=own)

    def came_from(self, folder: Path, places: Places) -> "Scenario":
        """Give the same scenario, which knows its file."""
        scenario = self.model_copy()
        scenario._folder, scenario._places = folder, places
        return scenario

    def make_workload(self) -> "Workload":
        """Read the trace or generate the requests; HeadwayError names what is wrong."""
        workload = self._requests()
        workload.frontend = self.frontend()
        return workload

    def frontend(self) -> "Frontend | None":
        """Give what requests pass before the scheduler."""
        from simulator.workload.workload import Frontend

        if self.workload.frontend is not None:
            return self.workload.frontend.make()
        latency = self.workload.client_latency
        return Frontend(latency=latency) if latency else None

    def reader(self) -> "Load":
        """Give what reads the traces that the workload names."""
        from simulator.workload.traces import read_trace

        def load(path: str, form: str | None, **options: Any) -> "Workload":
            return read_trace(resolve(path, self.folder), form, **options)

        return load

    def _requests(self) -> "Workload":
        from simulator.workload.generate import generate
        from simulator.workload.select import select

        load, trace = self.reader(), self.workload.trace
        if trace is None:
            try:
                return generate(self.workload.generator, self.seed, load)
            except ValueError as error:
                places = self._places or Places("scenario", {})
                raise HeadwayError(map(places.tell, faults(("workload",), error))) from None
        reading = trace.model_dump(include={*READING})
        part = trace.model_dump(exclude={"path", "format", *READING})
        workload = select(load(trace.path, trace.format, **reading), **part)
        workload.max_concurrency = self.workload.max_concurrency
        return workload

    def resolved(self) -> dict[str, Any]:
        """Give the scenario with every default filled in, as plain YAML types."""
        values = self.model_dump(exclude={"sweep", "plan"})
        if self.workload.trace is None:
            frontend = {"frontend": values["workload"]["frontend"]}
            if latency := self.workload.client_latency:
                frontend["client_latency"] = latency
            values["workload"] = asdict(self.workload.generator) | frontend
        return values
