"""What a calibration measures: its sizes, and a grid of decodes, prompts and both together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, TypeAlias

import numpy as np
from cyclopts import Parameter

from calibration.engine_steps.steps_file import Chunks
from headway.cli.options import whole
from simulator.util.errors import HeadwayError

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
CONTEXTS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384)
CHUNK_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_TOKENS = (0, 256, 1024, 4096, 16384)
MIXED_BATCHES = (1, 8, 32, 128)
MIXED_CONTEXTS = (64, 512, 2048, 8192)
SHORTEST_CONTEXT = 16  # tokens of context where a step's products alone are of interest
DENSE_TOKENS = (1, 2, 3, 4, 6, *range(8, 64, 8), *range(64, 257, 16), *range(288, 2049, 32))

LONGEST = 4096  # tokens of context, unless another length is asked for
LEAST_LENGTH = 64  # of the longest context, for a grid of contexts that tells anything
NoGraphs = Annotated[
    bool, Parameter(negative="", help="launch every step kernel by kernel, also on a GPU")
]
GRAPH_TOKENS = 512  # as vLLM 0.33 (max_cudagraph_capture_size)


Candidate: TypeAlias = tuple[str, Sequence[int], Sequence[tuple[int, int]], bool]
"""Kind, contexts, pieces of prompts, whether it is coarse."""


@Parameter(name="*")
@dataclass(frozen=True)
class Setup:
    """What to measure."""

    model: Annotated[str | None, Parameter(help="shipped model, or the path of a config.json")] = (
        None
    )
    device: Annotated[str, Parameter(help="cpu or cuda")] = "cpu"
    budget_s: Annotated[float, Parameter(help="seconds to measure, at most")] = 480.0
    num_blocks: Annotated[int, whole(), Parameter(help="KV blocks of the engine")] = 4096
    block_size: Annotated[int, whole(), Parameter(help="tokens in a block")] = 16
    max_num_seqs: Annotated[int, whole(), Parameter(help="most sequences in a step")] = 64
    max_num_batched_tokens: Annotated[int, whole(), Parameter(help="most tokens in a step")] = 512
    max_model_len: Annotated[
        int | None,
        whole(),
        Parameter(help=f"longest context, tokens [default: {LONGEST}, or the model's positions]"),
    ] = None
    seed: Annotated[int, whole(0), Parameter(help="seed of order, weights and workloads")] = 0
    graph_tokens: Annotated[
        int,
        whole(0),
        Parameter(help="most tokens of a step with prompts that runs as a CUDA graph; 0: none"),
    ] = GRAPH_TOKENS
    no_graphs: NoGraphs = False

    def check(self) -> None:
        """Raise HeadwayError, by option, for sizes that nothing can be measured with."""
        tokens, room = self.max_num_batched_tokens, (self.num_blocks - 1) * self.block_size
        length = self.max_model_len
        checks = {
            f"--budget-s {self.budget_s}: must be more than 0 seconds": not 0 < self.budget_s < inf,
            f"--num-blocks {self.num_blocks}: must have {2 * LEAST_LENGTH} tokens or more, and one "
            "block besides": room < 2 * LEAST_LENGTH,
            f"--max-num-batched-tokens {tokens}: must be at least --max-num-seqs": (
                tokens < self.max_num_seqs
            ),
            f"--max-model-len {length}: must be at least {LEAST_LENGTH}": (
                length is not None and length < LEAST_LENGTH
            ),
        }
        if wrong := [message for message, is_wrong in checks.items() if is_wrong]:
            raise HeadwayError(wrong)


@dataclass(frozen=True)
class Limits:
    """What the engine under measurement can hold and what its scheduler would give it."""

    sequences: int  # max_num_seqs
    tokens: int  # max_num_batched_tokens
    length: int  # max_model_len
    cache: int  # tokens in the KV cache


@dataclass(frozen=True)
class Point:
    """One step to measure: contexts before it of its decodes, and its pieces of prompts."""

    number: int
    kind: str  # decode, prefill, mixed
    contexts: tuple[int, ...]
    chunks: Chunks
    coarse: bool  # measured first

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache once it is done."""
        return sum(self.contexts) + len(self.contexts) + sum(map(sum, self.chunks))


def make_grid(limits: Limits, rng: np.random.Generator) -> list[Point]:
    """List the points that fit the limits: a grid, skewed batches, prompts of all sizes."""
    candidates: list[Candidate] = [*_decodes(limits), *_prompts(limits), *_mixtures(limits, rng)]
    candidates += [*_skewed(limits, rng), *_dense(limits)]
    points: list[Point] = []
    for kind, contexts, chunks, coarse in candidates:
        point = Point(len(points), kind, tuple(contexts), tuple(chunks), coarse)
        tokens = len(contexts) + sum(new for _, new in chunks)
        longest = max([*contexts, *(start + new for start, new in chunks)])
        fits = len(contexts) + len(chunks) <= limits.sequences and tokens <= limits.tokens
        if fits and longest < limits.length and point.kv_tokens <= limits.cache:
            points.append(point)
    return points


def _decodes(limits: Limits) -> Iterator[Candidate]:
    """Every batch at every context, all sequences of a batch alike."""
    for batch in BATCHES:
        for context in CONTEXTS:
            coarse = batch in {1, 8, 32, 128} and context in {64, 1024, 4096}
            yield "decode", [context] * batch, [], coarse


def _prompts(limits: Limits) -> Iterator[Candidate]:
    """Pieces of one prompt after every history, and several short prompts at once."""
    for size in CHUNK_SIZES:
        for history in CACHED_TOKENS:
            yield "prefill", [], [(history, size)], history == 0 and size in {64, 512, 2048}
    for count in (2, 4, 8, 12):  # the last has no CUDA graph
        for size in (32, 128, 512):
            yield "prefill", [], [(0, size)] * count, False


def _mixtures(limits: Limits, rng: np.random.Generator) -> Iterator[Candidate]:
    """Decodes beside a piece of a prompt, every combination that is drawn."""
    sizes = [size for size in (16, 64, 128, 256, 512, 2048) if size < limits.tokens]
    for batch in MIXED_BATCHES:
        for context in MIXED_CONTEXTS:
            for size in sizes:
                if rng.random() < 0.6:
                    history = int(rng.choice([0, 0, 256, 1024]))
                    yield "mixed", [context] * batch, [(history, size)], context == 512


def _skewed(limits: Limits, rng: np.random.Generator) -> Iterator[Candidate]:
    """Batches of any size whose contexts differ by orders of magnitude."""
    top = np.log(min(limits.length - 1, limits.cache // 2))
    for _ in range(40):
        batch = int(np.exp(rng.uniform(0, np.log(limits.sequences + 1))))
        contexts = np.exp(rng.uniform(np.log(SHORTEST_CONTEXT), top, max(batch, 1))).astype(int)
        while len(contexts) > 1 and contexts.sum() + len(contexts) > limits.cache:
            contexts = contexts[:-1]
        yield "decode", contexts.tolist(), [], False


def _dense(limits: Limits) -> Iterator[Candidate]:
    """A prompt of every size that a matrix product's tiles may tell apart."""
    for size in DENSE_TOKENS:
        if size > 1:
            yield "prefill", [], [(0, size)], False
