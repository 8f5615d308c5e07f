"""What sampling takes on this GPU, by sampler: what vLLM launches between logits and tokens.

`python benchmarks/sampling.py --out sampling.csv` times, from bf16 logits [batch, vocabulary]:
`greedy` (float32, argmax), `random` (temperature, softmax, noise, argmax), and top-p 0.9 alone and
with top-k 50 by PyTorch's sort (vLLM to 0.8, and 0.11.1 to 0.16), by vLLM's Triton kernel (0.17 to
0.20) and by FlashInfer (0.9 to 0.11.0, and from 0.21); the last two where `vllm` and `flashinfer`
are installed. `gpu_us` is of a CUDA graph of eight calls, so of the kernels alone; `launched_us` of
calls one after the other. Logits are `peaked` (a token's probability falls as the square of its
rank, as a language model's does) or `flat` (normal). Medians of nine.

The rows in calibration/measurements/h100 are of vLLM 0.18.1's kernel, and of those of FlashInfer
0.7.2.post1 compiled from its headers and called without its Python; they end where time ran out.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

CALLS, REPEATS = 8, 9
TOP_K, TOP_P = 50, 0.9
Sampler = Callable[[Tensor], Tensor]


def draw(logits: Tensor) -> Tensor:
    """Sample from float32 logits, as vLLM does: divide by exponential noise, take the largest."""
    probabilities = logits.softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_()
    return probabilities.div_(noise).argmax(dim=-1)


def sort(logits: Tensor, k: Tensor | None, p: Tensor) -> Tensor:
    """Keep the top k, then the top p, by a sort of all logits, in place."""
    ordered, index = logits.sort(dim=-1)
    if k is not None:
        least = ordered.gather(1, (ordered.size(1) - k.long()).unsqueeze(1))
        ordered.masked_fill_(ordered < least, -math.inf)
    shares = ordered.softmax(dim=-1)
    out = torch.cumsum(shares, dim=-1, out=shares) <= 1 - p.unsqueeze(1)
    out[:, -1] = False
    return logits.scatter_(-1, index, ordered.masked_fill_(out, -math.inf))


def samplers(batch: int) -> Iterator[tuple[str, Sampler]]:
    """Name every sampler that can be had, with what it does to float32 logits."""
    yield "greedy", lambda logits: logits.argmax(dim=-1)
    yield "random", draw
    p = torch.full((batch,), TOP_P, device="cuda")
    k = torch.full((batch,), TOP_K, device="cuda", dtype=torch.int32)
    tops = (("top-p", None), ("top-k and top-p", k))
    for name, top in tops:
        yield f"{name}, sort", lambda logits, top=top: draw(sort(logits, top, p))
    try:
        from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton as mask
    except ImportError as error:
        print(f"Triton's is left out: {error}")
    else:
        for name, top in tops:
            yield f"{name}, Triton", lambda logits, top=top: draw(mask(logits, top, p))
    try:
        from flashinfer import sampling
    except ImportError as error:
        print(f"FlashInfer's is left out: {error}")
    else:
        yield (
            "top-p, FlashInfer",
            lambda logits: sampling.top_p_sampling_from_probs(
                logits.softmax(dim=-1), p, deterministic=True
            ),
        )
        yield (
            "top-k and top-p, FlashInfer",
            partial(
                sampling.top_k_top_p_sampling_from_logits, top_k=k, top_p=p, deterministic=True
            ),
        )


def make_logits(kind: str, batch: int, vocabulary: int) -> Tensor:
    """Make bf16 logits."""
    if kind == "flat":
        return torch.randn(batch, vocabulary, device="cuda").bfloat16()
    ranks = torch.stack([torch.randperm(vocabulary, device="cuda") for _ in range(batch)])
    return (-2 * (ranks + 1).log()).bfloat16()


def seconds(run: Callable[[], object]) -> float:
    """Time CALLS calls in one `run`: median seconds of a call."""
    took = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return median(took[1:])


def rows(batches: list[int], vocabularies: list[int], only: str) -> Iterator[dict[str, object]]:
    """Time every sampler at every size; one that fails becomes a row that says so."""
    for vocabulary in vocabularies:
        for batch in batches:
            for kind in ("peaked", "flat"):
                logits = make_logits(kind, batch, vocabulary)
                for name, sample in samplers(batch):
                    if only not in name:
                        continue
                    row = {
                        "sampler": name,
                        "batch": batch,
                        "vocabulary": vocabulary,
                        "logits": kind,
                    }

                    def calls(sample: Sampler = sample, logits: Tensor = logits) -> None:
                        for _ in range(CALLS):
                            sample(logits.float().div_(0.7))

                    try:
                        calls()
                        launched = seconds(calls)
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            calls()
                        kernels = seconds(graph.replay)
                        yield row | {
                            "gpu_us": f"{kernels * 1e6:.2f}", "launched_us": f"{launched * 1e6:.2f}"
                        }  # fmt: skip
                        del graph
                    except Exception as error:  # the others are still wanted
                        yield row | {"note": f"{type(error).__name__}: {error}".splitlines()[0]}


def main() -> None:
    """Time them and write a row each, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--vocabularies", default="128256,151936")
    parser.add_argument("--only", default="", help="samplers whose name has this")
    given = parser.parse_args()
    sizes = ([int(n) for n in text.split(",")] for text in (given.batches, given.vocabularies))
    columns = ("sampler", "batch", "vocabulary", "logits", "gpu_us", "launched_us", "note")
    with given.out.open("w", newline="") as file, torch.inference_mode():
        out = csv.DictWriter(file, columns)
        out.writeheader()
        for row in rows(*sizes, given.only):
            out.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
