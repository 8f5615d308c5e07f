"""The block `engine.speculative_config` of a scenario: drafts, what they are worth and cost.

What a draft model would say is not simulated: whether a draft token is accepted is drawn.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from simulator.util.config import Config, Share
from simulator.util.errors import MappingError
from simulator.util.files import read_table
from simulator.util.from_mapping import Field, short_repr

MOST_DRAFTS = 64
TYPICAL = ("eagle", "eagle3", "mtp")
"""Methods of which one number says something; what ngram finds is a matter of the text."""
VLLM_DRAFTS = (
    "num_speculative_tokens_per_batch_size",
    "disable_eagle_block_drop",
    "disable_lookahead_block_hashes",
)
"""Keys of vLLM's own SpeculativeConfig that SGLang has not."""
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class DraftConfig(Config):
    """What drafting takes, beside the target's own step: the sum of the terms given."""

    seconds: Seconds = Field(0.0, description="s of each of num_speculative_tokens draft steps")
    seconds_per_sequence: Seconds = Field(
        0.0, description="s more for each sequence in each draft step"
    )
    fraction: Share = Field(
        0.0,
        description="share of the verified step for the first draft step, of a plain decode step "
        "for others",
    )


def published(method: str | None, model: str) -> dict[str, Any]:
    """Return what `acceptance.csv` has of a method, on this model, else on all of its models.

    `mean`, `least` and `most` are shares, `where` names target and source of each.
    """
    rows = [row for row in read_table(__file__, "acceptance.csv") if row["method"] == method]
    rows = [row for row in rows if model and row["model"] == model] or rows
    each = [float(one) for row in rows for one in re.findall(r"0\.\d+", row["acceptance"])]
    where = dict.fromkeys(f"{row['target']} ({row['source']})" for row in rows)
    return {"mean": fmean(each), "least": min(each), "most": max(each), "where": ", ".join(where)}


def _by_batch_size(value: object) -> object:
    """Let through ranges of batch sizes from 1 on, none of them within another, and drafts."""
    end = 0
    for one in value if isinstance(value, list) else []:
        good = isinstance(one, list) and len(one) == 3 and all(type(each) is int for each in one)
        if not good or not end < one[0] <= one[1] or (not end and one[0] != 1) or one[2] < 0:
            raise MappingError(
                "",
                "must be a list of [first, last, drafts], whole numbers, in order from batch "
                f"size 1 on, not {short_repr(value)}",
            )
        end = one[1]
    return value


def _acceptance(value: object) -> object:
    """Let through a probability, or a list of them, or `typical`."""
    each = value if isinstance(value, list) else [] if value == "typical" else [value]
    for one in each:
        good = isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= 1
        if not good:
            raise MappingError(
                "", f"must be from 0 to 1, or a list of such numbers, not {short_repr(value)}"
            )
    return value


def draft_method(block: Mapping[str, Any]) -> str:
    """Return how a block's drafts are made: as vLLM, by the model's name where it has no method."""
    model = str(block.get("model") or "").lower()
    named = "eagle" if "eagle-" in model else "eagle3" if "eagle3" in model else "draft_model"
    return str(block.get("method") or (named if model or block.get("draft") else "ngram"))


