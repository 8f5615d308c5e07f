"""The scenario: everything that a run depends on, as one YAML file says it.

vLLM's spelling for every knob it has. What the file leaves out has the default written here; what
it says wrongly is refused, all mistakes at once, each with its line.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from simulator.cluster.cluster_config import ClusterConfig
from simulator.core.engine_config import EngineConfig, GpuConfig, HostConfig
from simulator.models.load import FineTune
from simulator.scenario.engine_defaults import fill_in_defaults
from simulator.scenario.planning_config import PlanConfig, RolloutsConfig, SweepConfig
from simulator.scenario.workload_config import WorkloadConfig
from simulator.util.config import Config, FileName, PositiveFloat
from simulator.util.errors import FieldError, HeadwayError, MappingError, field_errors, split_key
from simulator.util.from_mapping import Field, short_repr
from simulator.util.yaml_lines import Block, SourceMap

if TYPE_CHECKING:
    from simulator.build.assemble_fleet import FleetSpec
    from simulator.build.engine_spec import EngineSpec, Role
    from simulator.policies.predictor import Spec as PredictorSpec
else:
    PredictorSpec = Any  # to be imported where a scenario has one

CLASS = r"(client|priority|model) +\S.*"
"""Some of the requests, by name."""


def _model(value: object) -> object:
    """Let through a model's name, or that of a fine-tune with the model that it is like."""
    words = [value]
    if isinstance(value, dict) and value.keys() == {"like", "name"} and all(value.values()):
        words = [*value.values()]
    if not all(isinstance(word, str) for word in words):
        what = "must be a model's name or path, or of a fine-tune {like: llama-3-8b, name: my-tune}"
        raise MappingError("", f"{what}, not {short_repr(value)}", "value")
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

    def _read_others(self, values: Block) -> list[FieldError]:
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
    cost: Block | None = Field(
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
    _specs: "Mapping[str, EngineSpec] | None" = None  # of `resolve.py`; None: not settled yet
    _fleet: "FleetSpec | None" = None  # likewise
    _role: "Role | None" = None
    _retries: bool = False

    def _open(self, value: Any) -> Any:
        return fill_in_defaults(value) if isinstance(value, dict) else super()._open(value)

    @property
    def folder(self) -> Path:
        """Where relative paths are looked up first: the folder of the scenario's file."""
        return self._folder

    @property
    def role(self) -> "Role | None":
        """What a replica of its group does for those of others; None: nothing."""
        return self._role

    @property
    def retries(self) -> bool:
        """Whether clients may send a request again."""
        client = self.cluster and self.cluster.client
        return self._retries or bool(client and client.max_retries)

    @property
    def known_model(self) -> str:
        """The model by whose shape is simulated: of a fine-tune the one that it is like."""
        return self.model.like if isinstance(self.model, FineTune) else self.model

    @property
    def file(self) -> str:
        """The path of the scenario's file, as it was given."""
        return self._source_map.file

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
        encodes = name in self.cluster.encoders
        if encodes:  # as vLLM of an ec_producer
            off = {"enable_prefix_caching": False, "async_scheduling": False}
            engine = group.engine or self.engine
            changed |= {"cost": None, "engine": engine.model_copy(update=off)}
        own = self.model_copy(update=changed)
        own._role = "ec_producer" if encodes else group.kv_role
        own._retries = self.retries
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
        faults = field_errors(split_key(block), error)
        return HeadwayError(map(self._source_map.message, faults), faults)

    @property
    def models(self) -> list[str]:
        """The model that each group serves, by the name that requests ask for; [] if it is one."""
        groups = {} if self.cluster is None else self.cluster.groups
        names = [group.model or str(self.model) for group in groups.values()]
        return names if len(set(names)) > 1 else []

    def resolved(self) -> Block:
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
