"""How a step's budget is shared out among the requests that run, and who must leave for it.

For speed the requests that decode are not walked one by one but kept as sums (`decode_set.py`); the
result is the same as that of vLLM's loop:

- Each decode wants one token. As long as the budget holds all of them, only the requests in
  `partial` (a prompt not yet computed) want looking at.
- When blocks run out, vLLM preempts the last of the running list until the request at hand has
  its block. The victims are always a tail of the list, and the shortest tail whose going lets the
  rest have what they need: so it can be found from the sum of the needs.
- Where the budget does not reach round (after `prefill_schedule_interval` held prompts back), and
  where blocks run out and have names or the policy picks the victims, the set is dissolved and
  the running list is walked.
"""

from simulator.core.request import Chunk, Request, Step
from simulator.kv_cache.host_memory import SwapSpace
from simulator.policies.policy import Victim
from simulator.schedulers.vllm.batch import Batch
from simulator.schedulers.vllm.preemption_loop import Circles
from simulator.schedulers.vllm.prefill_interval import Cadence


class Running(Batch):
    """The running list of an engine, what each step gives to it, and how requests leave it."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    swap_space: SwapSpace
    _cadence: Cadence | None
    _circles: Circles
    _victim: Victim | None

    def _cap(self) -> int:
        """Give the tokens that one request may compute in this step."""
        present = len(self.running) + len(self.waiting)
        if present < 2:
            return self.max_num_batched_tokens  # vLLM lifts the cap for a request that is alone
        if self.long_prefill_token_threshold_adaptive:
            return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // present)
        return self.long_prefill_token_threshold

    def _may_decode(self) -> bool:
        """Say whether somebody runs whose prompt is computed."""
        return len(self.partial) < len(self.running) or not all(
            request.mid_prefill for request in self.partial
        )

    def _holds(self, request: Request) -> bool:
        """Say whether a running request must wait because prefill is held."""
        return self._cadence is not None and self._cadence.held and request.mid_prefill

    def _plan(self, cap: int) -> list[tuple[Request, int]] | None:
        """Share the budget out among the running, preempting the last while blocks lack.

        Return tokens per partial request, or None where only a walk can tell.
        """
        decodes, blocks = self.decodes, self.blocks
        size = blocks.block_size
        while True:
            left = self.max_num_batched_tokens - decodes.count
            need = decodes.phases[decodes.tick % size]
            chunks = []
            for request in self.partial:
                if self._cadence is not None and self._holds(request):
                    continue
                tokens = request.pending
                tokens = min(tokens, cap)
                if tokens > left:
                    if self._decodes_behind(request):
                        return None
                    tokens = left
                if tokens:
                    if blocks.names_blocks and self._decodes_behind(request):
                        return None  # blocks are handed out in the order of the running list
                    chunks.append((request, tokens))
                    left -= tokens
                    done = request.computed
                    need += -(-(done + tokens) // size) - -(-done // size)
            if need <= blocks.free:
                return chunks
            if blocks.ordered or self._victim is not None:
                return None  # which blocks are evicted depends on when the victims go
            victim = next(reversed(self.running))
            self._save(victim)
            self._preempt(victim)

    def _decodes_behind(self, request: Request) -> bool:
        """Say whether a member of the decode set was admitted after `request`."""
        for other in reversed(self.running):
            if other is request:
                return False
            if other.joined >= 0:
                return True
        return False

    def _advance(self, step: Step, chunks: list[tuple[Request, int]]) -> int:
        """Carry out the plan; return the tokens left."""
        decodes = self.decodes
        budget = self.max_num_batched_tokens
        if decodes.count:
            self.blocks.take_ticks(decodes, 1)
            step.decodes = decodes.count
            step.context = decodes.context + decodes.count
            budget -= decodes.count
        for request, tokens in chunks:
            self._give(step, request, tokens)
            budget -= tokens
        return budget

    def _give(self, step: Step, request: Request, tokens: int) -> None:
        """Let a running request compute `tokens` more."""
        if request.generated and request.pending == 1:
            self._single(step, request, request.computed, tokens)
        else:
            step.prefills.append(Chunk(request, request.computed, tokens))
        self.blocks.extend(request, request.computed + tokens)
        if self._cadence is not None:
            self._cadence.carries |= request.mid_prefill
            request.mid_prefill = request.pending > 0

    def _single(self, step: Step, request: Request, start: int, tokens: int = 1) -> None:
        """Let a request outside the decode set decode; all but one of its tokens are drafts."""
        if step.singles is None:
            step.singles = []
        step.singles.append(Chunk(request, start, tokens))
        step.decodes += 1
        step.drafts += tokens - 1
        step.context += start + tokens

    def _walk(self, step: Step, cap: int) -> int:
        """Go through the running list one by one, as vLLM does; return the tokens left."""
        self._break_up()
        budget = self.max_num_batched_tokens
        for request in list(self.running):
            if not budget:
                break
            if request not in self.running or request.generated == request.max_tokens:
                continue  # preempted meanwhile, or its last token is on its way
            if self._holds(request):
                continue
            tokens = min(self._wanted(request), cap, budget)
            need = self._growth(request, tokens)
            while need > self.blocks.free and request in self.running:
                budget += self._make_room(step)
            if request in self.running:
                self._give(step, request, tokens)
                budget -= tokens
        return budget

    def _wanted(self, request: Request) -> int:
        """Give the tokens that a running request outside the decode set wants."""
        return request.pending

    def _growth(self, request: Request, tokens: int) -> int:
        """Count the blocks that it takes to let it compute so many."""
        size, done = self.blocks.block_size, request.computed
        return -(-(done + tokens) // size) - -(-done // size)

    def _break_up(self) -> None:
        """Take all requests out of the decode set."""
        for request in self.running:
            if request.joined >= 0:
                self._leave(request)
        self.partial = list(self.running)

    def _make_room(self, step: Step) -> int:
        """Preempt one request; return the tokens that it had been given in this step."""
        if self._victim is None:
            victim = next(reversed(self.running))
        else:
            victim = self._victim(self.running)
        given = 0
        for chunks in (step.prefills, step.singles or []):
            for chunk in [c for c in chunks if c.request is victim]:
                chunks.remove(chunk)
                given = chunk.tokens
                if chunks is step.singles:
                    step.decodes -= 1
                    step.drafts -= given - 1
                    step.context -= chunk.start + given
        self._save(victim, given)
        self._preempt(victim)
        if given:
            since, computed = self._paused[victim]
            self._paused[victim] = since, computed - given
        return given

    def _save(self, request: Request, given: int = 0) -> None:
        """Have a victim's blocks copied to the host, if there is room.

        Of its tokens the last `given` were to be computed by this step, and are not.
        """
        if self.swap_space.free:
            ticks = self.decodes.tick - request.joined if request.joined >= 0 else 0
            self.swap_space.swap_out(request, request.computed + ticks - given)

    def _preempt(self, request: Request) -> None:
        """Put a running request back into the queue, without its blocks."""
        self._evict(request)
        self.preempted += 1
        self.waiting.put_back(request)

    def _evict(self, request: Request) -> None:
        """Take seat and blocks from a running request."""
        self._detach(request)
        self._pause(request, request.computed - request.padding)
        del self.running[request]
        self.blocks.release(request)
        request.padding = 0
        request.preemptions += 1
        if not request.swapped:
            self._circles.preempted(self.now, self.decodes)

    def cancel(self, request: Request) -> None:
        """Let a request go for good, between two steps: nobody wants its answer any more."""
        if request in self.running:
            if request.joined >= 0:
                self.decodes.leave(request)
            else:
                self.partial.remove(request)
            del self.running[request]
            self.blocks.release(request)
            return
        self.waiting.remove(request)
        self._paused.pop(request, None)
        if request.swapped:
            self.swap_space.discard(request)

    def _detach(self, request: Request) -> None:
        """Take a running request from among those that compute."""
        if request.joined >= 0:
            self._leave(request)
        else:
            self.partial.remove(request)
