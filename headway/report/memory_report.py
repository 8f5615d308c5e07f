"""What `headway memory` says: parts of a GPU's memory, the engine's own lines, who fits at once."""

from typing import Any

from simulator.models.gpus import GIB
from simulator.models.kv_budget import MemoryBudget, gib

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens per request in the table."""
ESTIMATES = ("peak activations", "CUDA graphs", "CUDA libraries")


def log_lines(budget: MemoryBudget) -> list[str]:
    """Return what the engine's log says of its memory, in its words and of its release."""
    sizes, loaded, cache = budget.sizes, budget.loaded / GIB, budget.kv_cache / GIB
    override, left = sizes.num_gpu_blocks_override, budget.left(sizes.gpu_memory_utilization)
    longest, tokens = budget.max_model_len, budget.tokens
    static = budget.speaks == "static"
    if static:
        error, lines = "RuntimeError", [f"Load weight end. mem usage={loaded:.2f} GB"]
    elif sizes.fraction_of == "free":
        error, lines = "AssertionError" if budget.speaks == "trtllm" else "RuntimeError", []
    else:
        error, lines = "ValueError", [f"Model loading took {loaded:.2f} GiB memory"]
        lines.append(f"Available KV cache memory: {gib(left)}")
        if sizes.kv_cache_memory:
            by = "as specified by kv_cache_memory_bytes config and skipped memory profiling."
            lines[-1] = f"... reserved {gib(budget.kv_cache)} memory for KV Cache {by}"
        elif override is not None:
            fit = int(left // budget.layout.block_bytes)
            lines.append(f"Overriding num_gpu_blocks={fit} with num_gpu_blocks_override={override}")
    if why := budget.refusal:
        error = "torch.OutOfMemoryError" if why.startswith("CUDA") else error
        return [*lines, f"{error}: {why}"]
    if static and budget.model.linear is not None:  # the log has states in a line of their own
        cache = tokens * budget.kv_bytes_per_token / GIB
    if static:
        return [*lines, f"KV Cache is allocated. #tokens: {tokens}, KV size: {cache:.2f} GB"]
    if budget.speaks == "free":  # TGI's
        return [f"KV-cache blocks: {budget.logged_blocks}, size: {sizes.block_size}"]
    if budget.speaks == "trtllm":
        what = f"for max tokens in paged KV cache ({tokens})"
        return [f"[MemUsageChange] Allocated {cache:.2f} GiB {what}."]
    if sizes.max_model_len == "auto":
        whole = f"full model context length {longest} fits in"
        less = f"reduced from {budget.wanted} to {longest} to fit in"
        fits = whole if longest == budget.wanted else less
        memory = "KV cache" if sizes.term("log in one line") else "GPU"
        lines.append(f"Auto-fit max_model_len: {fits} available {memory} memory ({gib(left)})")
    size = f"GPU KV cache size: {tokens:,} tokens"
    most = f"Maximum concurrency for {longest:,} tokens per request: {budget.max_concurrency:.2f}x"
    return [*lines, f"{size}, {most}"] if sizes.term("log in one line") else [*lines, size, most]


def memory_table(budget: MemoryBudget) -> str:
    """Write the parts, the engine's lines and the requests that fit as text."""
    model, gpus, sizes = budget.model, budget.sizes.gpus, budget.sizes
    each = "" if gpus == 1 else f", each of {gpus}"
    head = f"memory of the {budget.gpu.name}{each}"
    rows = [(head, gib(budget.gpu.memory)), (_usable(budget), gib(budget.usable))]
    if budget.layers:
        of = f"{budget.layers} of {model.num_hidden_layers}"
        rows.append(("layers of the fullest stage", of))
    named = {name: f"{name} (estimate)" for name in ESTIMATES}
    dtype = model.weight_dtype(sizes.weight_dtype)
    named["weights"] = f"weights ({model.parameters / 1e9:.2f} B parameters, {dtype})"
    rows += [(named.get(name, name), gib(size)) for name, size in budget.parts.items()]
    per_token = f"{budget.kv_bytes_per_token / 1024:,.1f} KiB"
    rows.append((f"KV per token ({sizes.cache(model)})", per_token))
    sizes_of = sorted({one.block_size for one in budget.layout.tables if one.block_size})
    tokens = " or ".join(map(str, sizes_of))  # by the kind of layers
    rows.append((f"blocks of {tokens} tokens", f"{budget.logged_blocks:,}"))
    width = max(len(label) for label, _ in rows)
    ranks = sizes.data_parallel_size
    what = f": each of {ranks} data-parallel ranks" if ranks > 1 else ""
    lines = [f"{model.name} on {gpus} x {budget.gpu.name}{what}", ""]
    lines += [f"{label:<{width}}  {value:>12}" for label, value in rows]
    release = " (SGLang 0.5.23)" if budget.speaks == "static" else ""
    lines += ["", f"the engine's log{release}", *(f"  {line}" for line in log_lines(budget))]
    if budget.unread:
        lines += ["", f"not read: {budget.unread}"]
    return "\n".join(lines + _requests(budget))


def _usable(budget: MemoryBudget) -> str:
    share, of = budget.sizes.gpu_memory_utilization, budget.sizes.fraction_of
    name = "mem_fraction_static" if of == "static" else "gpu_memory_utilization"
    what = {"static": " of what is free", "free": " of what is left"}.get(of, "")
    return f"usable ({name} {share:g}{what})"


def _requests(budget: MemoryBudget) -> list[str]:
    """Say how many requests fit, by their tokens."""
    longest, model = budget.max_model_len, budget.model
    if budget.room <= 0 or budget.kv_cache > budget.room:
        return []
    lines = ["", "requests that fit at once", f"{'tokens each':>12}{'paged':>12}{'contiguous':>12}"]
    lines += [
        f"{tokens:>12,}{budget.concurrent(tokens):>12,}{budget.contiguous:>12,}"
        for tokens in _lengths(longest)
    ]
    lines += ["", f"contiguous: each request reserves max_model_len = {longest:,}"]
    if budget.sizes.has_windows(model):
        windowed = budget.model.cached_layers.get("sliding_attention", 0)
        lines.append(
            f"paged: {windowed} of {sum(model.cached_layers.values())} layers keep "
            f"{model.sliding_window:,} tokens and a step's (disable_hybrid_kv_cache_manager: false)"
        )
    return lines


def _lengths(longest: int) -> list[int]:
    """Return the tokens of the requests that are counted, the longest last."""
    return sorted({*(n for n in LENGTHS if n < longest), longest})


def memory_figures(budget: MemoryBudget) -> dict[str, Any]:
    """Return what `memory_table` shows as plain numbers, bytes of each GPU."""
    longest = budget.max_model_len
    return {
        "model": budget.model.name,
        "gpu": budget.gpu.name,
        "gpus": budget.sizes.gpus,
        "data_parallel_size": budget.sizes.data_parallel_size,
        "memory_bytes": budget.gpu.memory,
        "usable_bytes": budget.usable,
        "weights_bytes": budget.loaded,
        "activations_bytes": budget.activations,
        "cuda_graphs_bytes": budget.graphs,
        "context_bytes": budget.context,
        "kv_cache_bytes": max(budget.kv_cache, 0),
        "kv_bytes_per_token": budget.kv_bytes_per_token,
        "block_size": budget.layout.least_block,
        "num_gpu_blocks": budget.logged_blocks,
        "tokens": budget.tokens,
        "max_model_len": longest,
        "max_concurrency": round(budget.max_concurrency, 2),
        "concurrent": {str(tokens): budget.concurrent(tokens) for tokens in _lengths(longest)},
        "parts": budget.parts,
        "log": log_lines(budget),
        "unread": budget.unread,
    }
