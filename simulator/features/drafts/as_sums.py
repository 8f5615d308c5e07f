"""Speculative decoding as vLLM V1 schedules it (0.33): decodes verify drafts beside their token.

Every request that decodes wants 1 + k tokens of the budget, k drafts included; of the drafts those
up to the first rejected one come out, and one token more. A prompt's last chunk has no drafts to
verify, nor has a request that is computed again after a preemption. Where the budget ends, drafts
are cut off. The slots of rejected drafts stay in the request's table for the next step.

What a request accepts is a stream of its own, so its way from here to its end is known as soon as
it decodes: how much it verifies, reads, takes and brings out at each of the next ticks. The decode
set keeps these as sums over its members, tick by tick: adding a member is adding a few short
arrays, and a step then costs the same whoever decodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from simulator.core.decode_set import DecodeSet
from simulator.core.log import StepRow, pack_draft
from simulator.core.request import Chunk, Request, Step
from simulator.features.drafts.blocks import SlotCounter
from simulator.features.drafts.rows import verified_row
from simulator.schedulers.vllm.scheduler import Options, Scheduler
from simulator.util.errors import ScenarioError

Ints = npt.NDArray[np.int64]
ROWS = 7
"""Of the sums: tokens verified; KV entries read, those included; blocks taken less those that
left a window; blocks taken; tokens that come out; drafts accepted, those beyond their request's end
included; tokens stored after the step, in all groups of layers."""


class Speculative(Scheduler):
    """The scheduler of vLLM V1 with speculative decoding; the arguments are those of Scheduler.

    `seed` is that of what is accepted. There is no leap: a step is cheap. For a prefix cache, or
    steps decided ahead, requests are looked at one by one (`walk.py`).
    """

    blocks: SlotCounter
    decodes: "DraftedSet"

    def __init__(self, blocks: SlotCounter, **options: Unpack[Options]) -> None:
        super().__init__(blocks, **options)
        speculation = self.limits.speculation
        assert speculation is not None
        self.settle_queue = None  # a queue that settles does when it is asked for its head
        self.speculation = speculation
        self._streams: dict[Request, Sequence[int]] = {}
        self.most_drafts = speculation.num_speculative_tokens
        self.decodes = DraftedSet(blocks, self.most_drafts, self.accepted)
        blocks.looks_ahead_at_once = self.rules.looks_ahead_at_once
        self._slots_ahead = self.most_drafts + speculation.lookahead  # of a request's last step
        self._start = 0  # tokens of the prompt at hand that the prefix cache has
        if self.rules.counts_draft_slots:
            self.draft_slots = self.decodes.draft_slots = speculation.draft_slots
        elif self.rules.reserves_draft_slots:
            self.max_num_scheduled_tokens -= speculation.draft_slots * self.max_num_seqs
            if self.max_num_scheduled_tokens <= 0:
                what = "the slots of the drafts take all of it"
                raise ScenarioError("engine.max_num_batched_tokens", what)
        if 0 < self.long_prefill_token_threshold <= self.most_drafts:
            what = f"{self.long_prefill_token_threshold} would cut off drafts: must be 0 or more "
            what += f"than num_speculative_tokens ({self.most_drafts})"
            raise ScenarioError("engine.long_prefill_token_threshold", what)

    def accepted(self, request: Request) -> Sequence[int]:
        """Return how many drafts are accepted at each position of a request's answer."""
        stream = self._streams.get(request)
        if stream is None:
            stream = self.speculation.accepted(
                self.limits.draft_seed, request.id, request.output_limit
            )
            self._streams[request] = stream
        return stream

    def fits(self, request: Request) -> bool:
        """Say whether the request could ever run: its last drafts need blocks, too."""
        last = request.prompt_tokens + self.output_limit(request) - 1
        most = self.blocks.most_held(min(last + self._slots_ahead, self.max_model_len))
        return request.prompt_tokens < self.max_model_len and most <= self.blocks.usable

    def track_longest(self) -> None:
        """Leave `Step.longest` at 0: the set knows no single member's length."""

    def plan(self, cap: int) -> list[tuple[Request, int]] | None:
        if any(map(_verifies, self.running.partial)) or (self.draft_slots and self.running.partial):
            return None
        return super().plan(cap)

    def decode_all(self, step: Step) -> int:
        queries, step.context, need, *_ = self.decodes.now()
        self.blocks.free -= need
        step.decodes = self.decodes.count
        step.drafts = queries - step.decodes
        return queries + self.draft_slots * step.decodes

    def admit(self, step: Step, budget: int, cap: int) -> None:
        alike = self.speculation.num_speculative_tokens_per_batch_size is None
        self._pads = self.rules.pads_new_decodes and alike and not step.prefills
        self._beside = step.decodes > 0
        super().admit(step, budget, cap)

    def chunk(self, pending: int, budget: int) -> int:
        """Return the tokens of a prompt; of one token, with places for drafts or not at all."""
        room = self.max_model_len - self._start - 2
        pads = self._pads and (self._beside or self._start > 0) and self.most_drafts <= room
        if pending > 1 or not pads:
            return super().chunk(pending, budget)
        return 1 + self.most_drafts if self.most_drafts < budget else 0

    def admit_head(self, step: Step, hits: Sequence[int], start: int, tokens: int) -> None:
        request = self.waiting.head()
        super().admit_head(step, hits, start, tokens)
        # Nobody has drafted what is in the places of a new decode: it is rejected.
        request.computed = min(request.computed, request.known)

    def tokens_wanted(self, request: Request) -> int:
        if not _verifies(request):
            return request.pending
        room = self.max_model_len - 1 - request.computed
        return min(1 + self.most_drafts, room)

    def finish(self, request: Request, now: float) -> None:
        self._streams.pop(request, None)
        super().finish(request, now)

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self._streams.pop(request, None)

    def commit(self, step: Step, ends: Sequence[float]) -> list[Request]:
        """Apply the outcome of `step`; what its drafts bring out, the last token included."""
        for chunk in step.singles or ():
            chunk.request.generated += self._outcome(chunk)[0] - 1
        return super().commit(step, ends)

    def _outcome(self, chunk: Chunk) -> tuple[int, int]:
        """Return the tokens that come out of a decode outside the set, and the drafts accepted."""
        request, drafts = chunk.request, chunk.tokens - 1
        if not drafts:
            return 1, 0
        accepted = min(self.accepted(request)[request.generated], drafts)
        return min(1 + accepted, request.output_limit - request.generated), accepted

    def horizon(self, step: Step) -> int:
        return 1

    def account(self, step: Step) -> StepRow:
        """Count rejected drafts as wasted. Note the drafts, too."""
        row = super().account(step)
        if step.decodes:
            *_, tokens, accepted, _ = self.decodes.now()
            for chunk in step.singles or ():
                out, right = self._outcome(chunk)
                tokens += out
                accepted += right
            row = verified_row(row, step, tokens)
            self.drafts += pack_draft(self.now, step.decodes, step.drafts, accepted)
        return row

    def stored(self, step: Step) -> int:
        """Tokens of use in the blocks in use when `step`, just scheduled, is over."""
        out = {chunk.request: self._outcome(chunk)[0] - 1 for chunk in step.singles or ()}
        stored = self.decodes.now()[-1]
        for request in self.running.partial:
            tokens = min(request.computed, request.known) + out.get(request, 0)
            stored += self.blocks.stored(tokens)
        return stored


