"""How much slower a matrix product is between a model's other kernels than back to back.

AIConfigurator repeats one product in a loop; Vidur (Microsoft, MIT licence) times the products of
whole layers of exact model shapes in sequence, with the cuBLAS of 2023. For up to about 100 tokens,
where a product reads its weights, the two agree within 5 %; beyond, Vidur's take up to 30 % longer.
What single requests took on real servers lies in the middle: prompts of 1,300 to 3,400 tokens
alone on an H100 (Llama-2-7B and CodeLlama-34B, vLLM 0.11) needed 1.03 to 1.2 times, in the median
1.09 times, what back-to-back products add up to, and 0.82 to 1.04, in the median 0.93 times what
Vidur's do. So the time of a product is taken as the geometric mean of the two: back to back, times
the square root of their ratio, the median over Vidur's models and TP degrees.
"""

from pathlib import Path

import numpy as np

from calibration.errors import Floats
from simulator.models.load import load_model
from tools.profiles.aiconfigurator import Products
from tools.profiles.tables import GpuTables, read_table

SOURCE = "vidur"
TOKENS = (128, 256, 512, 1024, 2048, 4096)
SHAPES = {
    "a100": {
        "codellama-34b": "codellama__CodeLlama-34b-Instruct-hf",
        "llama-2-70b": "meta-llama__Llama-2-70b-hf",
        "llama-2-7b": "meta-llama__Llama-2-7b-hf",
        "llama-3-70b": "meta-llama__Meta-Llama-3-70B",
        "llama-3-8b": "meta-llama__Meta-Llama-3-8B",
    },
    "h100": {
        "codellama-34b": "codellama__CodeLlama-34b-Instruct-hf",
        "llama-2-70b": "meta-llama__Llama-2-70b-hf",
        "llama-2-7b": "meta-llama__Llama-2-7b-hf",
    },
}
OPERATORS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def read_layer_products(data: Path, key: str, model: str, gpus: int) -> tuple[Floats, Floats]:
    """Return token counts and one layer's seconds in its products, in sequence."""
    names = [f"time_stats.{name}.median" for name in OPERATORS]
    path = f"{key}__{SHAPES[key][model]}__mlp.csv"
    columns = ("num_tokens", "num_tensor_parallel_workers", *names)
    table = read_table(data, path, SOURCE, columns)
    rows = table[table["num_tensor_parallel_workers"] == gpus].groupby("num_tokens")[names].mean()
    return rows.index.to_numpy(float), rows.sum(axis=1).to_numpy() / 1e3


def measure_factors(data: Path, tables: GpuTables) -> Floats:
    """Derive the factors at `TOKENS` from both sources' tables."""
    products, ratios = Products(data, tables, "bfloat16"), []
    for name in SHAPES[tables.key]:
        for gpus in (1, 2, 4, 8):
            tokens, seconds = read_layer_products(data, tables.key, name, gpus)
            alone = products.of_layer(load_model(name), gpus)
            there = np.interp(TOKENS, tokens, seconds)
            ratios.append(there / np.interp(TOKENS, products.tokens, alone))
    return np.maximum(1.0, np.sqrt(np.median(ratios, axis=0)))


FACTORS = {
    "a100": (1.016, 1.038, 1.031, 1.090, 1.091, 1.074),
    "h100": (1.063, 1.108, 1.124, 1.127, 1.066, 1.035),
}
"""What `measure_factors` gives on the published tables. GPUs that Vidur did not time take those of
the likest: H200 and Blackwell's of the H100, L40S of the A100."""
SIMILAR_GPU = {"a100": "a100", "l40s": "a100"}


def slowdown(tables: GpuTables, tokens: Floats) -> Floats:
    """Return the factor on products of so many tokens, timed back to back; 1 up to 64 tokens."""
    factors = (1.0, *FACTORS[SIMILAR_GPU.get(tables.key, "h100")])
    return np.asarray(np.interp(np.log(tokens), np.log((64, *TOKENS)), factors))


UNSTEADY = {("gb200", "bfloat16")}
"""Tables, by GPU and dtype, whose longest products say nothing of a server: GB200's in 16 bits do
1,000 TFLOP/s, where B200's, the same chip with less power, do 1,400 to 1,500."""


def sustained(tokens: Floats, seconds: Floats) -> Floats:
    """Let no product take less per token than the longest that were timed.

    Those ran for so long that the GPU had come down to the clocks that its power limit allows: on
    Hopper, Blackwell and L40S they do up to 27 % fewer operations per second than products of
    2,000 to 4,000 tokens, which are over before that. A server under load has no such breaks. The
    longest are those of at least half as many tokens as the table has.
    """
    there = np.isfinite(seconds)
    longest = there & (tokens >= tokens[there][-1] / 2)
    each = seconds[longest].sum() / tokens[longest].sum()
    return np.asarray(np.maximum(seconds, each * tokens))
