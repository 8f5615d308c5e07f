"""Speculative decoding as vLLM's loop goes: request by request, token by token.

Slow and plain on purpose: the yardstick for the scheduler that works on sums.
"""

from dataclasses import dataclass


@dataclass(eq=False)
class Job:
    """One request; `accepted` says, for each position of its answer, how many drafts are right."""

    id: int
    prompt: int
    left: int
    accepted: list[int]
    said: int = 0
    computed: int = 0
    drafts: int = 0  # waiting to be verified
    blocks: int = 0  # entries of a table
    gone: int = 0  # of these, out of the window

    @property
    def known(self) -> int:
        return self.prompt + self.said


class ReferenceSpeculative:
    """First come, first served; blocks are a number."""

    def __init__(
        self,
        blocks: int,
        size: int,
        k: int,
        lookahead: int,
        seats: int,
        budget: int,
        longest: int,
        groups: tuple[int, int, int] = (1, 0, 0),
        draft_slots: int = 0,
    ) -> None:
        self.draft_slots = draft_slots
        self.full, self.windowed, self.window = groups
        self.free, self.size, self.k, self.lookahead = blocks - 1, size, k, lookahead
        self.seats, self.budget, self.longest = seats, budget, longest
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.given: dict[Job, int] = {}

    def step(self) -> dict[str, object]:
        """Schedule once and say what was decided."""
        self.given, left, preempted = {}, self.budget, 0
        for job in list(self.running):
            if job not in self.running:
                continue
            tokens = min(job.known + job.drafts - job.computed, left - self.draft_slots)
            tokens = min(tokens, self.longest - 1 - job.computed)
            if tokens <= 0:
                break
            slots = min(job.computed + tokens + self.lookahead, self.longest)
            if self.windowed:
                self._forget(job)
            while job in self.running and self._more(job, slots) > self.free:
                preempted += 1
                self._preempt()
            if job in self.running:
                self._take(job, tokens, slots)
                left -= tokens + self.draft_slots
        pads = bool(self.given) and all(map(self._decodes, self.given))
        slots = self.draft_slots
        while not preempted and left > slots and self.waiting and len(self.running) < self.seats:
            job = self.waiting[0]
            table = -(-job.known // self.size)
            window = min(table, -(-(self.window - 1 + self.budget) // self.size) + 1)
            tokens = min(job.known, left - slots)
            if pads and job.known == 1 and 2 + self.k <= self.longest:
                tokens = 1 + self.k
            ahead = min(tokens + self.lookahead, self.longest)
            need = max(self.full * table + self.windowed * window, self._more(job, ahead))
            if tokens > left - slots or need > self.free:
                break
            self.running.append(self.waiting.pop(0))
            self._take(job, tokens, ahead)
            job.computed = min(tokens, job.known)
            left -= tokens + slots
        decodes = [job for job in self.given if self._decodes(job)]
        return {
            "decodes": len(decodes),
            "drafts": sum(self.given[job] - 1 for job in decodes),
            "context": sum(job.computed for job in decodes),
            "chunks": sorted(
                (job.id, max(job.computed - n, 0), n)
                for job, n in self.given.items()
                if job not in decodes
            ),
            "preempted": preempted,
            "free": self.free,
            "running": [job.id for job in self.running],
        }

    def _decodes(self, job: Job) -> bool:
        return job.said > 0 and job.computed - self.given[job] == job.known - 1

    def _take(self, job: Job, tokens: int, slots: int) -> None:
        self.free -= self._more(job, slots)
        job.blocks = max(job.blocks, -(-slots // self.size))
        job.computed += tokens
        self.given[job] = tokens

    def _held(self, job: Job) -> int:
        return self.full * job.blocks + self.windowed * (job.blocks - job.gone)

    def _more(self, job: Job, slots: int) -> int:
        more = max(-(-slots // self.size) - job.blocks, 0)
        return (self.full + self.windowed) * more

    def _forget(self, job: Job) -> None:
        """Give back what the next query cannot see."""
        gone = max(job.computed - self.window + 1, 0) // self.size
        self.free += self.windowed * (gone - job.gone)
        job.gone = gone

    def _preempt(self) -> None:
        job = self.running.pop()
        self.free += self._held(job)
        job.blocks = job.gone = job.computed = job.drafts = 0
        self.waiting.insert(0, job)

    def end(self) -> tuple[list[int], int]:
        """Hand out the tokens; say who is done, and how many tokens came out of decodes."""
        done, out = [], 0
        for job, tokens in self.given.items():
            if job.computed < job.known:
                continue
            was_decode = self._decodes(job)
            verified = tokens - 1 if was_decode and job.drafts else 0
            right = min(job.accepted[job.said], verified) if verified else 0
            come = min(1 + right, job.left - job.said)
            job.said += come
            job.computed = job.known - 1
            job.drafts = self.k
            out += come * was_decode
            if job.said == job.left:
                done.append(job.id)
                self.running.remove(job)
                self.free += self._held(job)
        return done, out