def _verifies(request: Request) -> bool:
    """Say whether a request outside the set has drafts to verify: it was in it when it ran last."""
    return request.last_tick >= 0


@dataclass(slots=True)
class Path:
    """A member's way to its end: a column of sums and the tokens out, for each tick."""

    sums: Ints
    generated: list[int]  # before each tick, and at last
    tables: list[tuple[int, int]]  # before each tick, and at last


class DraftedSet(DecodeSet):
    """Requests that verify `drafts` draft tokens each, and what that takes tick by tick.

    `accepted(request)` gives how many are accepted at each position of its answer.
    """

    def __init__(
        self, blocks: SlotCounter, drafts: int, accepted: Callable[[Request], Sequence[int]]
    ) -> None:
        super().__init__(blocks.block_size)
        self.alike = False
        self.slots = blocks
        self.drafts = drafts
        self.draft_slots = 0  # of the budget, for each member
        self.accepted = accepted
        self.paths: dict[Request, Path] = {}
        self._sums: Ints = np.zeros((ROWS, 256), np.int64)
        self._first = 0  # the tick of the first column

    def now(self) -> list[int]:
        """Return the sums of the next tick, row by row."""
        at = self.tick - self._first
        found: list[int] = self._sums[:, at].tolist() if self.count else [0] * ROWS
        return found

    def join(self, request: Request, ticks: int) -> None:
        """Take in a request that has `ticks` more tokens to bring out."""
        path = self.paths[request] = self._path(request, ticks)
        steps = len(path.generated) - 1
        self._columns(steps)[:] += path.sums
        self.joins += 1
        request.joined = self.tick
        self.end_after(request, steps)
        self.count += 1

    def leave(self, request: Request) -> int:
        """Let a member go, bring its own counters up to date, return its ticks in the set."""
        path = self.paths.pop(request)
        ticks = self.tick - request.joined
        left = len(path.generated) - 1 - ticks
        self._columns(left)[:] -= path.sums[:, ticks:]
        request.computed = request.prompt_tokens + path.generated[ticks] - 1
        self.slots.tables[request] = path.tables[ticks]
        request.joined = -1
        self.count -= 1
        return ticks

    def generated(self, request: Request, ahead: int = 0) -> int:
        """Count a request's tokens that have come out."""
        path, tick = self.paths.get(request), self.tick - ahead
        return request.generated if path is None else path.generated[tick - request.joined]

    def verified(self, request: Request) -> tuple[int, int]:
        """Count the tokens that a member computes at the next tick, and those that it has."""
        path, at = self.paths[request], self.tick - request.joined
        return int(path.sums[0, at]), request.prompt_tokens + path.generated[at] - 1

    def demand(self) -> tuple[int, int]:
        """Count the tokens and the blocks that the next tick takes, before any are given back."""
        queries, _, _, taken, *_ = self.now()
        return queries + self.draft_slots * self.count, taken

    def _path(self, request: Request, left: int) -> Path:
        """Follow a request to its end."""
        said, end = request.generated, request.generated + left
        accepted = self.accepted(request)
        positions = []
        while said < end:
            positions.append(said)
            said += 1 + accepted[said]
        at = np.array(positions, np.int64)
        after = np.minimum(np.append(at[1:], end), end)[: len(at)]
        room = self.slots.max_model_len - request.prompt_tokens - 1 - at  # as vLLM: no draft beyond
        drafts = np.minimum(self.drafts, room)
        taken = np.minimum(np.array(accepted, np.int64)[at], drafts)
        reads = request.prompt_tokens + at + drafts
        before = request.prompt_tokens + at - 1
        tables, gone = self._tables(self.slots.tables[request], reads, before)
        groups = self.slots.groups
        held = groups.full * tables + groups.windowed * (tables - gone)
        kept = before + after - at
        stored = groups.full * kept + groups.windowed * np.minimum(kept, groups.window)
        grown = (groups.full + groups.windowed) * np.diff(tables)
        sums = np.stack([drafts + 1, reads, np.diff(held), grown, after - at, taken, stored])
        return Path(sums, [*positions, end], list(zip(tables.tolist(), gone.tolist(), strict=True)))

    def _tables(self, held: tuple[int, int], reads: Ints, before: Ints) -> tuple[Ints, Ints]:
        """Return a table's entries and those out of the window, now and after each tick."""
        slots, size = self.slots, self.block_size
        ends = np.minimum(reads + slots.lookahead, slots.max_model_len)
        tables = np.maximum(np.append(held[0], -(-ends // size)), held[0])
        gone = np.maximum(before + 1 - slots.groups.window, 0) // size
        gone = np.append(held[1], gone if slots.groups.windowed else np.zeros_like(gone))
        return tables, gone

    def _columns(self, ticks: int) -> Ints:
        """Return the sums of so many ticks from the next one on."""
        at = self.tick - self._first
        if at + ticks >= self._sums.shape[1]:
            rest = self._sums[:, at:]
            self._sums = np.zeros((ROWS, 2 * (rest.shape[1] + ticks)), np.int64)
            self._sums[:, : rest.shape[1]] = rest
            self._first, at = self.tick, 0
        return self._sums[:, at : at + ticks]
