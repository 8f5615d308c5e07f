"""What changed in vLLM V1's scheduler from release to release: rules, options, families.

Read in the sources of the releases named here, and replayed from schedules recorded from them
(`docs/conformance.md`). One scheduler follows them all: each rule is a switch of `Rules`, whose
defaults are those of the newest known.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any

from simulator.util.errors import HeadwayError

Release = tuple[int, int, int]

OLDEST, NEWEST = (0, 10), (0, 33)
"""Major and minor numbers of the versions known."""
NEWEST_RELEASE: Release = (*NEWEST, 0)
"""What is followed where a scenario names no version."""
OLDEST_ALIKE = (0, 8)
"""The versions of V1 before decide as the oldest; that was read in their sources, not replayed."""
V0_UNTIL = (0, 10, 2)
"""The last release that had the V0 engine, too."""
LAST_PATCHES = {
    **{(0, minor): 1 for minor in (14, 15, 17, 18, 19, 22, 25, 27)},
    **{(0, minor): 2 for minor in (9, 10, 11, 20)},
    **{(0, minor): 3 for minor in (3, 4, 7)},
    **{(0, minor): 5 for minor in (5, 8)},
    **{(0, minor): 7 for minor in (1, 2)},
    (0, 6): 6,
}
"""The last patch release of each version that has more than its first, as on PyPI; a version
without a patch means it."""
OTHER_RELEASES = ("0.8.5.post1", "0.9.0.1", "0.10.1.1")


class CannotFollowError(HeadwayError):
    """A version does what nobody can say the outcome of."""


def _since(*release: int) -> Any:
    """Make a rule that the releases from this one on have."""
    return field(default=True, metadata={"since": release})


@dataclass(frozen=True)
class Rules:
    """What a version does; False: as it did before."""

    stops_at_last_token: bool = _since(0, 11, 1)
    """Asynchronous: a request whose last token is on its way is not scheduled. Before, it was once
    more, and what came of it was dropped."""
    withdraws_tokens: bool = _since(0, 11, 1)
    """What a victim was given in this step is taken back. Before, it stayed in the batch, computed
    on blocks that were free, and counted as computed: nobody can say what came of that."""
    stops_at_long_head: bool = _since(0, 12, 0)
    """Without chunked prefill, a head whose prompt is longer than what is left of the budget ends
    admission. Before, it was set aside and those behind it were tried."""
    splits_free_list: bool = _since(0, 24, 0)
    """Freed blocks without a hash go to the head of the free list. Before, all went to its tail."""
    goes_back_after_victim: bool = _since(0, 28, 0)
    """The walk over the running list allows for a victim before it that had no tokens in this step.
    Before, it then passed one request over."""
    lifts_cap_for_one: bool = _since(0, 31, 0)
    """`long_prefill_token_threshold` does not hold for a request that is alone."""
    walks_on_after_self: bool = _since(0, 33, 0)
    """Priorities: when a request preempts itself, those behind it have their turn in this step."""
    masks_windows: bool = _since(0, 23, 0)
    """A window's group names the blocks that a hit may need, of a window of one token none. Before,
    all."""
    passes_over_items: bool = _since(0, 33, 0)
    """A waiting request that gets no token for want of encoder budget or cache is passed over.
    Before, it ended admission."""
    keeps_first_item_whole: bool = _since(0, 33, 0)
    """`disable_chunked_mm_input` holds for an item at which a chunk begins, too."""
    counts_all_adapters: bool = _since(0, 33, 0)
    """`max_loras` counts the adapters of all who run. Before, of those scheduled in this step."""
    offers_again: bool = _since(0, 33, 0)
    """Offloading: a preempted request's blocks are offered to the host from the first on."""
    reserves_draft_slots: bool = _since(0, 17, 0)
    """Drafts of a draft model take a slot of the budget for each request. Before 0.28, one for each
    of `max_num_seqs`, whoever runs."""
    counts_draft_slots: bool = _since(0, 28, 0)
    """Those slots are taken by the requests that a step schedules, one for each."""
    looks_ahead_at_once: bool = _since(0, 23, 0)
    """A request takes the slots of its first drafts as it is admitted. Before, in its next step."""
    caches_outcomes: bool = _since(0, 33, 0)
    """Blocks that drafts fill are cached with the outcome, also in step. Before, in step, when
    their request was scheduled next."""
    hashes_beyond: bool = _since(0, 33, 0)
    """EAGLE and MTP: a block's hash covers the token behind it. Before, a prompt did not use the
    last block that it found."""
    rests_states: bool = _since(0, 33, 0)
    """A state that a request has named is new in one step alone. Before, as long as the request is
    in the block behind it."""
    keeps_last_state: bool = _since(0, 32, 0)
    """Of a prompt that fills its last block, a chunk ends one block before: there it can be found.
    Before, at its end, which no prompt finds."""
    pads_new_decodes: bool = _since(0, 25, 0)
    """A request admitted for one token beside others that decode has places for drafts, too."""
    admits_cached: bool = _since(0, 25, 0)
    """While prefill is held back, a waiting request that lacks one token alone is admitted."""
    ranks_by_request: bool = _since(0, 33, 0)
    """Offloading: what a running request stores or loads is as old as its first such block, and the
    last block of its prompt goes first. Before, each was as old as itself."""


