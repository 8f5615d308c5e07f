"""The coefficients of the form that `piecewise.py` sums, and what an engine changes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Self

from simulator.costs.cost_model import HostWork
from simulator.costs.linear import COPY_TERMS, Fitted, Term, check_terms
from simulator.costs.tables import Table, check_graphs, check_intervals, check_sizes, check_table
from simulator.util.from_mapping import raise_if

MIXED_TERMS = (
    "prefill",
    "prefill_per_pair",
    "prefill_per_token",
    "mixed_per_context",
    "mixed_per_sequence",
    "serial_per_token",
)
"""Those of every step with prompts, beside the tables, in the order of `execute`."""
TERMS = (
    "overhead",
    "head",
    "head_per_sequence",
    "decode",
    "decode_per_context",
    "decode_per_sequence",
    *MIXED_TERMS,
)
CHUNK_TERMS = ("prefill_per_key", "prefill_per_sequence")
WINDOW_TERMS = ("decode_per_window", "mixed_per_window", "prefill_per_window_pair")
ADDED_TERMS = ("host", "host_per_sequence", "host_per_prefill", "host_per_prefill_token")
"""Of the host's work, where nothing hides it."""
HOST_TERMS = (*ADDED_TERMS, "stream_per_sequence")


@dataclass(frozen=True)
class PiecewiseTerms(Fitted):
    """All coefficients in seconds, for all layers together."""

    dense: Table
    overhead: Term = 0.0
    overhead_per_sequence: Term = 0.0
    head: Term = 0.0
    head_per_sequence: Term = 0.0  # per sequence
    decode: Term = 0.0
    decode_per_context: Term = 0.0  # c, per cached token
    decode_per_sequence: Term = 0.0  # e
    decode_least: Term = 0.0  # m
    state_per_sequence: Term = 0.0
    prefill: Term = 0.0
    prefill_per_pair: Term = 0.0  # d
    prefill_per_token: Term = 0.0  # f
    mixed_per_context: Term = 0.0  # c'
    mixed_per_sequence: Term = 0.0  # e'
    mixed_least: Term = 0.0  # least of c' S beside prompts, where there are decodes
    serial_per_token: Term = 0.0  # r, per token of the longest sequence
    prefill_per_key: Term = 0.0  # k, per token that a chunk's queries can see, its own included
    prefill_per_sequence: Term = 0.0  # g, per chunk
    window: Annotated[int, "tokens of sliding windows, w; 0: no layer has one"] = 0
    decode_per_window: Term = 0.0  # per token that their decodes read
    mixed_per_window: Term = 0.0
    prefill_per_window_pair: Term = 0.0
    cudagraph_capture_sizes: Annotated[Sequence[int], "batches of decodes that have a graph"] = ()
    graph_dense: Table = ()  # dense and head of those graphs; none: as of other steps
    graph_mixed: Table = ()  # dense and prefill of steps with prompts in graphs, by size in tokens
    launch: Term = 0.0  # least seconds of the kernels of a step without a graph
    host: Term = 0.0  # h, the host's work
    host_per_sequence: Term = 0.0  # h_n
    host_per_prefill: Term = 0.0  # h_p, per chunk
    host_per_prefill_token: Term = 0.0  # h_t
    stream_per_sequence: Term = 0.0  # of the API server, beside the host's other work
    host_interval: Sequence[float] = ()  # 95 % interval of `host`; (): none is known
    step_interval: Sequence[float] = ()  # likewise of `step`
    stream_interval: Sequence[float] = ()  # and of `stream_per_sequence`
    overlapped: bool = False  # the host's work is hidden behind the kernels
    engine_overhead: Term | None = None  # of `overhead`, what the engine adds; None: not known
    engine_prefill: Term = 0.0  # of `prefill`
    has_host_work: bool = field(init=False, repr=False, compare=False)

    whole_terms: ClassVar[tuple[str, ...]] = (
        "overhead",
        "overhead_per_sequence",
        *HOST_TERMS,
        "window",
        "engine_overhead",
        "engine_prefill",
    )
    last_terms: ClassVar[tuple[str, ...]] = ("head", "head_per_sequence")

    def __post_init__(self) -> None:
        others = ("overhead_per_sequence", "state_per_sequence")
        terms = TERMS + others + CHUNK_TERMS + WINDOW_TERMS + HOST_TERMS + COPY_TERMS
        tables = [*check_table(self.dense)]
        if self.graph_dense:
            tables += check_table(self.graph_dense, "graph_dense")
        if self.graph_mixed:
            tables += check_graphs(self.graph_mixed)
        raise_if(
            *tables,
            *check_terms(self, (*terms, "launch", "decode_least", "mixed_least")),
            *check_sizes(self.cudagraph_capture_sizes),
            *check_intervals(self),
        )
        vars(self).update(
            cudagraph_capture_sizes=(*self.cudagraph_capture_sizes,),
            host_interval=(*self.host_interval,),
            has_host_work=any(getattr(self, name) for name in HOST_TERMS),
        )

    @property
    def host_work(self) -> HostWork | None:
        if not (self.has_host_work or self.host_interval):
            return None
        return HostWork(
            per_step=self.host,
            per_sequence=self.host_per_sequence,
            interval=self.host_interval,
            gap_interval=self.step_interval,
            stream_interval=self.stream_interval,
            hidden=self.overlapped,
            launch_gap=self.engine_overhead,
        )

    def with_host(self, **terms: Any) -> Self:
        return replace(self, **terms)

    def without_host(self) -> Self:
        nothing: dict[str, Any] = dict.fromkeys(HOST_TERMS, 0.0)
        return replace(self, **nothing)

    def with_waits(self, step: float, per_sequence: float) -> Self:
        each = max(0.0, self.overhead_per_sequence + per_sequence)
        return replace(self, overhead=max(0.0, self.overhead + step), overhead_per_sequence=each)

    @property
    def fitted_terms(self) -> Mapping[str, str]:
        hidden = {"host": "host"} if self.overlapped else {}
        return {"step": "overhead", **hidden, "per_sequence": "host_per_sequence"}

    def with_engine(
        self, *, step: float, apart: float, prompts: float, launch: float = 0.0, **terms: Any
    ) -> Self:
        return replace(
            self,
            overhead=self.overhead + step + apart,
            prefill=self.prefill + prompts,
            launch=max(self.launch, launch),
            engine_overhead=step,
            engine_prefill=prompts,
            **terms,
        )

    def part(self, share: float, *, last: bool) -> Self:
        tables: dict[str, Any] = {
            name: [[tokens, seconds * share] for tokens, seconds in getattr(self, name)]
            for name in ("dense", "graph_dense", "graph_mixed")
        }
        return replace(super().part(share, last=last), **tables)
