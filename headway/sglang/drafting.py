"""Drafts in a recording of SGLang: nobody drafts, and which drafts are right is drawn.

As in a simulation of seed 0: by request and place in its answer.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from simulator.core.speculative_config import SpeculativeConfig

PLACES = 4096
"""Of an answer: no case has longer ones."""


def drafting_arguments(folder: Path, *, drafts: bool) -> dict[str, str]:
    """Name the head that drafts, and let SGLang do without a GPU what it does with one."""
    if not drafts:
        return {}
    hook: Any = import_module("sglang.srt.arg_groups.speculative_hook")
    allocation: Any = import_module("sglang.srt.mem_cache.allocation")
    hook._disable_overlap_schedule_for_cpu = lambda _: None
    allocation.assign_req_to_token_pool_func = _assign
    relay: Any = import_module("sglang.srt.managers.overlap_utils")
    relay.gather_spec_extras = _gather
    return {"speculative_draft_model_path": str(folder)}


def _assign(rows: Any, table: Any, starts: Any, ends: Any, *rest: Any) -> None:
    """Write the slots of each request into its row, as SGLang's kernel."""
    done, slots = 0, rest[0]
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[done : done + end - start]
        done += end - start


def _gather(rows: Any, *tables: Any) -> tuple[Any, ...]:
    """Read rows of tables, as SGLang's kernel."""
    return tuple(None if table is None else table[rows] for table in tables)


class Drafting:
    """What a verified step brings: of each request the tokens up to the first wrong draft."""

    def __init__(self, drafts: SpeculativeConfig) -> None:
        self.drafts = drafts
        self._right: dict[int, Sequence[int]] = {}
        self._stored: dict[str, int] = {}  # tokens, when all batches in flight are over

    def rows(self, requests: Sequence[Any], *, verify: bool) -> list[list[int]]:
        """List [id, tokens, tokens before] of requests that decode."""
        tokens = self.drafts.verified if verify else 1
        return [[int(r.rid), tokens, self._stored[r.rid]] for r in requests]

    def compute(self, batch: Any, make: Callable[..., Any], name: Callable[..., int]) -> Any:
        """Return the outcome of a batch; `name` numbers a token by request and place."""
        torch: Any = import_module("torch")
        width, lengths = self.drafts.verified, batch.seq_lens
        verifies = batch.forward_mode.is_decode()
        tokens, last, counts = [], [], []
        for request, length in zip(batch.reqs, lengths.tolist(), strict=True):
            place = length - len(request.origin_input_ids) + verifies
            count = 1 + (self._accepted(int(request.rid), place) if verifies else 0)
            said = [name(int(request.rid), place + number) for number in range(count)]
            counts.append(count)
            self._stored[request.rid] = length + (count if verifies else 0)
            last.append(said[-1])
            tokens += said + [0] * ((width if verifies else 1) - count)
        accepted = torch.tensor(counts, dtype=torch.int64)
        return make(
            next_token_ids=torch.tensor(tokens, dtype=torch.int64),
            accept_lens=accepted if verifies else None,
            speculative_num_draft_tokens=width,
            new_seq_lens=lengths + accepted if verifies else lengths,
            next_draft_input=self._next(torch.tensor(last, dtype=torch.int64)),
        )

    def _accepted(self, request: int, place: int) -> int:
        right = self._right.get(request)
        if right is None:
            right = self._right[request] = self.drafts.accepted(0, request, PLACES)
        return right[max(place, 0)]  # of a prompt that SGLang decodes half read there is no place

    def _next(self, last: Any) -> Any:
        """Make what the next drafts begin with."""
        torch: Any = import_module("torch")
        kind = import_module("sglang.srt.speculative.eagle_info").EagleDraftInput
        count, branches = len(last), self.drafts.speculative_eagle_topk
        return kind(
            topk_p=torch.zeros((count, branches)),
            topk_index=torch.zeros((count, branches), dtype=torch.int64),
            bonus_tokens=last,
            hidden_states=torch.zeros((count, 1)),
        )
