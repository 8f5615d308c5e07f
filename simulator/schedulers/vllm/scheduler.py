"""The scheduler of vLLM V1: whoever runs goes on, then others are admitted.

There is no prefill or decode phase: a request wants its computed tokens to catch up with the
known ones, and a decode is the case where one is missing. The rules are those of vLLM 0.33
(`vllm/v1/core/sched/scheduler.py`), for one engine, or those of an older release (`rules.py`);
`features/drafts` verifies drafts. The scheduler owns no clock, no GPU and no I/O.

For speed the requests that decode are not walked one by one but kept as sums (`decode_set.py`); the
result is the same as that of vLLM's loop:

- Each decode wants one token. As long as the budget holds all of them, only the requests in
  `running.partial` (a prompt not yet computed) want looking at.
- When blocks run out, vLLM preempts the last of the running list until the request at hand has
  its block. The victims are always a tail of the list, and the shortest tail whose going lets the
  rest have what they need: so it can be found from the sum of the needs.
- Where the budget does not reach round (after `prefill_schedule_interval` held prompts back), and
  where blocks run out and have names or the policy picks the victims, the set is dissolved and
  the running list is walked.
"""

from collections.abc import Callable, Sequence
from typing import TypedDict

from simulator.core.request import Load, Request, Step
from simulator.kv_cache.block_manager import BlockCounter
from simulator.policies.policy import Policy, victim_of
from simulator.policies.waiting_queues import WITHOUT_BOOKS, SwappedFirst, queue_of
from simulator.schedulers.base import SchedulerBase
from simulator.schedulers.feature import Feature
from simulator.schedulers.limits import DEFAULT_LIMITS, Limits
from simulator.schedulers.running_requests import PreemptionLoop
from simulator.schedulers.vllm.admission import Admission, PrefillInterval
from simulator.schedulers.vllm.fetches import Fetches
from simulator.schedulers.vllm.rules import NEWEST_RULES, CannotFollowError, Rules
from simulator.util.errors import ScenarioError


class Options(TypedDict, total=False):
    """What a `Scheduler` takes beside its blocks."""

    limits: Limits
    policy: Policy | None
    features: Sequence[Feature]
    rules: Rules


