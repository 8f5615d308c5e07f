"""The scenario: everything that a run depends on, as one YAML file says it.

vLLM's spelling for every knob it has. What the file leaves out has the default written here; what
it says wrongly is refused, all mistakes at once, each with its line.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from simulator.build.engine_spec import EngineSpec, Role
from simulator.build.settle import settle
from simulator.cluster.cluster_config import ClusterConfig
from simulator.core.engine_config import EngineConfig, GpuConfig, HostConfig
from simulator.models.config_json import overlaid
from simulator.models.load import FineTune, load_model, shipped_name
from simulator.models.spec import ModelSpec
from simulator.scenario.engine_defaults import fill_in_defaults
from simulator.scenario.planning_config import PlanConfig, RolloutsConfig, SweepConfig
from simulator.scenario.workload_config import READ_OPTIONS, WorkloadConfig
from simulator.util.config import Config, FileName, PositiveFloat
from simulator.util.errors import FieldError, HeadwayError, MappingError, field_errors, split_key
from simulator.util.files import resolve
from simulator.util.from_mapping import Field, short_repr
from simulator.util.yaml_lines import SourceMap
from simulator.workload.distributions import TraceReader
from simulator.workload.unused import has_media, warn_of_images, warn_of_limits, warn_of_models
from simulator.workload.workload import Frontend, Workload

if TYPE_CHECKING:
    from numpy.random import Generator

    from simulator.build.assemble_fleet import FleetSpec
    from simulator.policies.predictor import Spec as PredictorSpec
else:
    PredictorSpec = Any  # to be imported where a scenario has one

CLASS = r"(client|priority|model) +\S.*"
"""Some of the requests, by name."""
TRACE_OPTION = "--set workload.columns="  # by which columns of a trace are given


def _model(value: object) -> object:
    """Let through a model's name, or that of a fine-tune with the model that it is like."""
    words = [value]
    if isinstance(value, dict) and value.keys() == {"like", "name"} and all(value.values()):
        words = [*value.values()]
    if not all(isinstance(word, str) for word in words):
        raise MappingError(
            "",
            "must be a model's name or path, or of a fine-tune {like: llama-3-8b, name: my-tune},"
            f" not {short_repr(value)}",
        )
    return value


def _predictor(value: object) -> object:
    """Read a length predictor; let a kind alone stand for the mapping."""
    if value is None:
        return None
    from simulator.policies.predictor import parse_predictor

    return parse_predictor({"kind": value} if isinstance(value, str) else value)


