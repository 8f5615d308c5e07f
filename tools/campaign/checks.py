"""All checks of what an engine on CUDA computes, those of the models' own shapes first.

An engine on the Triton kernels and graphs is held against one in plain torch: the same texts,
whatever is padded, shared, preempted or swapped. `python -m tools.campaign.checks` prints a
line of JSON per check; on a machine without CUDA it wants TRITON_INTERPRET=1.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from gpu_backend.cuda import ops
from gpu_backend.cuda.graphs import MIXED_SIZES
from gpu_backend.engine import Engine
from gpu_backend.executor import TorchExecutor
from simulator.core.request import Chunk, Request
from simulator.kv_cache.block_manager import BlockManager
from simulator.models.spec import ModelSpec
from simulator.schedulers.limits import Limits
from simulator.schedulers.vllm.scheduler import Scheduler
from tools.campaign.eager import launched_one_by_one, use_torch
from tools.campaign.kernel_checks import (
    PAGE,
    AttentionShape,
    Row,
    check_attention,
    check_fused,
    check_rope,
    error,
    make_row,
)

SMALL = ModelSpec(
    name="small",
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=256,
    max_position_embeddings=512,
)
NORMED = replace(SMALL, name="normed", qk_norm=True)
MIXED_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of logits, as `check_logits` has
WIDTHS = (16, 512)  # blocks of a row of the block tables that graphs are replayed with


def reference_engine(spec: ModelSpec, device: str, dtype: torch.dtype) -> Engine:
    """Make an engine in plain torch, also on CUDA."""
    engine = Engine(spec, 64, PAGE, device, dtype, graphs=False)
    use_torch(engine)
    _vary_norms(engine)
    return engine


def triton_engine(spec: ModelSpec, device: str, dtype: torch.dtype) -> Engine:
    """Make an engine on the Triton kernels and graphs, also on CPU (in the interpreter)."""
    engine = Engine(
        spec, 64, PAGE, device, dtype, max_num_seqs=8, graphs=False, mixed_sizes=(8, 16, 32)
    )
    _vary_norms(engine)
    engine.use_triton(graphs=True)
    return engine


def _vary_norms(engine: Engine) -> None:
    """Make the weights of the heads' norms other than ones, the same in every engine."""
    random = torch.Generator(engine.device).manual_seed(1)
    for layer in engine.model.weights.layers:
        for weight in (layer.q_norm, layer.k_norm):
            if weight is not None:
                weight.normal_(mean=1.0, std=0.3, generator=random)


