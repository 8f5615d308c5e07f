"""How much of the prompts a prefix cache that never forgets would know."""

from simulator.workload.workload import Workload

LOOKED_AT = 100_000  # requests, at most


def known_share(workload: Workload, block_size: int) -> float:
    """Give the share of the prompt tokens that begin as those of an earlier prompt do.

    A segment counts as known where an earlier prompt has the same one after the same beginning;
    whole blocks of `block_size` tokens count, and never a prompt's last token (vLLM computes it).
    """
    if workload.segments is None:
        return 0.0
    known = total = 0
    numbers: dict[tuple[int, object], int] = {}  # of a beginning: by that before it and a segment
    for segments, tokens in zip(
        workload.segments[:LOOKED_AT], workload.prompt_tokens[:LOOKED_AT].tolist(), strict=True
    ):
        total += tokens
        beginning, alike, new = 0, 0, False
        for segment in segments or ():
            key = (beginning, segment)
            new = new or key not in numbers
            alike += 0 if new else segment[1]
            beginning = numbers.setdefault(key, len(numbers) + 1)
        known += min(alike, tokens - 1) // block_size * block_size
    return known / total if total else 0.0