class Scheduler(SchedulerBase):
    """First come, first served; a preempted request goes to the front.

    `policy` orders the waiting queue, None is first come, first served; if it has a method
    `victim(running)`, that picks who is preempted, else the last admitted is. `rules` are those of
    a vLLM version.

    A subclass overrides what it does otherwise: `schedule` or, of its parts, `plan` (tokens for
    those who run), `admit` (from the waiting queue; `chunk` and `lacks_blocks` are its questions),
    `start`, `preempt` and `finish` (what happens to one request); `output_limit` and `fits` for a
    new one; `horizon` where a step may differ from the one before for reasons of its own, and
    `stored` where blocks hold what this class does not know of. `schedule_tokens`, `decode_all`
    and `admit_head` are there to be called.
    """

    def __init__(
        self,
        blocks: BlockCounter,
        limits: Limits = DEFAULT_LIMITS,
        *,
        policy: Policy | None = None,
        features: Sequence[Feature] = (),
        rules: Rules = NEWEST_RULES,
    ) -> None:
        SchedulerBase.__init__(self, blocks, limits, features=features)
        self.rules = rules
        blocks.splits_free_list = rules.splits_free_list
        blocks.masks_windows = rules.masks_windows
        self.tracks_longest = False  # whether steps say how much their longest decode reads
        self.max_num_active_seqs = limits.max_num_active_seqs or limits.max_num_seqs
        self.max_num_scheduled_tokens = (
            limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        )
        self.long_prefill_token_threshold = limits.long_prefill_token_threshold
        self.long_prefill_token_threshold_adaptive = limits.long_prefill_token_threshold_adaptive
        self.admission = Admission(blocks, limits)
        interval, cached = limits.prefill_schedule_interval, rules.admits_cached
        self.prefill_interval = (
            PrefillInterval(interval, admits_cached=cached) if interval > 1 else None
        )
        self.victim = victim_of(policy)
        self._start_queue(policy, swaps=limits.swap_blocks > 0)
        self._tries_others = not (rules.stops_at_long_head or limits.enable_chunked_prefill)
        self._reordered = False  # by the last call of `admit`, the waiting queue
        self._deferred: set[Request] = set()  # who wait and were passed over in their places
        self._annotates = bool(features)  # steps say what else costs time
        for feature in features:
            feature.attach(self)
        self._keeps_places = any(feature.passes_over for feature in features)
        self.fetches = self._expect_tiers()
        self.displacing = False  # a waiting request may take the place of one that runs
        self.loading: dict[Request, int] = {}  # whose KV is on its way, in no queue
        self.draft_slots = 0  # tokens of the budget that a request takes beside its own

    def _start_queue(self, policy: Policy | None, *, swaps: bool) -> None:
        """Make the waiting queue in a policy's order; who is swapped out goes first."""
        self.settle_queue: Callable[[float], None] | None = None
        self.refresh_queue: Callable[[float], None] | None = None
        if policy is not None:
            self.running.loop = PreemptionLoop(type(policy).__name__)
            queue = queue_of(policy, self)
            self.settle_queue = getattr(queue, "settle", None)
            self.refresh_queue = getattr(queue, "refresh", None)
            self.waiting = SwappedFirst(queue) if swaps else queue

    def _expect_tiers(self) -> Fetches | None:
        """Make ready to ask tiers behind the host, if there are some."""
        if self.blocks.tier is None or not self.blocks.tier.secondary:
            return None
        if self.keeps_books:
            raise ScenarioError("engine.secondary_tiers", "needs fcfs, priority and sjf")
        fetches = Fetches(self.blocks, self.blocks.tier)
        self.settle_queue = fetches.ask
        return fetches

    @property
    def keeps_books(self) -> bool:
        """The queue may count who is taken out of it, so that nobody is passed over."""
        return type(self.waiting) not in WITHOUT_BOOKS

    def track_longest(self) -> None:
        """Let every step say how much its longest decode reads, from now on."""
        self.tracks_longest = self._annotates = True
        self.decodes.track_longest()

    # Requests come.

    def add(self, request: Request) -> bool:
        """Take a new request; say whether the next step may differ for it."""
        # Where a cap on chunks depends on how many are present, the head may fit from now on.
        changes = self.enqueue(request) or self.long_prefill_token_threshold > 0
        # Those before it may be passed over.
        changes |= self._keeps_places
        if self.fetches is not None:
            self.fetches.new.append(request)
            return True
        return changes and (
            len(self.running) < self.max_num_active_seqs
            or self.prefill_interval is not None
            or self.settle_queue is not None
            or self.displacing
        )

    def next_wakeup(self) -> float | None:
        """Return the time at which a step becomes possible though nothing happens until then."""
        return None if self.fetches is None or self.running else self.fetches.next_end()

    # A step is decided.

    def schedule(self, now: float) -> Step:
        """Decide the next forward pass. An empty step means that there is nothing to do."""
        self.now = now
        self.preempted = 0
        if self.settle_queue is not None:
            self.settle_queue(now)
        running, decodes, interval = self.running, self.running.decodes, self.prefill_interval
        budget, count = self.max_num_scheduled_tokens, decodes.count
        cap = self.chunk_cap() if self.long_prefill_token_threshold else budget
        if interval is not None:
            interval.begin(running)
        chunks: Sequence[tuple[Request, int]] | None = ()
        if (
            running.partial
            or count > budget
            or count * self.blocks.num_groups > self.blocks.free
            or not decodes.alike
        ):
            chunks = self.plan(cap)
            count = decodes.count
        if chunks is None:
            step = Step([])
            budget = self._walk(step, cap)
        elif decodes.alike:  # the common case, without a call of `decode_all`
            step = Step([], count, decodes.context + count)
            budget -= count
            if count:
                self.blocks.take_ticks(decodes, 1)
        else:
            step = Step([])
            budget -= self.decode_all(step)
        for request, tokens in chunks or ():
            self.schedule_tokens(step, request, tokens)
            budget -= tokens
        if budget and not self.preempted and self.waiting:
            self.admit(step, budget, cap)
        if self._annotates:
            self._annotate(step)
        if self.swap_space.outgoing and (step.decodes or step.prefills):
            self.swap_space.send(step)  # an empty step is not carried out: the next one sends
        if interval is not None:
            waits = len(self.waiting) > len(self._deferred)
            interval.end(bool(step.decodes or step.prefills), not self.preempted, waits)
        return step

    def chunk_cap(self) -> int:
        """Return the tokens that one request may compute in this step."""
        threshold = self.long_prefill_token_threshold
        present = len(self.running) + len(self.waiting) + len(self.loading)
        if not threshold or present < (2 if self.rules.lifts_cap_for_one else 1):
            return self.max_num_batched_tokens
        if self.long_prefill_token_threshold_adaptive:
            return max(threshold, self.max_num_batched_tokens // present)
        return threshold

    def plan(self, cap: int) -> list[tuple[Request, int]] | None:
        """Share the budget out among the running, preempting the last while blocks lack.

        Return tokens per partial request, or None where only a walk can tell.
        """
        running, blocks, interval = self.running, self.blocks, self.prefill_interval
        decodes, groups, budget = running.decodes, blocks.num_groups, self.max_num_scheduled_tokens
        # Where a token takes a block at most, nobody need count while so many are free.
        ample = decodes.alike and blocks.free >= budget * groups
        if self.features and any(one.walks(running.partial) for one in self.features):
            return None  # each depends on what those before it have left
        while True:
            queries, need = (decodes.count, 0) if ample else decodes.demand()
            left, need = budget - queries, need * groups
            if left < 0:
                return None
            chunks = []
            for request in running.partial:
                if interval is not None and interval.holds(request):
                    continue
                # Its `pending` tokens, which as a property cost a step more.
                known = request.padding + request.prompt_tokens + request.generated
                tokens = known - request.computed
                tokens = tokens if tokens < cap else cap
                if tokens > left:
                    # The last admitted has nobody behind it.
                    if request.admission + 1 != running.admissions and running.decodes_behind(
                        request
                    ):
                        return None
                    tokens = left
                if tokens:
                    if blocks.names_blocks and running.decodes_behind(request):
                        return None  # blocks are handed out in the order of the running list
                    chunks.append((request, tokens))
                    left -= tokens
                    if not ample:
                        need += blocks.taken(request, request.computed + tokens)
            if ample or need <= blocks.free:
                return chunks
            if blocks.ordered or self.victim is not None:
                return None  # which blocks are evicted depends on when the victims go
            victim = running.last()
            self.swap_out(victim)
            self.preempt(victim)

    def _walk(self, step: Step, cap: int) -> int:  # noqa: PLR0912  it is vLLM's one loop
        """Go through the running list one by one, as vLLM does; return the tokens left."""
        running, interval = self.running, self.prefill_interval
        running.dissolve()
        budget, slots = self.max_num_scheduled_tokens, self.draft_slots
        passed_over = 0  # requests that have no turn in this step
        for request in list(running):
            if budget <= slots:
                break
            if request not in running:
                continue  # preempted meanwhile
            if passed_over:
                passed_over -= 1
                continue
            if interval is not None and interval.holds(request):
                continue
            tokens = min(self.tokens_wanted(request), cap, budget - slots)
            if self.features and tokens:
                tokens, _ = self._allowed(request, request.computed, tokens)
            if not tokens:
                continue
            self.blocks.recycle(request)
            need = self.blocks.growth(request, request.computed + tokens)
            while need > self.blocks.free and request in running:
                if self.spares_victim():
                    return budget
                victim, given = self._make_room(step)
                budget += given and given + slots
                if not self.rules.goes_back_after_victim and not given:
                    passed_over += victim.admission < request.admission
            if request in running:
                self.schedule_tokens(step, request, tokens)
                budget -= tokens + slots
                for feature in self.features:
                    feature.on_schedule(request)
            elif not self.rules.walks_on_after_self:
                break
        return budget

    def tokens_wanted(self, request: Request) -> int:
        """Return the tokens that a running request outside the decode set wants."""
        return request.pending

    def schedule_tokens(self, step: Step, request: Request, tokens: int) -> None:
        """Let a running request outside the decode set compute `tokens` more."""
        SchedulerBase.schedule_tokens(self, step, request, tokens)
        if self.prefill_interval is not None:
            self.prefill_interval.scheduled(request, request.mid_prefill)

    def _annotate(self, step: Step) -> None:
        """Let a step say what else it costs."""
        if self.tracks_longest and step.decodes:
            step.longest = self.decodes.longest_in(step)
        for feature in self.features:
            feature.annotate(step)

    # Waiting requests are admitted.

    def admit(self, step: Step, budget: int, cap: int) -> None:
        """Admit from the head of the waiting queue; nobody overtakes a head that does not fit.

        `budget` tokens are left in the step; `cap` is for one request.
        """
        blocks, waiting, interval = self.blocks, self.waiting, self.prefill_interval
        # Other queues may count who is taken out of them.
        tries_others = self._tries_others and not self.keeps_books
        set_aside: list[Request] = []
        features, slots, fetches = self.features, self.draft_slots, self.fetches
        self._reordered = False
        for feature in features:
            feature.begin(step)
        while budget > slots and waiting and len(self.running) < self.max_num_active_seqs:
            request = waiting.head()
            if request.remote:
                budget = self.pull(step, request, budget)
                continue
            if (features and self.refuses(request)) or (fetches and fetches.awaits(request)):
                set_aside.append(waiting.take())
                continue
            hits, loads, start = self._find_prefix(request)
            if interval is not None and interval.refuses(request, start):
                break
            pending = request.padding + request.prompt_tokens + request.generated - start
            tokens = self.chunk(pending if pending < cap else cap, budget - slots)
            passes = not tokens and tries_others
            if features and tokens:
                tokens, passes = self._allowed(request, start, tokens)
            if not tokens or self.lacks_blocks(request, hits, start + tokens):
                for feature in features:
                    feature.on_leave(request)
                if not passes:
                    break
                set_aside.append(waiting.take())
                continue
            if loads:
                fetched = fetches.pop(request, loads) if fetches else (0, 0)
                load = Load(request, loads, request.preemptions == 0, fetched)
                step.add_copies().loads.append(load)
                blocks.load(request, hits, loads)
            self.admit_head(step, hits, start, tokens)
            budget -= tokens + slots
            for feature in features:
                feature.on_schedule(request)
        if set_aside:
            self._put_back(set_aside)

    def _find_prefix(self, request: Request) -> tuple[Sequence[int], int, int]:
        """Return which blocks of a request are there, how many on the host, and their tokens."""
        blocks, loads, start = self.blocks, 0, request.swapped
        hits = blocks.match(request)
        if blocks.tier is not None and not start:
            loads = blocks.loadable(request, hits)
        if hits or loads:
            start = max(blocks.tokens_of(hits) + loads * blocks.block_size, start)
        return hits, loads, start

    def _allowed(self, request: Request, start: int, tokens: int) -> tuple[int, bool]:
        """Return how many tokens features let a request compute, and whether it is passed over."""
        for feature in self.features:
            tokens = feature.tokens(request, start, tokens)
            if not tokens:
                return 0, feature.passes_over
        return tokens, False

    def refuses(self, request: Request) -> bool:
        """Say whether the head of the queue is passed over for a feature."""
        return not all(feature.may_admit(request) for feature in self.features)

    def _put_back(self, passed_over: list[Request]) -> None:
        """Take back requests that were passed over.

        Each keeps its place where a feature passes over, else several are reversed.
        """
        if self.fetches is None and self._keeps_places:
            self._deferred.update(passed_over)
        if self.fetches is not None or self._keeps_places:
            passed_over.reverse()
        else:
            self._reordered = True
        for request in passed_over:
            self.waiting.put_back(request)

    def lacks_blocks(self, request: Request, hits: Sequence[int], tokens: int) -> bool:
        """Say whether memory is too short to admit a request that begins with `tokens` tokens.

        `hits` is what `blocks.match` has just found of it.
        """
        return self.admission.lacking(request, hits, tokens, len(self.running)) > 0

    def pull(self, step: Step, request: Request, budget: int) -> int:
        """Take in, or pass over, a head that waits for more than room (`Request.remote`).

        Return the tokens left, 0 if it must wait.
        """
        raise NotImplementedError

    def admit_head(self, step: Step, hits: Sequence[int], start: int, tokens: int) -> None:
        """Let the head of the queue run, and compute `tokens` tokens after the first `start`."""
        request, prompts = self.waiting.head(), len(step.prefills)
        if self.fetches is not None:
            self.fetches.forget(request)
        self.admission.reserve(request)
        if request.preemptions and self.swap_space.prices:
            self.swap_space.observe(request.known, len(hits) * self.blocks.block_size)
        SchedulerBase.admit_head(self, step, hits, start, tokens)
        if self.prefill_interval is not None and len(step.prefills) > prompts:
            self.prefill_interval.scheduled(request, start < request.known - 1)

    def start(self, request: Request) -> None:
        """Put a request that is admitted on the running list."""
        SchedulerBase.start(self, request)
        self._deferred.discard(request)

    # Running requests make way.

    def spares_victim(self) -> bool:
        """Say whether the one to be preempted next may not be, so that nobody is in this step."""
        return False

    def _make_room(self, step: Step) -> tuple[Request, int]:
        """Preempt one request; return it, and the tokens that it had been given in this step."""
        victim = self.running.last() if self.victim is None else self.victim(self.running)
        given = step.remove(victim)
        if given and not self.rules.withdraws_tokens:
            raise CannotFollowError(
                "engine.version: what vLLM before 0.11.1 does under a policy that picks victims, "
                "when KV blocks run out, cannot be simulated: it computes a preempted request's "
                "tokens on blocks that have been freed"
            )
        self.swap_out(victim, given)
        for feature in self.features:
            feature.on_withdraw(victim)
        self.preempt(victim)
        if given:
            self.running.correct_pause(victim, given)
        return victim, given

    def cancel(self, request: Request) -> None:
        SchedulerBase.cancel(self, request)
        self._deferred.discard(request)
        if self.fetches is not None:
            self.fetches.forget(request)

    # A step repeats itself.

    def take_ticks(self, ticks: int, skip: int) -> None:
        SchedulerBase.take_ticks(self, ticks, skip)
        if self.prefill_interval is not None:
            self.prefill_interval.executed += ticks

    def horizon(self, step: Step) -> int:
        sure, interval = SchedulerBase.horizon(self, step), self.prefill_interval
        if interval is not None and interval.held and self.waiting:
            return min(sure, interval.left)
        return sure

    def _may_fit(self) -> bool:
        """Say whether somebody who waits may fit after a step in which nothing but decodes happens.

        Where the head loses blocks, its first chunk ends earlier, for which fewer may be enough.
        """
        moves = self.waiting.moves and len(self.running) < self.max_num_active_seqs
        shrinks = self.blocks.evicts_runs and not self.admission.whole_prompt
        return self.blocks.names_blocks or moves or shrinks or self._reordered