class SpeculativeConfig(Config):
    """Speculative decoding, with vLLM's names for what vLLM has."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"] | None = Field(
        None,
        description="null: draft_model if `draft` is given, else ngram",
    )
    model: str | None = Field(
        None,
        description="of draft_model: a name or path; null: its weights and cache are not counted",
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] = Field(
        description="drafts that a step verifies for each sequence"
    )
    num_speculative_tokens_per_batch_size: Annotated[list[list[int]] | None, _by_batch_size] = (
        Field(
            None,
            description="[first, last, drafts] after a step of first to last requests; the "
            "first is 1",
        )
    )
    speculative_eagle_topk: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] = Field(
        1, description="SGLang: branches of the drafts' tree, of num_speculative_tokens steps"
    )
    speculative_num_draft_tokens: Annotated[int | None, Field(ge=2, le=1024)] = Field(
        None,
        description="SGLang: tokens that a step verifies for each sequence; null: "
        "num_speculative_tokens + 1",
    )
    disable_eagle_block_drop: bool = Field(
        False, description="EAGLE and MTP find blocks of a prompt as other methods do"
    )
    disable_lookahead_block_hashes: bool = Field(
        False,
        description="EAGLE and MTP do not use the last block that they find, as before 0.33",
    )
    acceptance: Annotated[Share | list[Share] | Literal["typical"], _acceptance] = Field(
        description="probability that a draft is accepted if all before were; or one per "
        "position; or typical (eagle, eagle3, mtp)"
    )
    draft: DraftConfig | None = Field(
        None, description="cost of drafting; null: by the weights that it reads (ngram: 0)"
    )

    def _open(self, value: Any) -> Any:
        """Put the method in, where it is not given."""
        return value | {"method": draft_method(value)} if isinstance(value, dict) else value

    def _check(self) -> None:
        k = self.num_speculative_tokens
        if self.speculative_eagle_topk == 1 and self.verified != k + 1:
            what = f"must be num_speculative_tokens + 1 ({k + 1}) where drafts are a chain"
            raise MappingError("speculative_num_draft_tokens", what)
        if isinstance(self.acceptance, list) and len(self.acceptance) != k:
            raise MappingError(
                "acceptance",
                f"must be one probability for each of the num_speculative_tokens ({k}), not "
                f"{len(self.acceptance)} of them",
            )
        if self.acceptance == "typical" and self.method not in TYPICAL:
            what = f"typical is known of {', '.join(TYPICAL)}; give a number"
            raise MappingError("acceptance", what)

    def on(self, model: str) -> Self:
        """Return it with the acceptance that is published of drafts for a model, where asked."""
        if self.acceptance != "typical":
            return self
        return self.model_copy(update={"acceptance": published(self.method, model)["mean"]})

    @property
    def lookahead(self) -> int:
        """KV slots beyond the verified tokens that a sequence holds for the next drafts.

        As vLLM 0.33's Scheduler: num_lookahead_tokens is that of the drafts for EAGLE, MTP and
        draft models, which write KV of their own, and 0 for ngram.
        """
        return self.num_speculative_tokens if self.method != "ngram" else 0

    @property
    def reads_next(self) -> bool:
        """Say whether a block found is of use only if the token behind it is the same, too."""
        own = self.method in ("eagle", "eagle3", "mtp")
        return own and not self.disable_eagle_block_drop

    @property
    def draft_slots(self) -> int:
        """Tokens of the budget that a request's drafts take beside those that are verified.

        As vLLM 0.33's SpeculativeConfig.max_num_new_slots_for_drafting, without parallel drafting.
        """
        return int(self.method == "draft_model")

    @property
    def is_tree(self) -> bool:
        """Whether drafts are more than a chain of num_speculative_tokens."""
        return self.speculative_eagle_topk > 1 or self.verified != self.num_speculative_tokens + 1

    @property
    def verified(self) -> int:
        """Tokens that SGLang verifies of a sequence: of the tree of drafts, and one more."""
        return self.speculative_num_draft_tokens or self.num_speculative_tokens + 1

    def reserve(self, page_size: int) -> int:
        """Tokens beyond those stored for which SGLang sets memory aside, twice what a step takes.

        As SGLang 0.5.23's get_alloc_reserve_per_decode.
        """
        steps, branches = self.num_speculative_tokens, self.speculative_eagle_topk
        if page_size > 1 and branches > 1:  # each branch begins a page of its own
            steps = (steps + 2 * (page_size - 1)) // page_size * page_size
        return 2 * max(steps * branches, self.verified)

    def drafts_after(self, requests: int) -> int:
        """Count the drafts that are made for each sequence after a step of so many requests."""
        most, found = self.num_speculative_tokens, self.num_speculative_tokens
        for first, _, drafts in self.num_speculative_tokens_per_batch_size or ():
            if first <= requests:
                found = drafts
        return min(found, most)

    @cached_property
    def _survival(self) -> npt.NDArray[np.float64]:
        """Probabilities that the last, the last but one, ... drafts are accepted; ascending."""
        k = self.num_speculative_tokens
        given = self.on("").acceptance
        each = given if isinstance(given, list) else [given] * k
        survival: npt.NDArray[np.float64] = np.multiply.accumulate(each, dtype=np.float64)
        return survival[::-1]

    def accepted(self, seed: int, request: int, count: int) -> list[int]:
        """Draw how many drafts are accepted where a request has said 0, 1, ... `count` - 1 tokens.

        The stream is Philox (Salmon et al., SC'11) keyed by seed and request, with one number for
        each position of the answer: so what is accepted there depends on nothing else, neither on
        who else runs nor on preemptions.
        """
        draws = np.random.Generator(np.random.Philox(key=[seed, request])).random(count)
        k = self.num_speculative_tokens
        right = k - np.searchsorted(self._survival, draws, side="right")
        found: list[int] = np.minimum(right, self.verified - 1).tolist()
        return found
