"""SGLang 0.5.23's EAGLE: decodes verify a chain, or a tree, of drafts beside their token.

Before each decode every request has memory for `reserve` tokens beyond those stored, in whole
pages (`eagle_prepare_for_decode` in `speculative/eagle_utils.py`); what it does not need it keeps
until it leaves. Of the drafts those up to the first wrong one come out, and one token more; if its
limit cuts them off, the last token of an answer is stored, too. In a step of prompts and decodes
(`enable_mixed_chunk`) nothing is verified: each decode brings one token.

The prefix tree knows pairs of tokens (`EagleTree`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from simulator.core.log import StepRow, pack_draft, pack_run
from simulator.core.request import Request, Step
from simulator.core.speculative_config import SpeculativeConfig
from simulator.features.drafts.rows import verified_row
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.interface import Traits
from simulator.schedulers.running_requests import RunningRequests
from simulator.schedulers.sglang.running_batch import RunningBatch
from simulator.schedulers.sglang.scheduler import SgLang


@dataclass(slots=True)
class Outcome:
    """What a decode brings to a request."""

    request: Request
    out: int  # tokens of its answer; 0: it has ended
    stored: int  # tokens, those beyond its end included


@dataclass(slots=True)
class Flight:
    """A step in flight: when it was decided, whose prompts it completes, what decodes bring."""

    now: float
    prompts: list[Request]
    outcomes: list[Outcome]
    drafts: int


@dataclass(slots=True)
class Member:
    """How far a request is that verifies drafts."""

    said: int  # tokens of its answer when all steps in flight are over, those beyond its end too
    stored: int  # tokens then
    room: int  # tokens that it has memory for
    right: Sequence[int]  # drafts accepted at each place of its answer
    ticks: int = 0  # outcomes of decodes, so far


class DraftedBatch(RunningBatch):
    """Requests that verify drafts, one by one. `take(count)` takes blocks, or gives back."""

    def __init__(
        self,
        blocks: BlockCounter,
        drafts: SpeculativeConfig,
        seed: int,
        take: Callable[[int], None],
    ) -> None:
        super().__init__(blocks.block_size, blocks.names_blocks)
        self.alike = False
        self.ahead = 0  # tokens of the prompt's step that have not come out when it joins
        self.drafts = drafts
        self._seed = seed
        self._take = take
        self._reserve = drafts.reserve(blocks.block_size)
        self.there: dict[Request, Member] = {}
        self.leaving: dict[Request, Member] = {}  # whose last token is in flight
        self.outcomes: list[Outcome] = []
        """Of the step scheduled last."""

    def join(self, request: Request, ticks: int) -> None:
        self.joins += 1
        self.count += 1
        request.joined = self.tick
        places = request.allowed + 2 * self.drafts.verified
        right = self.drafts.accepted(self._seed, request.id, places)
        said, stored = request.generated + self.ahead, request.computed
        self.there[request] = Member(said, stored, stored, right)

    def leave(self, request: Request) -> int:
        if request in self.there:
            self.let_go(request)
        member = self.leaving.pop(request)
        self._take(self._pages(request.computed) - self._pages(member.room))
        request.joined = -1
        return member.ticks

    def let_go(self, request: Request) -> None:
        """Let a request verify no more; it keeps its memory until it leaves."""
        self.leaving[request] = self.there.pop(request)
        self.count -= 1

    def generated(self, request: Request, ahead: int = 0) -> int:
        return request.generated

    def computed(self, request: Request) -> int:
        """Count the tokens that are stored when all steps in flight are over."""
        member = self.there.get(request)
        return request.computed if member is None else member.stored

    def reorder(self, members: Iterable[Request], first: int) -> None:
        for number, request in enumerate(members, first):
            request.admission = number

    def members_in_order(self) -> list[Request]:
        return sorted(self.there, key=lambda request: request.admission)

    def expected(self, request: Request, ratio: float, lag: int = 0) -> float:
        left = min(request.allowed - request.generated, self._most)
        return left if request.ignore_eos else left * ratio

    def remaining(self, ratio: float, lag: int = 0) -> float:
        left = [0, 0]
        for request in self.there:
            left[request.ignore_eos] += min(request.allowed - request.generated, self._most)
        return left[False] * ratio + left[True]

    def stored(self) -> int:
        """Count the tokens that are of use when the step at hand is over."""
        both = [*self.there.items(), *self.leaving.items()]
        return sum(one.stored - max(one.said - r.output_limit, 0) for r, one in both)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def lacking(self) -> tuple[int, int]:
        """Count the tokens, and the pages, that members lack for the next step."""
        tokens = pages = 0
        for request, member in self.there.items():
            wanted = self._pages(request.computed + self._reserve)
            if wanted * self.block_size > member.room:
                tokens += wanted * self.block_size - member.room
                pages += wanted - self._pages(member.room)
        return tokens, pages

    def take_ahead(self, make_room: Callable[[int], None]) -> None:
        """Take what members lack; a page more for each is made free before."""
        tokens, pages = self.lacking()
        if not tokens:
            return
        size = self.block_size
        make_room(tokens if size == 1 else self._pages(tokens) + self.count)
        self._take(pages)
        for request, member in self.there.items():
            member.room = max(member.room, self._pages(request.computed + self._reserve) * size)

    def verify(self, *, drafts: bool) -> int:
        """Find what a step brings, without drafts a token each; return the tokens that it reads."""
        self.tick += 1
        self.outcomes = []
        reads = 0
        for request in self.members_in_order():
            member = self.there[request]
            reads += member.stored
            place = max(member.stored - request.prompt_tokens + 1, 0)  # 0: it is half read
            stored = 1 + member.right[place] if drafts else 1
            left = max(request.output_limit - member.said, 0)
            self.outcomes.append(Outcome(request, min(stored, left), stored))
            member.said += stored
            member.stored += stored
        return reads

    def bring(self, outcomes: Sequence[Outcome], *, drafts: bool) -> list[Request]:
        """Take in what a step has brought; return requests that have ended."""
        ended = []
        for one in outcomes:
            request = one.request
            member = self.there.get(request) or self.leaving[request]
            member.ticks += 1
            request.generated += one.out
            if request.generated == request.output_limit:
                ended.append(request)
                if not drafts:
                    continue  # SGLang does not count this token as stored
            request.computed = min(request.computed + one.stored, request.known)
        return ended


class SpeculativeSgLang(SgLang):
    """The scheduler with EAGLE, by `limits.speculation`; there are no policies of Headway's and no
    host tier.
    """

    batch: DraftedBatch
    traits: ClassVar[Traits] = replace(
        SgLang.traits, obeys=SgLang.traits.obeys | {"speculation", "draft_seed"}
    )

    def _begin(self) -> None:
        super()._begin()
        assert self.limits.speculation is not None
        self.speculation = self.limits.speculation
        self.decodes = self.batch = DraftedBatch(
            self.blocks, self.speculation, self.limits.draft_seed, self.blocks.take
        )
        self.batch.ahead = int(self.traits.overlaps)
        self.in_flight: deque[Flight] = deque()
        self._last_end = 0.0  # of the steps whose outcome is there

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: its last step sets memory aside, too."""
        size = self.blocks.block_size
        last = request.prompt_tokens + self.output_limit(request) + self.speculation.reserve(size)
        return super().fits(request) and -(-last // size) <= self.blocks.usable

    # A step is decided.

    def schedule(self, now: float) -> Step:
        step = super().schedule(now)
        if step.prefills or step.decodes:
            prompts = [one.request for one in step.prefills if one.request is not self.chunked]
            outcomes = self.batch.outcomes if step.decodes else []
            self.in_flight.append(Flight(now, prompts, outcomes, step.drafts))
            for request in prompts if self.traits.overlaps else ():
                self.running.start_decoding(request)
        return step

    def _has_room(self) -> bool:
        _, need = self.batch.lacking()
        if need <= self.blocks.free:
            return True
        self.blocks.make_room(need)
        return False

    def _decode_all(self, step: Step) -> None:
        batch, verifies = self.batch, not step.prefills
        batch.take_ahead(self.blocks.make_room)
        step.decodes = batch.count
        step.drafts = step.decodes * (self.speculation.verified - 1) if verifies else 0
        step.context += batch.verify(drafts=verifies) + step.decodes + step.drafts

    # A step is over.

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Deliver the tokens of the oldest batch in flight; return requests that finished."""
        flight, now = self.in_flight.popleft(), ends[-1]
        over: list[Request] = []
        drafts = flight.drafts > 0
        ended = self.batch.bring(flight.outcomes, drafts=drafts)
        for request in flight.prompts:
            request.generated += 1
            request.run_start = now
            if request.first_token < 0:
                request.first_token = now
            if request.generated == request.output_limit:
                over.append(request)
                self.finish(request, now)
            else:
                self.blocks.cache(request)
                if request.joined < 0:
                    self.running.start_decoding(request)
        for request in ended:
            self.finish(request, now)
        if drafts:
            real = [one for one in flight.outcomes if one.out]
            right = sum(one.stored - 1 for one in real)
            verified = len(real) * (self.speculation.verified - 1)
            self.drafts += pack_draft(max(flight.now, self._last_end), len(real), verified, right)
        self._last_end = now
        over += ended + self.aborted
        self.aborted.clear()
        return over

    def finish(self, request: Request, now: float) -> None:
        full, leaves = self.full, request in self.batch.leaving
        super().finish(request, now)
        self._drop(request)
        if leaves:  # else the running batch gets smaller
            self.full = full

    def send_away(self, request: Request, left: int) -> None:
        super().send_away(request, left)
        self._drop(request)

    def _abort(self, request: Request) -> None:
        super()._abort(request)
        self._drop(request)

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Throw away what batches in flight bring to a request."""
        for flight in self.in_flight:
            flight.prompts = [one for one in flight.prompts if one is not request]
            flight.outcomes = [one for one in flight.outcomes if one.request is not request]

    def horizon(self, step: Step) -> int:
        return 1

    # What is written down of a step.

    def account(self, step: Step) -> StepRow:
        """Count what comes out, and all else that is verified as wasted."""
        tokens = sum(one.out for one in self.batch.outcomes)
        return verified_row(super().account(step), step, tokens)

    def stored(self, step: Step) -> int:
        tokens = self.batch.stored() + sum(request.computed for request in self.running.partial)
        return self.blocks.in_use(tokens)


class DraftedRunning(RunningRequests):
    """The running list where requests decode before their first token has come out."""

    __slots__ = ()

    def start_decoding(self, request: Request) -> None:
        request.run_start = -1.0
        super().start_decoding(request)

    def stop_decoding(self, request: Request) -> None:
        first = request.joined
        ticks = self.decodes.leave(request)
        if request.run_start >= 0:
            self.runs += pack_run(request.run_start, request.id, first, ticks)


class OverlappedSpeculativeSgLang(SpeculativeSgLang):
    """The same with two batches in flight: what is known of a request is a step behind.

    Memory is counted by what is known. A request that by this lacks one token to its limit, with
    another in flight, leaves; a request that ends otherwise verifies once more in vain.
    """

    traits: ClassVar[Traits] = replace(SpeculativeSgLang.traits, overlaps=True)
    running_type: ClassVar[type[RunningRequests]] = DraftedRunning

    def _is_idle(self) -> bool:
        return not self.in_flight

    def _let_go(self) -> bool:
        """Take those out of the batch whose last token, by their limit, is in flight."""
        if not self.in_flight:
            return False
        flight, batch = self.in_flight[-1], self.batch
        brought = [*flight.prompts, *(one.request for one in flight.outcomes)]
        going = [r for r in brought if r in batch.there and r.generated + 1 >= r.allowed]
        for request in going:
            batch.let_go(request)
        if going:
            self.full = False
        return bool(going)

    def _decode(self, step: Step) -> bool:
        if self._let_go() and (not self.batch.count or not self._has_room()):
            return False
        return super()._decode(step)

    def _join_prefill(self, step: Step) -> None:
        self._let_go()
        super()._join_prefill(step)
