"""What prompts share, as columns of a table, and read from them.

`prefix_request` and `prefix_tokens`: a prompt begins with so many tokens of an earlier request's
prompt and answer. What lies beyond them is its own, but for its images and clips (`media`). So any
shared text fits into two numbers a request: with the longest such prefix told of each, what any two
prompts share is the least that is told on the way between them.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from simulator.core.request import Media, Segments
from simulator.workload.workload import Workload

MEDIA = "media"
Parts = list[tuple[Hashable, int]]


def prefix_columns(
    segments: Sequence[Segments | None], outputs: Sequence[int]
) -> dict[str, list[Any]]:
    """Return the columns that tell what prompts share, answers of so many tokens, too; {} for none.

    `prefix_request` is -1 where nothing is shared; `media` is KIND:NUMBER:TOKENS@START of each
    image or clip behind the prefix, "" for none.
    """
    if not any(segments):
        return {}
    owners, shared, media = [], [], []
    longest: dict[tuple[int, Hashable], tuple[int, int]] = {}  # of the runs behind a prefix
    follow: dict[tuple[int, Hashable, int], int] = {}  # the prefix that a whole run leads to
    numbers: dict[Media, int] = {}
    for i, parts in enumerate(segments):
        prefix, seen, owner, tokens, at = 0, True, -1, 0, 0
        items = []
        for name, count in (*(parts or ()), (("out", i), outputs[i])):
            known, whose = longest.get((prefix, name), (0, -1))
            if seen and known:
                owner, tokens = whose, tokens + min(known, count)
            if isinstance(name, Media) and at >= tokens:
                number = numbers.setdefault(name, len(numbers))
                items.append(f"{name.modality}:{number}:{count}@{at}")
            if count > known:
                longest[prefix, name] = count, i
            seen = seen and (prefix, name, count) in follow
            prefix = follow.setdefault((prefix, name, count), len(follow) + 1)
            at += count
        owners.append(owner)
        shared.append(tokens)
        media.append(" ".join(items))
    columns: dict[str, list[Any]] = {"prefix_request": owners, "prefix_tokens": shared}
    return columns | ({MEDIA: media} if any(media) else {})


def shared_prefix_tokens(workload: Workload) -> int | None:
    """Count the input tokens that are a prefix of an earlier prompt; None without contents.

    Also of its answer. A cache without bounds would find as many, but for the rounding to its own
    blocks.
    """
    columns = prefix_columns(workload.segments or (), workload.output_tokens.tolist())
    return sum(columns["prefix_tokens"]) if columns else None


def read_prefixes(
    columns: Mapping[str, Any], prompts: Sequence[int], outputs: Sequence[int]
) -> list[Segments | None] | None:
    """Return the contents of prompts that such columns tell, or others; None: nothing is told.

    `prefix` with `prefix_tokens`: prompts of one group begin with the same tokens. `prefix` alone:
    requests of one id, a conversation, begin with the prompt and answer that came before.
    `warm`, tokens that an engine found: all begin alike for so long.
    ValueError for what is no prefix.
    """
    groups, tokens = columns.get("prefix"), columns.get("prefix_tokens")
    owners, cached = columns.get("prefix_request"), columns.get("warm")
    continued = owners is not None and tokens is not None
    if groups is None and not continued and cached is None and MEDIA not in columns:
        return None
    found: list[Segments | None] = [None] * len(prompts)
    last: dict[object, int] = {}

    def answered(i: int) -> Segments:
        return (*(found[i] or ()), (("out", i), outputs[i]))

    for i in _in_order(columns, len(prompts)):
        prompt = prompts[i]
        head: Segments = ()
        if owners is not None and tokens is not None:
            if owners[i] >= i:
                raise ValueError(f"{owners[i]} is no request before it")
            owner = int(owners[i])
            head = () if owner < 0 else first_tokens(answered(owner), int(tokens[i]))
        elif groups is not None and tokens is not None and groups[i] != "":
            head = ((("prefix", groups[i]), min(int(tokens[i]), prompt)),)
        elif groups is not None and tokens is None:
            if groups[i] != "" and (before := last.get(groups[i])) is not None:
                head = first_tokens(answered(before), prompt)
            last[groups[i]] = i
        elif cached is not None:
            head = ((("cached",), min(int(cached[i]), prompt)),)
        media = columns[MEDIA][i] if MEDIA in columns else ""
        found[i] = _completed(head, media, prompt, i)
    return found


def _in_order(columns: Mapping[str, Any], size: int) -> Sequence[int]:
    """Return the requests as they stand, or, where they name conversations, as they arrive."""
    if "prefix" not in columns or "prefix_tokens" in columns or "arrival" not in columns:
        return range(size)
    return sorted(range(size), key=lambda i: (columns["arrival"][i], i))


def first_tokens(parts: Segments, tokens: int) -> Segments:
    """Return the runs that so many tokens begin with."""
    found: Parts = []
    for name, count in parts:
        if taken := min(count, tokens):
            found.append((name, taken))
        tokens -= taken
    return tuple(found)


def _completed(head: Segments, media: str, prompt: int, i: int) -> Segments:
    """Put a request's own images and text behind what it shares, up to its prompt's length."""
    parts: Parts = [part for part in head if part[1]]
    at = sum(count for _, count in parts)

    def fill(upto: int) -> int:
        if upto > at:
            parts.append((("in", i, at), upto - at))
        return max(upto, at)

    for item in media.split():
        kind, number, where = item.split(":")
        size, _, start = where.partition("@")
        at = fill(int(start))
        parts.append((Media(kind, int(number)), int(size)))
        at += int(size)
    fill(prompt)
    if sum(count for _, count in parts) != prompt:
        raise ValueError(f"prefix and media do not fit {prompt} tokens")
    return tuple(parts)
