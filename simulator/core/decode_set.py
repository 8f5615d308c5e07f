"""The decode set: all requests that advance by one token a step, kept as a few sums.

Time is counted in *ticks*, the steps in which every member advances by one token. A member that
joined at tick j with c tokens in the cache has c + (tick - j) of them now, so nobody is touched
until it finishes, is preempted or is asked about: the cost of a tick does not depend on how many
decode, and k ticks cost what one does.

A member needs a new KV block at every tick at which its tokens fill all its blocks. That happens
once in `block_size` ticks, always at the same remainder: its phase. Counting members per phase
tells how many blocks any stretch of ticks takes.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from simulator.core.request import Request, Step


class DecodeSet:
    """Requests that decode together, and what their next ticks take.

    With `by_phase` the members of each phase can be listed too (a block manager that names its
    blocks must know who takes them).
    """

    def __init__(self, block_size: int, by_phase: bool = False) -> None:
        self.block_size = block_size
        self.alike = True  # in a tick a member computes one token and takes a block at most
        self.count = 0
        self.context = 0  # tokens in the cache, summed over the members
        self.tick = 0  # ticks so far
        self.joins = 0  # members taken in so far: each of them has just said a token
        self.phases = [0] * block_size
        self.members: list[dict[Request, None]] | None = (
            [{} for _ in range(block_size)] if by_phase else None
        )
        self._ends: list[tuple[int, int, Request]] = []  # (last tick, admission, request), a heap
        # (tick at which it had no tokens, admission, request), a heap; None: nobody asks for it
        self._begins: list[tuple[int, int, Request]] | None = None

    def join(self, request: Request, ticks: int) -> None:
        """Take in a request that ends after `ticks` ticks from now."""
        tick, computed = self.tick, request.computed
        self.joins += 1
        request.joined = tick
        request.last_tick = last = tick + ticks  # as `end_after`, without a call
        heappush(self._ends, (last, request.admission, request))
        self.count += 1
        self.context += computed
        phase = (tick - computed) % self.block_size
        self.phases[phase] += 1
        if self.members is not None:
            self.members[phase][request] = None
        if self._begins is not None:
            heappush(self._begins, (tick - computed, request.admission, request))

    def verified(self, request: Request) -> tuple[int, int]:
        """Count the tokens that a member computes at the next tick, and those that it has."""
        return 1, self.computed(request)

    def end_after(self, request: Request, ticks: int) -> None:
        """Have `advance` return a member when `ticks` more ticks are over."""
        request.last_tick = self.tick + ticks
        heappush(self._ends, (request.last_tick, request.admission, request))

    def reorder(self, members: Iterable[Request], first: int) -> None:
        """Number members anew, from `first` on: their place in the running list has changed."""
        for number, request in enumerate(members, first):
            request.admission = number
            heappush(self._ends, (request.last_tick, number, request))
            if self._begins is not None:
                heappush(self._begins, (request.joined - request.computed, number, request))

    def leave(self, request: Request) -> int:
        """Let a member go, bring its own counters up to date, return its ticks in the set."""
        joined, computed = request.joined, request.computed
        ticks = self.tick - joined
        phase = (joined - computed) % self.block_size
        request.computed = computed = computed + ticks
        request.joined = -1
        request.last_tick = self.tick
        self.count -= 1
        self.context -= computed
        self.phases[phase] -= 1
        if self.members is not None:
            del self.members[phase][request]
        return ticks

    def generated(self, request: Request, ahead: int = 0) -> int:
        """Count a request's tokens that have come out: a member's own count lags.

        Those of the last `ahead` ticks do not count; below 0: those of the next do, too.
        """
        joined = request.joined
        return request.generated if joined < 0 else request.generated + self.tick - ahead - joined

    def computed(self, request: Request) -> int:
        """Count a request's tokens whose KV is in the cache."""
        joined = request.joined
        return request.computed if joined < 0 else request.computed + self.tick - joined

    def track_longest(self) -> None:
        """Keep books of lengths from now on, while the set is empty."""
        self._begins = []

    def longest(self) -> int:
        """Tokens in the cache of the member that has most; 0 where nobody keeps books of them."""
        begins = self._begins
        while begins:
            begin, admission, request = begins[0]
            member = request.joined >= 0 and request.admission == admission
            if member and request.joined - request.computed == begin:
                return self.tick - begin
            heappop(begins)
        return 0

    def longest_in(self, step: Step) -> int:
        """KV entries that a decode of the step reads at most, its new token included."""
        singles = max((chunk.start + 1 for chunk in step.singles or ()), default=0)
        members = self.longest() + 1 if step.decodes > len(step.singles or ()) else 0
        return max(singles, members)

    def emitted(self, request: Request) -> None:
        """Hear of a token that a request outside the set has brought out."""

    def advance(self, ticks: int) -> list[Request]:
        """Let every member advance by `ticks` tokens; return those whose last tick is over.

        They are in the order of the running list, and still in the set.
        """
        self.tick = tick = self.tick + ticks
        self.context += ticks * self.count
        ends = self._ends
        done: list[Request] = []
        while ends and ends[0][0] <= tick:
            last, admission, request = heappop(ends)
            # It may have left since, and may even be back.
            if _holds(request, last, admission) and not (done and done[-1] is request):
                done.append(request)
        return done

    def blocks(self, ticks: int, skip: int = 0) -> int:
        """Blocks that `ticks` ticks take, beginning `skip` ticks from now."""
        size, phases = self.block_size, self.phases
        if size == 1:
            return ticks * self.count
        rounds, rest = divmod(ticks, size)
        first = (self.tick + skip) % size
        end = first + rest
        total = rounds * self.count + sum(phases[first:end])
        return total + sum(phases[: end - size]) if end > size else total

    def growth(self, ticks: int, skip: int = 0) -> list[int]:
        """Count the blocks that each of `ticks` ticks takes, beginning `skip` ticks from now."""
        phases, size = self.phases, self.block_size
        if size == 1:
            return phases * ticks
        first = (self.tick + skip) % size
        found = phases[first : first + ticks]
        if (missing := ticks - len(found)) > 0:
            rounds, rest = divmod(missing, size)
            found += phases * rounds + phases[:rest]
        return found

    def demand(self) -> tuple[int, int]:
        """Count the tokens and the blocks that the next tick takes."""
        return self.count, self.phases[self.tick % self.block_size]

    def affords(self, free: int, ticks: int, skip: int = 1) -> int:
        """Count how many of `ticks` ticks, beginning `skip` from now, `free` blocks suffice for."""
        size = self.block_size
        if self.count * (ticks // size + 1) <= free or self.blocks(ticks, skip) <= free:
            return ticks
        first = self.tick + skip
        for done in range(ticks):
            free -= self.phases[(first + done) % self.block_size]
            if free < 0:
                return done
        return ticks

    def ticks_to_end(self) -> int:
        """Ticks until a member ends next; 0 where no member ends by itself."""
        ends = self._ends
        while ends:
            last, admission, request = ends[0]
            if _holds(request, last, admission) and last > self.tick:
                return last - self.tick
            heappop(ends)
        return 0


def _holds(request: Request, last: int, admission: int) -> bool:
    """Say whether an entry of the heap still tells when its request ends."""
    return request.joined >= 0 and request.last_tick == last and request.admission == admission