def _requests(lengths: Iterable[tuple[int, int]]) -> list[Request]:
    """Make requests with page tables that nobody shares."""
    requests, block = [], 1
    for number, (prompt, answer) in enumerate(lengths):
        request = Request(number, 0.0, prompt, answer)
        count = -(-(prompt + answer) // PAGE)
        request.blocks = list(range(block + count - 1, block - 1, -1))
        block += count
        requests.append(request)
    return requests


def _generate(engine: Engine, requests: list[Request], budget: int) -> list[list[int]]:
    """Run requests together, `budget` tokens of prompts a step, and give their texts."""
    done = dict.fromkeys(requests, 0)
    while True:
        chunks, left = [], budget
        for request in requests:
            prompt, start = request.prompt_tokens, done[request]
            count = 1 if start >= prompt else min(prompt - start, left)
            if start < prompt:
                left -= count
            if count and start < prompt + request.output_tokens - 1:
                chunks.append(Chunk(request, start, count))
        if not chunks:
            return [engine.tokens(request.id) for request in requests]
        engine.execute(chunks)
        for chunk in chunks:
            done[chunk.request] += chunk.tokens


def check_texts(device: str, spec: ModelSpec) -> Row:
    """Count the tokens that differ: batched on Triton in chunks, against each request alone."""
    lengths = [(40, 3), (9, 6), (21, 2)]
    alone = [
        _generate(reference_engine(spec, device, torch.float32), [request], 512)[0]
        for request in _requests(lengths)
    ]
    together = _generate(triton_engine(spec, device, torch.float32), _requests(lengths), 24)
    pairs = zip(chain(*alone), chain(*together), strict=True)
    wrong = sum(one != other for one, other in pairs)
    return make_row(f"greedy text, {spec.name} model, tokens that differ", wrong, 0)


def check_logits(device: str, spec: ModelSpec) -> Row:
    """Compare logits of a mixed step in bf16 with those of the reference."""
    requests = _requests([(200, 9), (90, 9), (33, 9)])
    chunks = [Chunk(requests[0], 0, 200), Chunk(requests[1], 0, 90), Chunk(requests[2], 0, 33)]
    logits = []
    for make in (reference_engine, triton_engine):
        engine = make(spec, device, torch.bfloat16)
        batch, _ = engine.inputs.build(chunks)
        with torch.inference_mode():
            logits.append(engine.model.logits(batch))
    return make_row(f"logits, {spec.name}, bf16", error(logits[1], logits[0]), 3e-2)


def _next_tokens(engine: Engine, chunks: list[Chunk]) -> list[int]:
    """Run one step; give the token that each of its requests got."""
    engine.reset()
    engine.execute(chunks)
    return [engine.tokens(chunk.request.id)[-1] for chunk in chunks]


def check_graphs(device: str, spec: ModelSpec, most: int = 256) -> Iterator[Row]:
    """Count the tokens in which graphs differ from launches one by one, over every size.

    A graph is filled for that, since the matrix products of a padded batch may round otherwise; a
    batch of one less must then give the same tokens without the last one.
    """
    random = np.random.default_rng(0)
    large = most > 8
    mixed = MIXED_SIZES if large else MIXED_SIZES[:2]
    engine = Engine(
        spec, 24576 if large else 600, PAGE, device, max_num_seqs=most, mixed_sizes=mixed
    )
    if engine.graphs is None:  # on a CPU: the same padded steps, not captured
        engine.use_triton(graphs=True)
    engine.fill_random()
    for width in WIDTHS:
        wrong = padded = 0
        for size in engine.capture_sizes:
            longest = min(width * PAGE, spec.max_position_embeddings, (engine.num_blocks - 1))
            ends = random.integers(1, longest + 1, size)
            ends[0] = longest  # so wide is the table
            chunks = []
            for number, end in enumerate(ends.tolist()):
                blocks = random.integers(1, engine.num_blocks, -(-end // PAGE)).tolist()
                blocks[-1] = 1 + number  # the token's own, which no other may write to
                chunks.append(Chunk(Request(number, 0.0, end, 2, blocks=blocks), end - 1, 1))
            graph = _next_tokens(engine, chunks)
            less = _next_tokens(engine, chunks[:-1]) if size > 1 else []
            with launched_one_by_one(engine):
                eager = _next_tokens(engine, chunks)
            wrong += sum(one != other for one, other in zip(graph, eager, strict=True))
            padded += sum(one != other for one, other in zip(graph, less, strict=False))
        yield make_row(f"graphs, tables {width} wide, tokens that differ from launches", wrong, 0)
        yield make_row(f"graphs, tables {width} wide, tokens changed by padding", padded, 0)
        yield from check_mixed_graphs(engine, random, width)
    yield check_swap(engine)


def _mixed_step(
    engine: Engine, random: np.random.Generator, size: int, longest: int
) -> list[Chunk]:
    """Make a step that fills a graph: ragged decodes, and up to three pieces of prompts."""
    decodes = int(random.integers(0, min(size // 4, engine.capture_sizes[-1] - 3) + 1))
    pieces = min(3, (size - decodes) // 3)
    cuts = np.sort(random.choice(np.arange(2, size - decodes - 1, 2), pieces - 1, replace=False))
    news = np.diff([0, *cuts.tolist(), size - decodes]).tolist()
    chunks = []
    for number, new in enumerate([1] * decodes + news):
        start = int(random.integers(0, longest - new + 1))
        blocks = random.integers(1, engine.num_blocks, -(-(start + new) // PAGE)).tolist()
        first = start // PAGE  # what is written is the request's own
        own = 1 + number * (-(-engine.mixed_sizes[-1] // PAGE) + 1)
        blocks[first:] = range(own, own + len(blocks) - first)
        chunks.append(Chunk(Request(number, 0.0, start + new, 2, blocks=blocks), start, new))
    return chunks


def check_mixed_graphs(engine: Engine, random: np.random.Generator, width: int) -> Iterator[Row]:
    """Count the tokens in which graphs of steps with prompts differ from launches one by one.

    The launches are those of the same padded step. One that is not padded may round otherwise, so
    that likely tokens change places: its logits are compared.
    """
    wrong = changed = 0
    away = 0.0
    model, inputs = engine.model, engine.inputs
    for size in engine.mixed_sizes:
        longest = min(width * PAGE, engine.spec.max_position_embeddings, engine.num_blocks - 1)
        chunks = _mixed_step(engine, random, size, max(longest, size))
        graph = _next_tokens(engine, chunks)
        last, one = chunks[-1], chunks[-1].request
        shorter = Request(one.id, 0.0, last.start + last.tokens - 1, 2, blocks=one.blocks)
        fewer = [*chunks[:-1], Chunk(shorter, last.start, last.tokens - 1)]
        less = _next_tokens(engine, fewer)
        with torch.inference_mode():
            engine.reset()
            launched = model.sample(inputs.build(chunks)[0]).tolist()
            engine.reset()
            padded = model.logits(inputs.build(fewer)[0])
            engine.reset()
            with launched_one_by_one(engine):
                plain = model.logits(inputs.build(fewer)[0])
        wrong += sum(one != other for one, other in zip(graph, launched, strict=True))
        changed += sum(one != other for one, other in zip(graph[:-1], less[:-1], strict=True))
        away = max(away, error(padded, plain))
    about = f"graphs with prompts, tables {width} wide"
    yield make_row(f"{about}, tokens that differ from launches", wrong, 0)
    yield make_row(f"{about}, tokens changed by padding", changed, 0)
    yield make_row(f"{about}, logits of the step unpadded", away, MIXED_LIMITS[engine.dtype])


def check_swap(engine: Engine) -> Row:
    """Count the numbers of the cache that a swap to the host and back has changed."""
    count = min(100, (engine.num_blocks - 1) // 2)
    out, back = list(range(1, count + 1)), list(range(2 * count, count, -1))
    kept = engine.cache.kv[:, :, out].clone()
    request = Request(-1, 0.0, 1, 1)
    engine.swap_out(request, out)
    engine.cache.kv[:, :, 1 : 2 * count + 1] = 0
    engine.swap_in(request, back)
    away = (engine.cache.kv[:, :, back].view(torch.uint8) != kept.view(torch.uint8)).sum()
    return make_row("swap, bytes that differ", float(away), 0)


def check_schedule(engine: Engine, alone: Engine) -> Iterator[Row]:
    """Count the tokens that change where requests share a prefix and are preempted for blocks."""
    lengths = [(13, 24), (30, 20), (7, 28), (22, 24), (17, 20), (25, 26)]
    requests = [
        Request(
            number, 0.0, 32 + own, answer, segments=((("system",), 32), (("in", number), own))
        )
        for number, (own, answer) in enumerate(lengths)
    ]  # fmt: skip
    wanted = []
    for request in requests:
        count = -(-(request.prompt_tokens + request.output_tokens) // PAGE)
        copy = request.retry(0.0)
        copy.blocks = list(range(1, count + 1))
        wanted.append(_generate(alone, [copy], 512)[0])
        alone.reset()
    blocks = BlockManager(15, PAGE, prefix_caching=True)
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=128)
    scheduler = Scheduler(blocks, limits)
    executor = TorchExecutor(engine, scheduler)
    for request in requests:
        scheduler.add(request)
    now, shared = 0.0, 0
    answers: dict[int, list[int]] = {}
    while len(answers) < len(requests):
        step = scheduler.schedule(now)
        executor.measure(step)
        shared = max(shared, blocks.shared)
        now += 1.0
        for request in scheduler.commit(step, [now]):
            answers[request.id] = engine.tokens(request.id)
    wrong = sum(
        one != other
        for request, text in zip(requests, wanted, strict=True)
        for one, other in zip(answers[request.id], text, strict=False)
    )
    preempted = sum(request.preemptions for request in requests)
    yield make_row(f"greedy text, {shared} shared blocks, {preempted} preemptions", wrong, 0)
    yield make_row("shared and preempted at all", float(not (shared and preempted)), 0)


Check = tuple[int, Callable[[], Iterable[Row]]]
"""How many rows it gives, and how to make them."""


def list_checks(device: str) -> list[Check]:
    """List all checks: small on CPU; on CUDA those in the models' shapes come first."""
    small, bf16 = torch.float32, torch.bfloat16
    checks: list[Check] = []
    if torch.device(device).type == "cuda":
        shape = ModelSpec(
            name="8b_shape",
            num_hidden_layers=2,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=14336,
            vocab_size=128256,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
        )
        checks += [
            (5, lambda: check_attention(device, bf16, AttentionShape(32, 8, 128))),
            (2, lambda: check_fused(device, bf16)),
            (1, lambda: [check_rope(device, bf16)]),
            (1, lambda: [check_logits(device, shape)]),
            (11, lambda: check_graphs(device, shape)),
            (
                2,
                lambda: check_schedule(
                    triton_engine(NORMED, device, small), reference_engine(NORMED, device, small)
                ),
            ),
            (5, lambda: check_attention(device, bf16, AttentionShape(32, 8, 64))),
            (5, lambda: check_attention(device, bf16, AttentionShape(16, 8, 128))),
        ]
    return [
        *checks,
        (1, lambda: [check_texts(device, SMALL)]),
        (1, lambda: [check_texts(device, NORMED)]),
        (5, lambda: check_attention(device, small, AttentionShape(4, 2, 64))),
        (2, lambda: check_fused(device, small)),
        (1, lambda: [check_rope(device, small)]),
    ]


def run_checks(device: str) -> Iterator[Row]:
    """Run all checks, after a row that says how many rows they are.

    A check that raises becomes a row that says so, and the next one begins.
    """
    torch.manual_seed(0)
    checks = list_checks(device)
    yield {"planned": sum(count for count, _ in checks)}
    for number, (_, check) in enumerate(checks):
        try:
            yield from check()
        except Exception as error:  # whatever it is, the other checks go on
            yield make_row(f"group {number}: {error!r:.200}", math.nan, 0.0)


def main() -> int:
    """Print every check as a line of JSON; the exit code is 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    if device == "cpu":
        ops.MIN_PROGRAMS = 8  # the interpreter runs them one after the other
    wrong = 0
    for row in run_checks(device):
        wrong += not row.get("ok", True)
        print(json.dumps(row), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
