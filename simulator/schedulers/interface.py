"""What an engine asks of a scheduler, and what a kind of scheduler says of itself.

Engine, loop, cluster and plug-ins know no more of one than this. What the kinds share is in
`base.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from simulator.core.decode_set import DecodeSet
from simulator.core.log import StepRow
from simulator.core.request import Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.kv_cache.host_memory import SwapSpace
from simulator.kv_cache.tiers import HostTier
from simulator.policies.waiting_queues import WaitingQueue
from simulator.schedulers.door import Door
from simulator.schedulers.feature import Feature
from simulator.schedulers.limits import ALL_LIMITS
from simulator.schedulers.running_requests import RunningRequests

LONGEST_LEAP = 256  # steps; bounds what is computed in vain when an arrival cuts a leap short


@dataclass(frozen=True)
class Traits:
    """What a kind of scheduler can do, and how its engine treats it."""

    overlaps: bool = False
    """A step is scheduled while the one before it runs."""
    counts_ahead: bool = True
    """Where steps overlap, tokens are counted as their step is decided; else as they come out."""
    pauses: bool = True
    """Where nothing can be scheduled the engine sleeps a moment, once no batch is in flight."""
    polls: bool = False
    """While somebody waits the engine looks every so often, though nothing runs."""
    cancels: bool = True
    """`cancel` can take a request away between two steps."""
    caches_prefixes: bool = True
    """It can work with a prefix cache."""
    prefix_tree: bool = False
    """That is a radix tree, whatever the scenario says, but on a live engine."""
    has_host_tier: bool = True
    """It can work with a host tier of the prefix cache."""
    loads_beside: bool = False
    """Blocks come from there, and go there, while others compute."""
    obeys: frozenset[str] = ALL_LIMITS
    """Fields of `Limits` that it heeds: it sees the others at their defaults."""
    sets_aside: bool = False
    """It keeps memory for answers as long as their clients let them be."""
    headroom: int = 0
    """Blocks that must be left after a step of decodes, for it to preempt nobody."""


class SchedulerInterface(Protocol):
    """Decides what each step computes; it owns no clock, no GPU and no I/O.

    `schedule` decides a step and `commit` takes in its outcome; in between `horizon` says how often
    the step is sure to repeat. What its engine reads beside that changes in these calls alone.
    """

    traits: ClassVar[Traits]
    blocks: BlockCounter
    waiting: WaitingQueue
    running: RunningRequests
    decodes: DecodeSet
    """Those of them who decode."""
    tier: HostTier | None
    swap_space: SwapSpace
    door: Door | None
    features: Sequence[Feature]
    max_model_len: int  # tokens
    preempted: int  # requests, by the last call of `schedule`
    ended: bool  # the last outcome may have ended somebody
    delivers_together: bool  # answers are given when a batch is over, not each by itself
    drafts: bytearray  # rows of log.DRAFT
    seat_rows: bytearray | None  # of log.SEAT; None: who has ended keeps no seat

    @property
    def awaits_transfer(self) -> bool:
        """Something comes from outside that lets waiting requests go on."""

    @property
    def copies(self) -> bool:
        """Blocks are on their way, which the engine looks for though nothing runs."""

    @property
    def num_seats(self) -> int:
        """Requests that a batch has room for."""

    @property
    def room(self) -> str:
        """What `fits` compares a request with, in words."""

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run."""

    def add(self, request: Request) -> bool:
        """Take a new request; say whether the next step may differ for it."""

    def next_wakeup(self) -> float | None:
        """Return the time at which a step becomes possible though nothing happens until then."""

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""

    def account(self, step: Step) -> StepRow:
        """Return what the log says of `step`, just scheduled: the columns of `STEP_ROW`."""

    def stored(self, step: Step) -> int:
        """Tokens that somebody needs in the blocks in use while `step`, just scheduled, runs."""

    def horizon(self, step: Step) -> int:
        """Count how often `step`, just scheduled, is sure to repeat if nobody arrives."""

    def repeat(self, ticks: int) -> None:
        """Schedule the step just scheduled so many times more; only where steps overlap."""

    def leap_blocks(self, ticks: int) -> list[int]:
        """Count by how many blocks each repeat of the step to be committed adds to those in use."""

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`, repeated once per end time; return who finished."""

    def cancel(self, request: Request) -> None:
        """Let a request go for good, between two steps: nobody wants its answer any more."""

    def abandoned(self, request: Request) -> bool:
        """Hear that nobody wants a request any more; say whether it has to stay for all that."""

    def forget(self, request: Request) -> None:
        """Hear that nobody wants what a request that has just ended leaves behind."""

    def close(self, request: Request) -> None:
        """Bring a running request up to date, when the run is stopped before its end."""

    def track_longest(self) -> None:
        """Let every step say how much its longest decode reads, from now on."""