class Bounds(Config):
    """Bounds on the times of a request; null: not asked."""

    ttft: PositiveFloat | None = Field(None, description="longest time to first token, ms")
    tpot: PositiveFloat | None = Field(None, description="longest time per output token, ms")
    e2el: PositiveFloat | None = Field(None, description="longest time to last token, ms")

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, ms."""
        found = ((name, getattr(self, name)) for name in Bounds.model_fields)
        return {name: bound for name, bound in found if bound is not None}


class GoodputConfig(Bounds):
    """The service level that a request must meet to count as goodput; null: not asked.

    A key `client NAME`, `priority N` or `model NAME` has the bounds of these requests, in place of
    those of all; a request of several has those of the first.
    """

    _classes: Mapping[str, Bounds]

    @property
    def classes(self) -> Mapping[str, Bounds]:
        """The bounds of some requests alone, by the name of their class."""
        return self._classes

    def _read_others(self, values: dict[str, Any]) -> list[FieldError]:
        faults, found = list[FieldError](), dict[str, Bounds]()
        for key, value in values.items():
            try:
                if re.fullmatch(CLASS, key):
                    found[key] = Bounds.model_validate(value)
                else:
                    faults += super()._read_others({key: value})
            except ValueError as error:
                faults += field_errors((key,), error)
        self._classes = found
        return faults

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from super().__iter__()
        yield from self.classes.items()

    def of(self, client: str, priority: object, model: str) -> dict[str, float]:
        """Return the bounds of a request, ms."""
        own = {f"client {client}", f"priority {priority}", f"model {model}"}
        return next((it.bounds for name, it in self.classes.items() if name in own), self.bounds)


class Scenario(Config):
    """One run: a model on a GPU under a workload."""

    name: FileName = Field(
        "scenario", description="names the output folder; left out: the file's name"
    )
    description: str = Field("", description="a line for reports")
    model: Annotated[str | FineTune, _model] = Field(
        "llama-3-8b",
        description="a shipped model, or the path of a config.json or its folder; a fine-tune: "
        "{like: either, name: what the server loads}",
    )
    gpu: GpuConfig = GpuConfig()
    engine: EngineConfig = EngineConfig()
    host: HostConfig | None = Field(
        None,
        description="the server's CPU (`headway calibrate --from-requests` fits it); null: by "
        "`engine.version`",
    )
    cost: dict[str, Any] | None = Field(
        None,
        description="{profile: name or path}, or {kind: ...}; null: the shipped profile of this "
        "model and GPU, else roofline",
    )
    cluster: ClusterConfig | None = Field(
        None, description="several replicas behind a router; null: one engine"
    )
    predictor: Annotated[PredictorSpec | None, _predictor] = Field(
        None, description="{kind: ...}: predicts lengths of answers for policies; null: none"
    )
    workload: WorkloadConfig = WorkloadConfig()
    goodput: GoodputConfig = GoodputConfig()
    slo: list[str] = Field(
        [], description="service levels, as p99_ttft_ms<=1000; []: 99 % of requests keep `goodput`"
    )
    sweep: SweepConfig | None = Field(
        None, description="what `headway sweep` varies; other commands ignore it"
    )
    plan: PlanConfig = Field(
        PlanConfig(),
        description="what `headway plan` finds out; other commands take no notice of it",
    )
    rollouts: RolloutsConfig = Field(
        RolloutsConfig(),
        description="what `headway rollouts` simulates; other commands take no notice of it",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of all random numbers")
    _folder: Path = Path()
    _source_map: SourceMap = SourceMap("scenario", {})
    _specs: Mapping[str, EngineSpec] | None = None  # None: not settled yet
    _fleet: "FleetSpec | None" = None  # likewise
    _encodes_only: bool = False

    def _open(self, value: Any) -> Any:
        return fill_in_defaults(value) if isinstance(value, dict) else super()._open(value)

    @property
    def folder(self) -> Path:
        """Where relative paths are looked up first: the folder of the scenario's file."""
        return self._folder

    @property
    def encodes_only(self) -> bool:
        """Whether it is that of a replica that encodes images for others."""
        return self._encodes_only

    @property
    def known_model(self) -> str:
        """The model by whose shape is simulated: of a fine-tune the one that it is like."""
        return self.model.like if isinstance(self.model, FineTune) else self.model

    @property
    def loaded_model(self) -> ModelSpec:
        """That model with the engine's `hf_overrides`, and states in its dtype."""
        model = load_model(self.known_model, self.folder)
        return overlaid(model, self.engine.hf_overrides, self.engine.mamba_ssm_cache_dtype)

    @property
    def file(self) -> str:
        """The path of the scenario's file, as it was given."""
        return self._source_map.file

    @property
    def specs(self) -> Mapping[str, EngineSpec]:
        """What the engines of each group are; without a cluster the only one has no name.

        Settled once: where a scenario is loaded, or when a copy that was changed is asked first.
        """
        if self._specs is None:
            self.keep_specs({name: settle(own) for name, own in self.groups.items()})
            assert self._specs is not None
        return self._specs

    @property
    def fleet(self) -> "FleetSpec":
        """Where the requests of the cluster go; settled once, as the engines are."""
        if self._fleet is None:
            from simulator.build.assemble_fleet import (
                settle_fleet,
            )  # for nothing without a cluster

            assert self.cluster is not None
            self._fleet = settle_fleet(self, self.cluster, self.models)
            assert self._fleet is not None
        return self._fleet

    def keep_specs(self, specs: Mapping[str, EngineSpec], fleet: "FleetSpec | None" = None) -> None:
        """Keep what the engines of each group are by themselves, with what the cluster adds."""
        if (cluster := self.cluster) is not None:
            retries = cluster.client is not None and cluster.client.max_retries > 0
            roles: dict[str, Role] = dict.fromkeys(cluster.encoders, "ec_producer")
            specs = {
                name: replace(specs[name], role=group.kv_role or roles.get(name), retries=retries)
                for name, group in cluster.replica_groups.items()
            }
        self._specs, self._fleet = specs, fleet or self._fleet

    def model_copy(self, *, update: Mapping[str, Any]) -> "Scenario":
        """Return a copy with other values, whose engines have to be settled anew."""
        copy = super().model_copy(update=update)
        copy._specs = copy._fleet = None
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Leave the specs out, which may have the user's own code: a worker settles them itself."""
        return {**self.__dict__, "_specs": None, "_fleet": None}

    def of_group(self, name: str) -> "Scenario":
        """Return the scenario of one replica of a group of the cluster."""
        if self.cluster is None:
            return self
        group = self.cluster.replica_groups[name]
        changed = {
            "model": group.model or self.model,
            "gpu": group.gpu or self.gpu,
            "engine": group.engine or self.engine,
            "cost": group.cost or (None if group.gpu or group.model else self.cost),
            "host": group.host or (None if group.gpu else self.host),
            "cluster": None,
        }
        if encodes := name in self.cluster.encoders:  # as vLLM of an ec_producer
            off = {"enable_prefix_caching": False, "async_scheduling": False}
            engine = group.engine or self.engine
            changed |= {"cost": None, "engine": engine.model_copy(update=off)}
        own = self.model_copy(update=changed)
        own._encodes_only = encodes
        if self._specs is not None:
            own.keep_specs({"": self._specs[name]})
        return own

    @property
    def servers(self) -> ClusterConfig:
        """The cluster; one server is a cluster of one."""
        return self.cluster or ClusterConfig()

    @property
    def groups(self) -> dict[str, "Scenario"]:
        """Each group's name and the scenario of one of its replicas.

        Without a cluster the scenario is the only one, without a name.
        """
        names = [""] if self.cluster is None else self.cluster.replica_groups
        return {name: self.of_group(name) for name in names}

    def says(self, key: str) -> bool:
        """Say whether its file, or what was put over it, has a key."""
        return self._source_map.says(tuple(key.split(".")))

    def place(self, key: str) -> str:
        """Return where the value of a key comes from, as messages say it."""
        return self._source_map.location(tuple(key.split(".")))

    def with_source(self, folder: Path, source_map: SourceMap) -> "Scenario":
        """Return the same scenario, which knows its file."""
        scenario = self.model_copy(update={})
        scenario._folder, scenario._source_map = folder, source_map
        return scenario

    def error_at(self, block: str, error: ValueError) -> HeadwayError:
        """Say with file and line what an error about the value at a dotted key blames."""
        return self._errors(field_errors(split_key(block), error))

    def _errors(self, errors: Iterable[FieldError]) -> HeadwayError:
        return HeadwayError(map(self._source_map.message, errors))

    def make_workload(self) -> Workload:
        """Read the trace or generate the requests; HeadwayError names what is wrong."""
        workload = self._requests()
        workload.frontend = self.frontend()
        self.settle_models(workload)
        for own in self.groups.values():
            warn_of_limits(workload, own.engine)
        return workload

    @property
    def models(self) -> list[str]:
        """The model that each group serves, by the name that requests ask for; [] if it is one."""
        groups = {} if self.cluster is None else self.cluster.groups
        names = [group.model or str(self.model) for group in groups.values()]
        return names if len(set(names)) > 1 else []

    def settle_models(self, workload: Workload) -> None:
        """Let requests for an engine's own model ask for no adapter; none where there are none."""
        if served := self.models:
            asked = workload.model or [""]
            if unknown := [name for name in asked if name not in served]:
                what = f"a request asks for {unknown[0] or 'no model'}"
                wrong = f"{what}; the groups serve {', '.join(dict.fromkeys(served))}"
                raise self._errors([(("workload", "models"), wrong)])
            return
        self._given("models", True, "needs cluster.groups of different models")
        if workload.model is None:
            return
        if any(own.engine.enable_lora for own in self.groups.values()):
            own = {self.known_model, getattr(self.model, "name", self.model), "base"}
            if shipped := shipped_name(self.known_model):
                own |= {name for name in {*workload.model} if shipped_name(name) == shipped}
            workload.model = ["" if name in own else name for name in workload.model]
            drawn = self.workload.generator.adapters or self.workload.generator.models
            if self.workload.trace is not None and drawn is None:
                from simulator.workload.unused import warn_of_adapters

                warn_of_adapters(workload.source, workload.model, self.known_model)
        else:
            self._given("adapters", True, "needs engine.enable_lora: true")
            warn_of_models(workload.source, workload.model)
            workload.model = None

    def frontend(self) -> Frontend | None:
        """Return what requests pass before the scheduler."""
        if self.workload.frontend is not None:
            return self.workload.frontend.make()
        latency = self.workload.client_latency
        return Frontend(latency=latency) if latency else None

    def reader(self) -> TraceReader:
        """Return what reads the traces that the workload names."""

        def load(path: str, form: str | None, **options: Any) -> Workload:
            from simulator.workload.traces import read_trace  # many formats, for nothing elsewhere

            place = resolve(path, self.folder)
            return read_trace(place, form, **options, option=TRACE_OPTION)

        return load

    def _requests(self) -> Workload:
        load, trace = self.reader(), self.workload.trace
        if trace is None:
            from simulator.workload.generate import generate

            with self._blaming("workload"):
                return generate(self.workload.generator, self.seed, load)
        from simulator.workload.generate import random_streams
        from simulator.workload.select import select

        part = dict(trace)
        path, form = part.pop("path"), part.pop("format")
        reading = {key: part.pop(key) for key in READ_OPTIONS} | {"columns": self.workload.columns}
        workload = select(load(path, form, **reading), **part)
        workload.max_concurrency = self.workload.max_concurrency
        rng = random_streams(self.seed)
        self._draw_clients(workload, rng["clients"])
        self._draw_max_tokens(workload, load, rng["max_tokens"])
        self._draw_adapters(workload, rng["models"])
        self._draw_multimodal(workload, load, rng["multimodal"])
        return workload

    def trace_pieces(self) -> Callable[[], Iterator[Workload]] | None:
        """Return what reads the trace a piece at a time; None where it is to be read whole."""
        trace = self.workload.trace
        if trace is None or self.workload.generator.multimodal is not None:
            return None
        from simulator.workload.select import select_pieces
        from simulator.workload.traces.read import comes_in_pieces, read_pieces

        part = dict(trace)
        place, form = resolve(part.pop("path"), self.folder), part.pop("format")
        reading = {key: part.pop(key) for key in READ_OPTIONS} | {"columns": self.workload.columns}
        what = place, form, {k: v for k, v in reading.items() if v is not None}, TRACE_OPTION
        if not comes_in_pieces(*what):
            return None
        return lambda: select_pieces(lambda: read_pieces(*what), **part)

    def finish_parts(self, parts: Iterator[Workload]) -> Iterator[Workload]:
        """Yield the parts of a trace with what `make_workload` adds to the whole."""
        from simulator.workload.generate import random_streams

        rng, frontend = random_streams(self.seed), self.frontend()
        for part in parts:
            part.max_concurrency, part.frontend = self.workload.max_concurrency, frontend
            self._draw_clients(part, rng["clients"])
            self._draw_max_tokens(part, self.reader(), rng["max_tokens"])
            yield part

    def _given(self, key: str, refused: bool = False, wrong: str = "") -> Any:
        """Return what `workload` has under a key, or None; HeadwayError where that is refused."""
        value = getattr(self.workload.generator, key)
        if value is not None and refused:
            raise self._errors([(("workload", key), wrong)])
        return value

    @contextmanager
    def _blaming(self, *key: str) -> Iterator[None]:
        """Say of what is wrong with values that are drawn where the block at a key is."""
        try:
            yield
        except HeadwayError:
            raise
        except ValueError as error:
            raise self._errors(field_errors(key, error)) from None

    def _draw_clients(self, workload: Workload, rng: "Generator") -> None:
        """Name the clients of a trace that names none; HeadwayError if it does."""
        wrong = "the trace names the client of each request itself"
        clients = self._given("clients", workload.client is not None, wrong)
        if clients is None:
            return
        from simulator.workload.generate import draw_clients

        draw_clients(workload, workload.sessions(), clients, self._given("priorities"), rng)

    def _draw_adapters(self, workload: Workload, rng: "Generator") -> None:
        """Draw the adapters that requests of a trace ask for; HeadwayError if it names them."""
        key = "models" if self._given("models") is not None else "adapters"
        wrong = "the trace names the model of each request itself"
        given = self._given(key, workload.model is not None, wrong)
        if given is None:
            return
        from simulator.workload.generate import draw_names

        weights = getattr(given, "weights", given)
        workload.model = draw_names(workload.sessions(), weights, rng)

    def _draw_multimodal(self, workload: Workload, load: TraceReader, rng: "Generator") -> None:
        """Draw the images and clips of a trace's prompts; its tokens are those of the texts."""
        told = "the trace tells the images of each request itself"
        self._given("multimodal", has_media(workload), told)
        wrong = "needs a trace whose requests do not continue one another"
        given = self._given("multimodal", workload.after is not None, wrong)
        if given is None:
            warn_of_images(workload.source, workload.images)
            return
        from simulator.workload.multimodal import MultimodalDraws, insert

        draws = MultimodalDraws(given, rng, load)
        with self._blaming("workload", "multimodal"):
            media, more = draws.draw(0, len(workload), workload.images)
        insert(workload, media, more)

    def _draw_max_tokens(self, workload: Workload, load: TraceReader, rng: "Generator") -> None:
        """Say how long the answers of a trace may be that does not; HeadwayError if it does."""
        wrong = "the trace says the max_tokens of its requests itself"
        given = self._given("max_tokens", workload.max_tokens is not None, wrong)
        if given is None:
            return
        from simulator.workload.generate import draw_max_tokens

        with self._blaming("workload"):
            workload.max_tokens = draw_max_tokens(given, len(workload), rng, load)

    def resolved(self) -> dict[str, Any]:
        """Return the scenario with every default filled in, as plain YAML types."""
        values = self.model_dump(exclude={"sweep", "plan", "rollouts"})
        if (cluster := self.cluster) is not None and cluster.is_shared_out:
            for name in cluster.groups:
                del values["cluster"]["groups"][name]["replicas"]  # another key says it
        if self.workload.trace is None:
            frontend = {"frontend": values["workload"]["frontend"]}
            if latency := self.workload.client_latency:
                frontend["client_latency"] = latency
            values["workload"] = self.workload.generator_keys() | frontend
        return values