NEWEST_RULES = Rules()
RULES_SINCE: dict[str, Release] = {one.name: one.metadata["since"] for one in fields(Rules)}
"""The first release with each rule."""
OPTIONS_SINCE: dict[str, tuple[Release, Any]] = {
    "scheduler_reserve_full_isl": ((0, 19, 0), False),
    "watermark": ((0, 24, 0), 0.0),
    "max_num_scheduled_tokens": ((0, 26, 0), None),
    "prefix_cache_retention_interval": ((0, 29, 0), None),
    "long_prefill_token_threshold_adaptive": ((0, 31, 0), False),
    "max_num_active_seqs": ((0, 31, 0), None),
    "prefill_schedule_interval": ((0, 33, 0), 1),
}
"""The first release in which an option has an effect on one engine, and its value before."""
LOCK_STEP_INTERVAL_SINCE: Release = (0, 24, 0)
"""The first release in which `prefill_schedule_interval` has one on ranks in lock-step."""
STATES_SINCE: Release = (0, 30, 0)
"""The first release whose prefix cache of linear attention's and Mamba's states is simulated."""
LIMITS = ("max_num_scheduled_tokens", "max_num_active_seqs")
"""Options that change no decision unless they are given."""
BOUNDARIES = sorted(
    {*RULES_SINCE.values(), *(OPTIONS_SINCE[name][0] for name in {*OPTIONS_SINCE} - {*LIMITS})}
)
"""The releases at which the scheduler changed."""
_STARTS = [(*OLDEST, 0), *BOUNDARIES]


def read_release(text: str) -> Release | None:
    """Read a release out of a version as people write it; None where there is none.

    A version without a patch release, 0.11, means the last one of it.
    """
    found = re.findall(r"(?<![\d-])(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not found:
        return None
    major, minor = int(found[-1][0]), int(found[-1][1])
    patch = found[-1][2]
    return major, minor, int(patch) if patch else LAST_PATCHES.get((major, minor), 0)


def check_known(text: str) -> None:
    """Raise ValueError where a text is no version whose rules are known."""
    plain = re.fullmatch(r"\d+\.\d+(\.\d+)?", text) is not None or text in OTHER_RELEASES
    release = read_release(text) if plain else None
    if release is None or not OLDEST_ALIKE <= release[:2] <= NEWEST:
        before = release is not None and release < OLDEST_ALIKE
        raise ValueError(
            f"must be a version of vLLM whose rules are known, {write_release(OLDEST)} to "
            f"{write_release(NEWEST)} (0.8 and 0.9 decide as {write_release(OLDEST)}), not {text!r}"
            + ", which ran the V0 engine: engine.name=vllm-v0"
            * before
        )
    if release != newest_up_to(release):
        minor = write_release(release[:2])
        last = write_release(newest_up_to(release))
        what = f"must be a release of vLLM: {text} is not known, of {minor} the last is {last}"
        raise ValueError(what)


def newest_up_to(release: Release) -> Release:
    """Get the newest release known of a version that is not above one, as a dev build's may be."""
    return *release[:2], min(release[2], LAST_PATCHES.get(release[:2], 0))


def rules_of(release: Release) -> Rules:
    """Return the rules of a release."""
    return Rules(**{name: release >= since for name, since in RULES_SINCE.items()})


def options_without_effect(release: Release) -> dict[str, Any]:
    """Return the options that a release lacks or ignores, and the values that stand for that."""
    return {name: off for name, (since, off) in OPTIONS_SINCE.items() if release < since}


def families() -> dict[str, Release]:
    """Get the releases from which on the scheduler decided otherwise, by the names of families."""
    return {_family_name(start): start for start in _STARTS}


def family_of(release: Release | None) -> str:
    """Name the versions whose schedulers decide as that of a release; None: the newest known."""
    started = [start for start in _STARTS if release is None or start <= release]
    return _family_name(started[-1] if started else _STARTS[0])


def _family_name(start: Release) -> str:
    after = next((other for other in BOUNDARIES if other > start), None)
    first = write_release(start if start[2] else start[:2])
    if after is None:
        last = write_release(NEWEST)
    elif after[2]:
        last = write_release((after[0], after[1], after[2] - 1))
    elif start[2]:
        last = write_release((*start[:2], LAST_PATCHES[start[:2]]))
    else:
        last = write_release((after[0], after[1] - 1))
    return first if first == last else f"{first} to {last}"


def write_release(numbers: tuple[int, ...]) -> str:
    """Write a release, or its first numbers, as people do."""
    return ".".join(map(str, numbers))
