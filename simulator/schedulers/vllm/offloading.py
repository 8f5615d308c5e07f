"""vLLM's scheduler with its OffloadingConnector: blocks come from host memory while others compute.

As in vLLM 0.33 (`v1/core/sched/scheduler.py`, `kv_connector/v1/offloading/scheduler.py`), or 0.32:

- A request that comes to the head of the queue, and of whose blocks the host has the next ones,
  takes blocks of the GPU for them and waits (WAITING_FOR_REMOTE_KVS) while they are copied; others
  are tried. Those who hold blocks so stand in a queue of their own, before the other. Blocks that
  those in the middle of their prompts still want are left to them.
- It is passed over while the host is still being given what it would load, while another loads
  the same, and while its own blocks, from before it was preempted, are being stored.
- At the end of a step all blocks of prompts that it has computed, or found, are offered to the
  host. Those for which that has no room are offered again with the next step of their request.
- The engine hears of copies that are done with the outcome of a step. With nothing to compute it
  looks for them every millisecond.

Copies take their turns on a link, one each way. A store begins at the end of its step. That blocks
may be handed on while they are being stored, for which vLLM waits, is left out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from simulator.core.request import Load, Request, Step
from simulator.kv_cache.block_manager import BlockManager
from simulator.kv_cache.tiers import HostTier
from simulator.policies.waiting_queues import Fifo, KeyQueue, WaitingQueue
from simulator.schedulers.interface import Traits
from simulator.schedulers.vllm.async_scheduler import AsyncScheduler
from simulator.schedulers.vllm.connector import DefersFrees, Loading
from simulator.schedulers.vllm.scheduler import Options

TO_ASK = 1  # in `Request.remote`: the host is asked when its turn comes


class HoldersFirst:
    """A waiting queue before which those stand who hold blocks, in the same order."""

    def __init__(self, holders: WaitingQueue, others: WaitingQueue) -> None:
        self.holders, self.others = holders, others
        self.moves = others.moves
        self.holding: dict[Request, float] = {}  # with when their blocks are there

    def __len__(self) -> int:
        return len(self.holders) + len(self.others)

    def add(self, request: Request) -> bool:
        return self.others.add(request)

    def put_back(self, request: Request) -> None:
        (self.holders if request in self.holding else self.others).put_back(request)

    def head(self) -> Request:
        return (self.holders or self.others).head()

    def take(self) -> Request:
        return (self.holders or self.others).take()

    def remove(self, request: Request) -> None:
        (self.holders if request in self.holding else self.others).remove(request)


class Offloading(Loading):
    """Decides what each step computes, with blocks of the prefix cache in host memory.

    The blocks' tier is the host. `load_time` and `store_time` say how long so many blocks take.
    """

    traits = Traits(loads_beside=True, polls=True)
    blocks: BlockManager
    tier: HostTier
    waiting: HoldersFirst

    def __init__(self, blocks: BlockManager, **options: Unpack[Options]) -> None:
        tier = blocks.tier
        assert tier is not None
        blocks.tier = None  # here the scheduler deals with it
        super().__init__(blocks, **options)
        self.tier = tier
        own: WaitingQueue = self.waiting
        self._passes_over = not self.keeps_books
        policy = options.get("policy")
        holders = KeyQueue(policy) if policy and type(own) is KeyQueue else Fifo()
        self.waiting = HoldersFirst(holders, own)
        self._annotates = True
        load_time, store_time = self.limits.load_time, self.limits.store_time
        assert load_time is not None
        assert store_time is not None
        self._load_time, self._store_time = load_time, store_time
        self._load_free = self._store_free = 0.0  # s, when each link is
        self._heard = 0.0  # s, until when it is known which copies are done
        self._loads: deque[tuple[float, list[int]]] = deque()
        self._stores: deque[tuple[float, Request, list[int]]] = deque()
        self._begun: deque[list[tuple[Request, list[int]]]] = deque()  # of steps in flight
        self._deciding: list[tuple[Request, list[int]]] = []  # stores of the step at hand
        self._storing: dict[Request, int] = {}  # copies under way
        self._offered: dict[Request, int] = {}  # blocks, from the first on
        self._used: dict[Request, set[int]] = {}  # numbers of blocks stored, found there or loaded
        self._ages: dict[Request, int] = {}  # of those, where a request's blocks have one age
        self._lacking: set[Request] = set()  # for whom there was no room
        self._loaded: dict[Request, int] = {}  # blocks, of those who hold them
        self._ended: list[Request] = []  # since the last step was decided
        self._orphans: list[tuple[float, Request]] = []  # cancelled while they were loaded
        self._passed_over: list[Request] = []
        self._asked: list[Request] = []
        self._unheard = False  # an empty step's outcome is still to be looked at

    @property
    def copies(self) -> bool:
        return any(jobs and jobs[-1][0] > self._heard for jobs in (self._stores, self._loads))

    def add(self, request: Request) -> bool:
        request.remote = TO_ASK
        return super().add(request)

    def schedule(self, now: float) -> Step:
        self._settle()
        step = super().schedule(now)
        if self._unheard:
            self._heard, self._unheard = now, False
        if step.decodes or step.prefills:
            self._begun.append(self._deciding)
        else:
            self._begin_stores(self._deciding, now)
            self._unheard = self.traits.overlaps
            if not self.traits.overlaps:
                self._heard = now
        self._deciding = []
        return step

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        self._begin_stores(self._begun.popleft(), ends[0])
        self._heard = ends[-1]
        return super().commit(step, ends)

    def _begin_stores(self, stores: list[tuple[Request, list[int]]], now: float) -> None:
        """Begin to store blocks."""
        for request, keys in stores:
            self._store_free = max(self._store_free, now) + self._store_time(len(keys))
            self._stores.append((self._store_free, request, keys))

    def _settle(self) -> None:
        """Take in the copies of which it has been heard that they are done."""
        tier, heard = self.tier, self._heard
        while self._stores and self._stores[0][0] <= heard:
            _, request, keys = self._stores.popleft()
            tier.writing.difference_update(keys)
            self._storing[request] -= 1
            if not self._storing[request]:
                del self._storing[request]
        while self._loads and self._loads[0][0] <= heard:
            tier.reading.difference_update(self._loads.popleft()[1])
        for orphan in [one for one in self._orphans if one[0] <= heard]:
            self._orphans.remove(orphan)
            self._let_go(orphan[1])

    # Waiting requests.

    def admit(self, step: Step, budget: int, cap: int) -> None:
        super().admit(step, budget, cap)
        self._deferred.update(self._passed_over)
        for request in reversed(self._passed_over):
            self.waiting.put_back(request)
        self._passed_over.clear()
        for request in self._asked:
            request.remote = 0 if request in self.running else TO_ASK
        self._asked.clear()

    def preempt(self, request: Request) -> None:
        request.remote = TO_ASK
        super().preempt(request)

    def pull(self, step: Step, request: Request, budget: int) -> int:
        """Admit a head that holds blocks, let it load some, or pass it over."""
        when = self.waiting.holding.get(request)
        ready = when is not None and when <= self._heard
        if ready:
            self.blocks.publish(request)
        if self.refuses(request):
            self._passed_over.append(self.waiting.take())
            return budget
        if ready:
            return self._take_up(step, request, budget)
        found: int | None = None
        if when is None and self.rules.offers_again:
            self._offered.pop(request, None)
        if when is None and request not in self._storing:
            hits = self.blocks.match(request)
            found = self._look_up(request, len(hits))
        if found is None and when is None and not self._passes_over:
            return 0
        if found is None:
            self._passed_over.append(self.waiting.take())
        elif not found:
            request.remote = 0  # as without a host, for this step
            self._asked.append(request)
        elif not self._load(step, request, hits, found):
            return 0
        return budget

    def _look_up(self, request: Request, hits: int) -> int | None:
        """Count the blocks after the hits that the host has; None: it is to be asked later."""
        tier, size = self.tier, self.blocks.block_size
        limit = request.known // size
        keys = self.blocks.names(request, limit)[hits:limit]
        found = tier.run(keys)
        there = keys[:found]
        if not (tier.writing.isdisjoint(there) and tier.reading.isdisjoint(there)):
            return None
        return found

    def _lacks_room(self, step: Step, request: Request, hits: Sequence[int], tokens: int) -> bool:
        """Say whether there is no room to load a request's first `tokens` tokens."""
        blocks, admission, running = self.blocks, self.admission, len(self.running)
        if admission.lacking(request, hits, tokens, running):
            return True
        spare = self._left_to_others(step, self.waiting.holding)
        return blocks.missing(tokens, hits) + spare > blocks.free

    def _load(self, step: Step, request: Request, hits: Sequence[int], count: int) -> bool:
        """Let a head take blocks and wait for what the host has for them; False: no room."""
        tier, size, first = self.tier, self.blocks.block_size, len(hits)
        if self._lacks_room(step, request, hits, (first + count) * size):
            return False
        self.waiting.take()
        self.blocks.hold(request, hits, (first + count) * size)
        self.kept_tokens += request.computed
        keys = self.blocks.names(request, first + count)[first : first + count]
        tier.reading.update(keys)
        known = self._used.setdefault(request, set())
        numbers = range(first, first + count)
        self._rank(request, {n: k for n, k in zip(numbers, keys, strict=True) if n not in known})
        known.update(numbers)
        self._offered[request] = first + count
        self._load_free = when = max(self._load_free, self.now) + self._load_time(count)
        self._loads.append((when, keys))
        self._loaded[request] = count
        self.waiting.holding[request] = when
        self._passed_over.append(request)
        return True

    def _take_up(self, step: Step, request: Request, budget: int) -> int:
        start = min(request.computed, request.known - 1)
        left = super()._take_up(step, request, budget)
        if request not in self.running:
            return left
        del self.waiting.holding[request]
        if request.preemptions == 0:
            request.cached = start
        else:
            self.running.resume(request, self.now, start)
        load = Load(request, self._loaded.pop(request), request.preemptions == 0, beside=True)
        step.add_copies().loads.append(load)
        return left

    # What goes to the host.

    def _annotate(self, step: Step) -> None:
        super()._annotate(step)
        tier = self.tier
        scheduled = {chunk.request: None for chunk in (*step.prefills, *(step.singles or ()))}
        if self._lacking and step.decodes > len(step.singles or ()):
            scheduled |= {one: None for one in self._lacking if one.joined >= 0}
        for request in sorted(scheduled, key=lambda one: one.admission):
            self._offer(request, request.computed)
        self._ended.sort(key=lambda one: one.id)  # in vLLM in no fixed order
        for request in self._ended:
            self._offer(request, request.prompt_tokens)
            used = sorted(self._used.pop(request, ()))
            hashes = self.blocks.names(request, used[-1] + 1) if used else ()
            tier.finished([hashes[number] for number in used])
            self._offered.pop(request, None)
            self._ages.pop(request, None)
            self._lacking.discard(request)
        self._ended.clear()
        self._prefilling = [one for one in self.running.partial if one.pending > 0]

    def _offer(self, request: Request, computed: int) -> None:
        """Offer the host the blocks of a prompt that it has not been offered."""
        tier, size, first = self.tier, self.blocks.block_size, self._offered.get(request, 0)
        end = min(computed, request.prompt_tokens) // size
        if end <= first:
            return
        keys = self.blocks.names(request, end)[first:end]
        used, new = tier.take(keys)
        there = set(used)
        known = self._used.setdefault(request, set())
        fresh = {*new} if new else set[int]()
        numbered = {first + at: key for at, key in enumerate(keys) if key in there}
        self._rank(request, {n: k for n, k in numbered.items() if n not in known or k in fresh})
        known.update(numbered)
        if new is None:
            self._lacking.add(request)
            return
        self._lacking.discard(request)
        self._offered[request] = end
        if new:
            tier.writing.update(new)
            self._storing[request] = self._storing.get(request, 0) + 1
            self._deciding.append((request, new))

    def _rank(self, request: Request, blocks: dict[int, int]) -> None:
        """Let blocks of host memory, by their numbers in the prompt, be as old as their user."""
        if not blocks or not self.rules.ranks_by_request:
            return
        tier, age = self.tier, self._ages.get(request)
        if age is None:
            age = self._ages[request] = tier.begin()
        for number, key in blocks.items():
            tier.rank(key, (age, -number))

    def finish(self, request: Request, now: float) -> None:
        super().finish(request, now)
        self._ended.append(request)

    def cancel(self, request: Request) -> None:
        when = self.waiting.holding.get(request)
        self._ended.append(request)
        super().cancel(request)
        if when is None:
            return
        del self.waiting.holding[request], self._loaded[request]
        if when <= self._heard:
            self._let_go(request)
        else:
            self._orphans.append((when, request))

    def horizon(self, step: Step) -> int:
        return 1 if self._lacking else super().horizon(step)


class Ahead(DefersFrees, Offloading):
    """The same, with two batches in flight."""


class AsyncOffloading(Ahead, AsyncScheduler):
    """Both."""

    traits = replace(Offloading.traits, overlaps=True)
