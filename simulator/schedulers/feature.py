"""What a feature of an engine may have a say in: scheduling, costs, memory, keys of a scenario.

A scheduler without features passes none of this. Each feature is a folder of `simulator/features`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Request, Step
from simulator.costs.cost_model import CostModel
from simulator.models.engine_sizes import EngineSizes
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.util.errors import Kind


class Conflict(NamedTuple):
    """Keys of a scenario that contradict one another."""

    blamed: str  # a dotted key; "": the message names its own place
    others: str  # that have a part in it
    what: str
    kind: Kind = "unsupported"


Need = Callable[..., None]
"""`need(key, entry, otherwise)` raises ValueError where an engine is not as an entry of
`build/required.json` says, and, with `otherwise`, where its policy has a scheduler of its own.
"""
ORDERING = "policies that only order the queue: priority, sjf"


class Feature:
    """A feature of an engine; what it does not override changes nothing."""

    key: ClassVar[str]
    """The key of a scenario that turns it on."""
    lacking: ClassVar[tuple[str, str]] = ("", "")
    """What a policy that goes without it lacks, and what the others have."""
    since: ClassVar[tuple[int, int, int]] = (0, 32, 0)
    """The first release of vLLM whose rules for it were recorded."""
    live: ClassVar[str] = ""
    """Why a live engine has it not."""
    passes_over: bool = False
    """A waiting request that is not admitted for it keeps its place, and others are tried."""

    # What a scenario asks.

    @classmethod
    def wanted(cls, engine: EngineConfig) -> bool:
        """Say whether an engine has it: by default where the key is given, and not false."""
        return getattr(engine, cls.key) not in (None, False)

    @classmethod
    def requires(cls, engine: EngineConfig) -> str:
        """Name its entry of `build/required.json`; without one `scheduler` asks, or nobody."""
        return cls.key

    @classmethod
    def conflicts(cls, engine: EngineConfig) -> Iterator[Conflict]:
        """Yield what is wrong with its keys."""
        yield from ()

    @classmethod
    def of(cls, engine: EngineConfig, model: ModelSpec) -> Self | None:
        """Make what an engine's scheduler asks; None: it has a scheduler of its own."""
        return None

    @classmethod
    def scheduler(cls, spec: Any, policy: str, need: Need) -> type[Any] | None:
        """Return its own scheduler for an `EngineSpec` with a policy; None: it has none."""
        return None

    @classmethod
    def cost(cls, inner: CostModel, engine: EngineSizes, model: ModelSpec, gpu: Gpu) -> CostModel:
        """Put what it adds on an engine's cost."""
        return inner

    @classmethod
    def slot_bytes(cls, engine: EngineConfig, model: ModelSpec) -> int:
        """Bytes that it sets aside on each GPU."""
        return 0

    # What a scheduler asks.

    def attach(self, scheduler: Any) -> None:
        """See whose part it is: a vLLM `Scheduler`, whose rules and lists are there."""

    def fits(self, request: Request) -> bool:
        """Say whether a request could ever run."""
        return True

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words; "": nothing."""
        return ""

    def on_add(self, request: Request) -> None:
        """Hear of a new request."""

    def walks(self, partial: Sequence[Request]) -> bool:
        """Say whether the running have to be gone through one by one, of whom some are partial."""
        return False

    def begin(self, step: Step) -> None:
        """Make ready for admissions to a step, in which who runs has its tokens already."""

    def may_admit(self, request: Request) -> bool:
        """Say whether a waiting request may be admitted now; if not, it is passed over."""
        return True

    def tokens(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of its next tokens a request may compute after the first `start`."""
        return tokens

    def on_schedule(self, request: Request) -> None:
        """Hear that a request gets the tokens of the last call of `tokens`."""

    def on_admit(self, request: Request) -> None:
        """Hear that a request joins the running list."""

    def on_withdraw(self, request: Request) -> None:
        """Hear that a request loses what it had been given in this step."""

    def on_leave(self, request: Request) -> None:
        """Hear that a request is preempted, cancelled, over, or not admitted after all."""

    def annotate(self, step: Step) -> None:
        """Let a step, just scheduled, say what else it costs."""

    def count(self, step: Step, tokens: int) -> int:
        """Return the tokens that the log has of a step, whose chunks come to `tokens`."""
        return tokens

    def on_commit(self, step: Step, ending: Collection[Request]) -> None:
        """Take in the outcome of a step, which brings the last tokens of `ending`."""

    @property
    def pending(self) -> bool:
        """Whether the next step may differ for it though nobody comes."""
        return False
