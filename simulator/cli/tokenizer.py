"""The verb `headway tokenizer`: a small tokenizer for machines without a hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def tokenizer(
    folder: Annotated[Path, Parameter(name="DIR", help="folder to write")],
    /,
    *,
    vocab_size: Annotated[int, Parameter(help="tokens, at most")] = 4000,
) -> int:
    """Write a byte-level BPE that `headway serve` and its clients can both count with."""
    from simulator.util.errors import HeadwayError
    from simulator.views.http.tokenizers import train

    if not 300 <= vocab_size <= 100_000:
        raise HeadwayError(f"--vocab-size: {vocab_size} is not between 300 and 100,000")
    count = train(folder, vocab_size)
    print(f"written to {folder}: tokenizer.json, {count:,} tokens")
    return 0
