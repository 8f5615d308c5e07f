"""What a run lets go on: engines on a clock, and whoever sends to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import simpy

from simulator.build.engine_spec import EngineSpec
from simulator.core.log import Log
from simulator.core.request import Request
from simulator.engine.client import StreamClient
from simulator.engine.core import EngineCore
from simulator.engine.drive import drive
from simulator.engine.replica import Replica
from simulator.results.record import ClusterRecord
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from simulator.cluster.fleet import Fleet

AnyClient = TypeVar("AnyClient", bound=StreamClient)
Progress = Callable[[float, int, int], None]
Submit = Callable[[Request], None]
MakeClient = Callable[[simpy.Environment, Submit, Submit | None], AnyClient]
"""Makes who sends through the one and hangs up by the other, None: where nothing can."""


@dataclass(slots=True)
class Setup(Generic[AnyClient]):
    """Engines on one clock, and who sends to them."""

    client: AnyClient
    specs: Mapping[str, EngineSpec]  # by group; "" where there are none
    cores: Sequence[EngineCore]
    abandon: Callable[[], None]  # writes down the requests that have not ended
    fleet: "Fleet | None" = None  # None: a single engine
    record: ClusterRecord | None = None
    missed: Sequence[str] = ()  # outages that met no replica, in words
    apart: bool = False  # a request has rows in the logs of several replicas
    rewrites: bool = False  # rows of a log may be taken out again

    @property
    def logs(self) -> list[Log]:
        """The facts, a log for each engine core."""
        return [core.log for core in self.cores]

    def drive(
        self,
        progress: Progress | None,
        stop: Callable[[], bool] | None = None,
        packed: Sequence[Log] = (),
    ) -> bool:
        """Let the clock run until all is done; say whether it was broken off.

        What is old in the `packed` logs is packed on the way.
        """
        try:
            return drive(self.client.env, self.client, progress, stop, packed)
        except RuntimeError:
            if self.fleet is None or not self.fleet.has_no_replica:
                raise
            wrong = "cluster.failures: requests wait for a replica, and none comes back"
            raise HeadwayError(wrong) from None


def before(replica: Replica, spec: EngineSpec, make: MakeClient[AnyClient]) -> Setup[AnyClient]:
    """Put a client before a replica, whatever its clock and its executor."""
    cancel = replica.cancel if replica.scheduler.traits.cancels else None
    client = make(replica.env, replica.submit, cancel)
    replica.on_finish = client.finished
    return Setup(client, {"": spec}, [replica], replica.abandon)
