"""vLLM's scheduler as its own loop goes: request by request, block by block, hashes by content.

Slow and plain on purpose: the yardstick for the scheduler that works on sums. The loop alone is in
`simulator/schedulers/vllm/reference.py`; this one has the prefix cache, vLLM's knobs and releases.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from simulator.core.request import Request
from simulator.schedulers.vllm.rules import NEWEST_RULES, Rules

Token = tuple[Hashable, int]


@dataclass(eq=False)
class Job:
    """One request, all its tokens spelt out."""

    request: Request
    known: list[Token]
    left: int  # tokens that will still come out
    order: int = 0  # in which it joined the queue
    computed: int = 0
    table: list[int] = field(default_factory=list)
    preempted: bool = False
    mid_prefill: bool = False
    out: int = 0

    @property
    def id(self) -> int:
        return self.request.id


class ReferenceScheduler:
    """One engine; `step` decides and says what it decided, `end` hands out the tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        *,
        key: Callable[[Request], object] | None = None,
        by_priority: bool = False,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool,
        long_prefill_token_threshold: int,
        long_prefill_token_threshold_adaptive: bool,
        prefill_schedule_interval: int,
        scheduler_reserve_full_isl: bool,
        watermark: float,
        rules: Rules = NEWEST_RULES,
    ) -> None:
        self.rules = rules
        self.size, self.caching, self.key = block_size, caching, key
        self.by_priority = by_priority
        self.adaptive, self.interval = (
            long_prefill_token_threshold_adaptive,
            prefill_schedule_interval,
        )
        self.executed, self.last, self.escape, self.held = (
            0,
            -prefill_schedule_interval,
            False,
            False,
        )
        self.seats, self.tokens = max_num_seqs, max_num_batched_tokens
        self.longest, self.chunked = max_model_len, enable_chunked_prefill
        self.threshold, self.reserve = long_prefill_token_threshold, scheduler_reserve_full_isl
        self.spare = int(watermark * num_blocks)
        self.free = list(range(1, num_blocks))
        self.refs = Counter[int]()
        self.content: dict[int, tuple[Token, ...]] = {}  # of hashed blocks, with all before them
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.given: dict[Job, int] = {}
        self.joined = 0

    def add(self, request: Request) -> None:
        """Let a request join the queue."""
        parts = request.segments or ((("in", request.id), request.prompt_tokens),)
        known: list[Token] = [(name, k) for name, count in parts for k in range(count)]
        left = min(request.output_tokens, self.longest - request.prompt_tokens)
        self._queue(Job(request, known, left))

    def _queue(self, job: Job) -> None:
        self.joined += 1
        job.order = self.joined
        if self.key is not None:
            self.waiting.append(job)
            self.waiting.sort(key=lambda j: (self.key(j.request), j.order))
        elif job.preempted:
            self.waiting.insert(0, job)
        else:
            self.waiting.append(job)

    def step(self) -> dict[str, object]:
        """Schedule once; return what was decided and how the cache looks."""
        self.given = {}
        self.held = (
            self.interval > 1
            and not self.escape
            and self.executed + 1 - self.last < self.interval
            and any(not job.mid_prefill for job in self.running)
        )
        prefill = False
        cap = self._cap()
        preempted, budget = self._serve(cap)
        prefill = any(job.mid_prefill for job in self.given)
        admitted = []
        if not preempted:
            admitted = self._admit(budget, cap)
            if not self.held:
                self.escape = bool(self.waiting)
        for job in self.running[len(self.running) - len(admitted) :]:
            prefill |= job.computed - self.given[job] < len(job.known) - 1
        self.executed += bool(self.given)
        if prefill:
            self.last = self.executed
        for job in self.given:
            job.mid_prefill = job.computed < len(job.known)
        return {
            "given": sorted((job.id, job.computed - n, n) for job, n in self.given.items()),
            "preempted": sorted(preempted),
            "admitted": admitted,
            "running": [job.id for job in self.running],
            "waiting": len(self.waiting),
            "head": self.waiting[0].id if self.waiting else None,
            "free": len(self.free),
            "hashed": len(set(self.content.values())),
            "stored": self._stored(),
        }

    def _cap(self) -> int:
        present = len(self.running) + len(self.waiting)
        if not self.threshold or present < (2 if self.rules.lifts_cap_for_one else 1):
            return self.tokens
        return max(self.threshold, self.tokens // present if self.adaptive else 0)

    def _serve(self, cap: int) -> tuple[list[int], int]:
        """Give the running their tokens; return who was preempted, and the budget left."""
        budget, preempted, at = self.tokens, [], 0
        while at < len(self.running) and budget:
            job = self.running[at]
            if self.held and job.mid_prefill:
                at += 1
                continue
            tokens = min(len(job.known) - job.computed, cap, budget)
            while not job.preempted and self._lacks(job, tokens):
                victim = self.running[-1]
                if self.by_priority:
                    victim = max(
                        self.running, key=lambda j: (j.request.priority, j.request.arrival)
                    )
                at -= self.running.index(victim) < at
                self.running.remove(victim)
                budget += self.given.pop(victim, 0)
                self._preempt(victim)
                preempted.append(victim.id)
            if not job.preempted:
                self._give(job, tokens)
                budget -= tokens
                at += 1
            elif not self.rules.walks_on_after_self:
                break
        return preempted, budget

    def _admit(self, budget: int, cap: int) -> list[tuple[int, int]]:
        admitted = []
        skipped: list[Job] = []
        while budget and self.waiting and len(self.running) < self.seats:
            job = self.waiting[0]
            hits = self._hits(job)
            start = len(hits) * self.size
            if self.held and (start < len(job.known) - 1 or not self.rules.admits_cached):
                break
            tokens = min(len(job.known) - start, cap)
            if not self.chunked and tokens > budget:
                if self.rules.stops_at_long_head:
                    break
                skipped.insert(0, self.waiting.pop(0))
                continue
            tokens = min(tokens, budget)
            held = len(job.known) if self.reserve else start + tokens
            need = -(-held // self.size) - len(hits) + sum(1 for b in hits if b in self.free)
            if need + (self.spare if self.running else 0) > len(self.free):
                break
            self.waiting.pop(0)
            for block in hits:
                self.refs[block] += 1
                if block in self.free:
                    self.free.remove(block)
            job.table, job.computed, job.preempted = hits, start, False
            self._give(job, tokens)
            self.running.append(job)
            admitted.append((job.id, start))
            budget -= tokens
        self.waiting = skipped + self.waiting
        if self.key is not None:
            for job in reversed(skipped):  # among equals they join anew
                self.joined += 1
                job.order = self.joined
            self.waiting.sort(key=lambda j: (self.key(j.request), j.order))
        return admitted

    def _hits(self, job: Job) -> list[int]:
        hits: list[int] = []
        for end in range(self.size, len(job.known), self.size):
            wanted = tuple(job.known[:end])
            block = next((b for b, has in self.content.items() if has == wanted), None)
            if block is None:
                break
            hits.append(block)
        return hits

    def _lacks(self, job: Job, tokens: int) -> bool:
        return -(-(job.computed + tokens) // self.size) - len(job.table) > len(self.free)

    def _give(self, job: Job, tokens: int) -> None:
        job.computed += tokens
        self.given[job] = tokens
        while len(job.table) * self.size < job.computed:
            block = self.free.pop(0)
            self.content.pop(block, None)
            self.refs[block] = 1
            job.table.append(block)
        if self.caching:
            for index in range(job.computed // self.size):
                name = tuple(job.known[: (index + 1) * self.size])
                self.content.setdefault(job.table[index], name)

    def _preempt(self, job: Job) -> None:
        self._release(job)
        job.preempted = True
        self._queue(job)

    def _release(self, job: Job) -> None:
        blank, last = [], []
        for block in reversed(job.table):
            self.refs[block] -= 1
            if not self.refs[block]:
                first = self.rules.splits_free_list and block not in self.content
                (blank if first else last).append(block)
        self.free = blank + self.free + last
        job.table, job.computed = [], 0

    def _stored(self) -> int:
        """Tokens in the blocks in use, those in shared blocks once."""
        fill: dict[int, int] = {}
        for job in self.running:
            for index, block in enumerate(job.table):
                fill[block] = min(self.size, job.computed - index * self.size)
        return sum(fill.values())

    def end(self) -> list[int]:
        """Hand a token to everybody whose known tokens are computed; return who ends."""
        over = [job for job in self.given if job.computed == len(job.known)]
        done = []
        for job in over:
            job.known.append((("out", job.id), job.out))
            job.out += 1
            job.left -= 1
            if not job.left:
                done.append(job.id)
                self._release(job)
                self.running.remove(job)
        return done
