"""The running list of an engine: who runs, how far each is, and what is written down of it."""

from simulator.core.decode_set import DecodeSet
from simulator.core.log import pack_pause, pack_run
from simulator.core.request import Request, by_admission
from simulator.kv_cache.block_manager import BlockCounter
from simulator.util.errors import HeadwayError

FUTILE_STEPS = 10_000  # in a row that lose what was computed, without one token or arrival


class EndlessPreemptionError(HeadwayError):
    """All preempt one another before they have said a token."""


class PreemptionLoop:
    """Notices that nobody gets on, as an `EndlessPreemptionError` says.

    The policies shipped cannot do that; one of a user's own can, by `displaces` or `victim`.
    """

    def __init__(self, who: str) -> None:
        self._policy_name = who
        self._progress = 0  # ticks and joins of the decode set, when they last changed
        self._futile = 0  # steps with preemptions since
        self._now = -1.0  # s, of the last of them

    def arrived(self) -> None:
        """Take note of a new request: what comes next may be for its sake."""
        self._futile = 0

    def preempted(self, now: float, decodes: DecodeSet) -> None:
        """Take note of a preemption; raise the error if it is one too many."""
        if now == self._now:  # one of many by the same step
            return
        self._now = now
        progress = decodes.tick + decodes.joins
        if progress != self._progress:
            self._progress, self._futile = progress, 0
        self._futile += 1
        if self._futile > FUTILE_STEPS:
            raise EndlessPreemptionError(
                f"engine.scheduling_policy: {self._policy_name} goes round in circles: "
                f"{FUTILE_STEPS:,} steps in a row preempted requests and computed no token, since "
                "each admitted request is preempted before its first token"
            )


class RunningRequests(dict[Request, None]):
    """The running requests in order of admission.

    Those that decode are kept as sums in `decodes`, all others one by one in `partial`.
    """

    # What else a dict has for attributes is slow to read.
    __slots__ = (
        "_blocks",
        "_paused",
        "admissions",
        "decodes",
        "loop",
        "partial",
        "pauses",
        "runs",
    )

    def __init__(self, blocks: BlockCounter, loop: PreemptionLoop) -> None:
        super().__init__()
        self.decodes = DecodeSet(blocks.block_size, by_phase=blocks.names_blocks)
        self.loop = loop
        self.partial: list[Request] = []
        self.admissions = 0  # so far
        self.runs = bytearray()  # rows of log.RUN, of runs of tokens that are over
        self.pauses = bytearray()  # rows of log.PAUSE, of preemptions that are over
        self._blocks = blocks
        self._paused: dict[Request, tuple[float, int]] = {}  # since when, tokens that were computed

    def admit(self, request: Request, now: float) -> None:
        """Append a request to the running list."""
        request.admission = self.admissions
        request.last_tick = -1
        self.admissions += 1
        self[request] = None
        self.partial.append(request)
        if request.first_scheduled < 0:
            request.first_scheduled = now

    def remove(self, request: Request) -> None:
        """Take a request off the running list; its blocks are the caller's to free."""
        if request.joined >= 0:
            self.stop_decoding(request)
        else:
            self.partial.remove(request)
        del self[request]

    def discard(self, request: Request) -> None:
        """Take a request off the running list without a word about it."""
        if request.joined >= 0:
            self.decodes.leave(request)
        else:
            self.partial.remove(request)
        del self[request]

    def start_decoding(self, request: Request) -> None:
        """Take a request whose prompt is computed into the decode set."""
        self.partial.remove(request)
        self.decodes.join(request, request.output_limit - request.generated)

    def stop_decoding(self, request: Request) -> None:
        """Take a request out of the decode set and write down its run of tokens."""
        decodes, first = self.decodes, request.joined
        if decodes.alike:  # as `generated`, without a call
            ticks = decodes.leave(request)
            request.generated += ticks
        else:
            request.generated = decodes.generated(request)
            ticks = decodes.leave(request)
        self.runs += pack_run(request.run_start, request.id, first, ticks)

    def dissolve(self) -> None:
        """Take all requests out of the decode set, to be scheduled one by one."""
        members = [request for request in self if request.joined >= 0]
        for request in members:
            self.stop_decoding(request)
        self.partial += members
        self.partial.sort(key=by_admission)

    def evict(self, request: Request, now: float) -> None:
        """Take place and blocks from a request, which will be admitted again."""
        self.remove(request)
        self.pause(request, now, request.computed - request.padding)
        self._blocks.release(request)
        request.padding = 0
        request.preemptions += 1
        if not request.swapped:
            self.loop.preempted(now, self.decodes)

    def pause(self, request: Request, now: float, computed: int) -> None:
        """Take note that a request with so many computed tokens is preempted."""
        self._paused[request] = now, computed

    def correct_pause(self, request: Request, tokens: int) -> None:
        """Take note that the last so many of its computed tokens were not computed after all."""
        since, computed = self._paused[request]
        self._paused[request] = since, computed - tokens

    def resume(self, request: Request, now: float, start: int) -> None:
        """Write down a preemption that is over: the request goes on from its token `start`."""
        since, computed = self._paused.pop(request, (now, start))
        self.pauses += pack_pause(since, now, request.id, max(computed - start, 0))

    def forget(self, request: Request) -> None:
        """Forget a preempted request that will not come back."""
        self._paused.pop(request, None)

    def members(self) -> list[Request]:
        """List who is in the decode set, in running order; of most requests nothing is read."""
        partial = self.partial
        if self.decodes.count + len(partial) != len(self):
            return [request for request in self if request.joined >= 0]
        if not partial:
            return list(self)
        others = set(partial)
        return [request for request in self if request not in others]

    def last(self) -> Request:
        """Return the last admitted."""
        return next(reversed(self))

    def decodes_behind(self, request: Request) -> bool:
        """Say whether a member of the decode set was admitted after `request`."""
        for other in reversed(self):
            if other is request:
                return False
            if other.joined >= 0:
                return True
        return False

    def may_decode(self) -> bool:
        """Say whether somebody runs whose prompt is computed."""
        return len(self.partial) < len(self) or not all(
            request.mid_prefill for request in self.partial
        )
