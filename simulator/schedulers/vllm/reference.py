"""vLLM's scheduling loop literally: one request at a time, in the order of `Scheduler.schedule`.

Read this first. Each step has one budget of tokens. Requests that run get theirs before those that
wait; there is no prefill phase and no decode phase, only tokens that a request knows and that are
not computed yet. Where no block is free, the request admitted last gives its blocks back and
computes anew. After vLLM v1/core/sched/scheduler.py of release 0.33, first come first served,
without prefix cache and without any feature. `scheduler.py` decides the same by sums and leaps;
tests/schedulers/test_vllm_reference.py compares both.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Job:
    """A request as the loop sees it: how many tokens are known, and how many are computed."""

    id: int
    prompt: int
    output: int  # tokens that it will generate
    known: int = 0  # prompt and answer so far
    computed: int = 0
    blocks: int = 0

    def __post_init__(self) -> None:
        self.known = self.prompt


@dataclass
class Decision:
    """What one step computes: tokens by request; who was admitted and who preempted, in order."""

    tokens: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class ReferenceScheduler:
    """One engine: `add` requests, then `schedule` and `commit` in turns.

    `num_blocks` are those that requests can have, each of `block_size` tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.free, self.block_size = num_blocks, block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def add(self, job: Job) -> None:
        """Let a request wait."""
        self.waiting.append(job)

    def schedule(self) -> Decision:
        """Decide a step: the running first, then, if none was preempted, the waiting."""
        step = Decision()
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            tokens = min(job.known - job.computed, budget)
            while not self._allocate(job, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                step.preempted.append(victim.id)
                if victim is job:
                    break
            else:
                step.tokens[job.id] = tokens
                budget -= tokens
                index += 1
        while self.waiting and budget > 0 and not step.preempted:
            job = self.waiting[0]
            tokens = min(job.known, budget)
            if len(self.running) == self.max_num_seqs or not self._allocate(job, tokens):
                break
            self.running.append(self.waiting.popleft())
            step.tokens[job.id] = tokens
            step.admitted.append(job.id)
            budget -= tokens
        for job in self.running:
            job.computed += step.tokens.get(job.id, 0)
        return step

    def commit(self, step: Decision) -> list[int]:
        """Give a token to each request whose known tokens are all computed; return who ends."""
        done = []
        for job in [job for job in self.running if job.id in step.tokens]:
            if job.computed == job.known:
                job.known += 1
                if job.known == job.prompt + job.output:
                    self.free += job.blocks
                    self.running.remove(job)
                    done.append(job.id)
        return done

    def _allocate(self, job: Job, tokens: int) -> bool:
        """Take the blocks that a request needs for more tokens; False, and none, if they lack."""
        more = -(-(job.computed + tokens) // self.block_size) - job.blocks
        if more > self.free:
            return False
        self.free -= more
        job.blocks += more
        return True

    def _preempt(self, job: Job) -> None:
        """Take all blocks of a request; it waits in front of all others, and computes anew."""
        self.free += job.blocks
        job.blocks = job.computed = 0
        self.waiting.appendleft(job)
