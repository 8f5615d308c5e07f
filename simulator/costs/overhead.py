"""What an engine adds to its kernels: one model per vLLM version, from `overheads.yaml`.

A step keeps the GPU waiting for `step` seconds and `per_sequence` for each sequence in it, whatever
happens: the launch of its graph, sampled tokens on their way back. The host's own work, `host` and
its terms per sequence, per prompt in the step and per token of prompts, is waited for too, unless
the engine schedules asynchronously: then it is hidden behind the kernels, and only what is longer
than these shows. An engine on several GPUs talks to a process for each of them: `host_ranks` more.
The API server, a process of its own, streams a token of each sequence in `stream_per_sequence`, and
as many servers as `api_server_count` share that; no step is delivered faster. Machines
differ in `step`, `host` and `stream_per_sequence`: their intervals hold 95 %.
A scenario's block `host` puts a server's own in their place. A step with prompts
runs without the CUDA graph of a whole decode step, and its layers are launched one after the
other: `prompt_per_layer`. On B200 FlashInfer's own attention is planned on the host besides, to
0.11.0 and beside an fp8 cache, and no such step is faster than its launches, `launch_per_layer`.

Where requests are sampled with top-p or top-k, vLLM from 0.11.1 to 0.16, and before 0.9, sorts all
logits of a step in PyTorch, as float32 with their indices, then softmax, running sum, mask,
scatter, softmax, noise and argmax. That is `sampling` for some twenty launches and, for each logit,
`sampling_per_logit` seconds of the multiprocessors and `sampling_bytes` through the memory: a line
through what `benchmarks/sampling.py` took on an H100 beyond the argmax, for 8 to 256 sequences
(calibration/measurements/h100/llama-3.1-8b/sampling.csv). From 8 to 64 it is 0.36 ms + 114 ps a
logit, from 128 on, sorted at once, 1.25 ms + 91 ps; one sequence takes 0.2 ms. By the same file
FlashInfer's sampler (0.9 to 0.11.0, and from 0.21) takes 0.05 ms + 0.7 us a sequence with top-p,
about twice that with top-k, too, and the Triton kernel between (0.17 to 0.20) 0.25 ms + 2.2 us.
Neither is added: what was measured of such servers is met without. Temperature 0 takes the argmax
alone.

Ranks of tensor parallelism wait for one another at each all-reduce, of which tables of all-reduces
timed back to back show nothing: `ranks_per_layer`. Today's vLLM, whose tables the profiles have,
adds up prompts by symmetric memory, on six and eight GPUs (Hopper: four, too) by multicast (pull
request 20759). To 0.10.2 that was off (24696; on in 0.11.0: issue 26525), and NCCL took longer:
`nccl_per_layer`, two sums of 16 MiB by the two tables (on four and eight B200 56 and 72 us, on
eight H200 70, on four 10). Releases between 0.11.0 and 0.18 may have it off, too (26925): none was
measured.

vLLM launches pure decodes as CUDA graphs of certain batch sizes, 1, 2, 4, then every 8 and from 256
on every 16 (0.11 on), and pads smaller batches; `captured` is the largest of them.

Where `key_per_layer` is given, decodes wait for the longest sequence (`split.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from simulator.core.engine_config import VLLM
from simulator.costs.linear import Fitted, Term, check_terms
from simulator.costs.tables import MAX_TABLE_TOKENS, check_intervals
from simulator.costs.terms import HOST_TERMS
from simulator.models.gpus import CPU, Gpu
from simulator.models.spec import ModelSpec
from simulator.util.from_mapping import raise_if
from simulator.util.yaml_lines import read_own

FILE = Path(__file__).parent / "overheads.yaml"
TERMS = (
    "step",
    "per_sequence",
    *HOST_TERMS,
    "host_ranks",
    "prompt_per_layer",
    "launch_per_layer",
    "ranks_per_layer",
    "nccl_per_layer",
    "sampling",
    "sampling_per_logit",
    "sampling_bytes",
    "key_per_layer",
)

BY_CASE = ("synchronous", "asynchronous", "gpus")
"""What an entry of the file has beside terms: those of a case."""
TRUNCATED = (
    "deepseek-",
    "gemma-",
    "glm-4",
    "kimi-",
    "llama-2",
    "llama-3",
    "llama-4",
    "qwen",
    "yi-",
)
"""How the names of models begin whose generation_config.json gives top_p or top_k; Yi's by what its
server's steps took."""

Version = tuple[int, int, int]
LAST_PATCH = 1 << 31
NEWEST: Version = (1 << 31, 0, 0)


@dataclass(frozen=True)
class Overhead:
    """Seconds that an engine adds to a step's kernels; zero where nobody knows."""

    step: Term = 0.0
    per_sequence: Term = 0.0
    host: Term = 0.0
    host_per_sequence: Term = 0.0
    host_per_prefill: Term = 0.0
    host_per_prefill_token: Term = 0.0
    host_ranks: Term = 0.0  # more of `host` where there are several ranks
    stream_per_sequence: Term = 0.0  # of an API server
    prompt_per_layer: Term = 0.0
    launch_per_layer: Term = 0.0  # least, of a step with prompts
    captured: Annotated[int, "the largest batch that has a CUDA graph; 0: none has"] = 0
    ranks_per_layer: Term = 0.0  # where there are several ranks
    nccl_per_layer: Term = 0.0  # of a step with prompts
    nccl_ranks: Annotated[int, "ranks from which on nccl_per_layer counts"] = 8
    sampling: Term = 0.0  # with top-p or top-k
    sampling_per_logit: Term = 0.0
    sampling_bytes: Annotated[float, "bytes moved for each logit"] = 0.0
    host_interval: Sequence[float] = ()  # 95 % interval of `host`; (): none is known
    step_interval: Sequence[float] = ()  # likewise of `step`
    stream_interval: Sequence[float] = ()  # and of `stream_per_sequence`
    key_per_layer: Term = 0.0  # per key of the longest sequence; 0: nobody waits for it
    multiprocessors: Annotated[int, "multiprocessors of the GPU"] = 1

    def check(self) -> None:
        """Raise ValueError, a line for each term that cannot be."""
        raise_if(
            *check_terms(self, TERMS),
            *check_intervals(self),
            (self.captured < 0, "captured", f"must be at least 0, not {self.captured}"),
            (self.captured > MAX_TABLE_TOKENS, "captured", f"must be at most {MAX_TABLE_TOKENS:,}"),
            (self.multiprocessors < 1, "multiprocessors", "must be at least 1"),
        )

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The batches of pure decodes that have a CUDA graph."""
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, self.captured + 1, 16)]
        return tuple(size for size in sizes if size <= self.captured)

    def logit_seconds(self, gpu: Gpu) -> float:
        """Return what sampling takes for each logit, s."""
        return self.sampling_per_logit + self.sampling_bytes / gpu.bandwidth

    def as_host_work(self) -> "Overhead":
        """Take `step` and `per_sequence` for the host's work, as of a synchronous engine."""
        work = self.step + self.host, self.per_sequence + self.host_per_sequence
        return replace(self, step=0.0, per_sequence=0.0, host=work[0], host_per_sequence=work[1])

    def of_server(self, *, ranks: int, api_servers: float) -> "Overhead":
        """Return it for a server of so many GPUs and API servers for each engine core."""
        more = self.host_ranks if ranks > 1 else 0.0
        stream = self.stream_per_sequence / api_servers
        low_high = tuple(end + more for end in self.host_interval)
        return replace(
            self, host=self.host + more, stream_per_sequence=stream, host_interval=low_high
        )

    def add_to(
        self,
        cost: Fitted,
        *,
        overlapped: bool,
        model: ModelSpec,
        gpu: Gpu,
        sampled: bool,
        tensor_parallel_size: int,
        layers: int,
    ) -> Fitted:
        """Put it on top of a cost of the kernels of so many layers alone.

        `sampled` says that requests are sampled with top-p or top-k. ValueError: the cost has no
        place for it.
        """
        ranks = self.ranks_per_layer * layers if tensor_parallel_size > 1 else 0.0
        nccl = self.nccl_per_layer if tensor_parallel_size >= self.nccl_ranks else 0.0
        logits = model.vocab_size if sampled else 0
        whole = cost.with_engine(
            step=self.step,
            apart=ranks + (self.sampling if sampled else 0.0),
            prompts=(self.prompt_per_layer + nccl) * layers,
            launch=self.launch_per_layer * layers,
            overhead_per_sequence=self.per_sequence + logits * self.logit_seconds(gpu),
            host=self.host,
            host_per_sequence=self.host_per_sequence,
            host_per_prefill=self.host_per_prefill,
            host_per_prefill_token=self.host_per_prefill_token,
            stream_per_sequence=self.stream_per_sequence,
            host_interval=self.host_interval,
            step_interval=self.step_interval,
            stream_interval=self.stream_interval,
            overlapped=overlapped,
            cudagraph_capture_sizes=self.capture_sizes,
        )
        if not self.key_per_layer:
            return whole
        from simulator.costs.split import SplitCost  # not of every engine

        return SplitCost.of(
            whole,
            per_key=self.key_per_layer * layers,
            kv_heads=max(1, model.num_key_value_heads // tensor_parallel_size),
            multiprocessors=self.multiprocessors,
        )


def samples_truncated(model: ModelSpec, generation_config: str) -> bool:
    """Return whether requests that say nothing are sampled with top-p or top-k."""
    return generation_config == "auto" and model.name.startswith(TRUNCATED)


def read_version(text: str, patch: int = LAST_PATCH) -> Version | None:
    """Read the release out of a version as people write it; None where there is none.

    One without a patch release, 0.11, means the last one of it, or `patch`.
    """
    found = re.findall(r"(?<![\d-])(\d+)\.(\d+)(?:\.(\d+))?", text)
    if not found:
        return None
    major, minor, told = found[-1]
    return int(major), int(minor), int(told) if told else patch


def find_overhead(version: Version, gpu: Gpu, cache_dtype: str, *, overlapped: bool) -> Overhead:
    """Return the overhead of a vLLM version on a GPU; `overlapped`: it schedules asynchronously."""
    terms = max(((v, t) for v, t in _entries() if v <= version), key=lambda entry: entry[0])[1]
    case, gpus = "asynchronous" if overlapped else "synchronous", terms["gpus"]
    own = {"captured": 0} if gpu is CPU else gpus.get(gpu.name, {})
    if cache_dtype.startswith("fp8"):
        own = own | gpus.get(f"{gpu.name} fp8 cache", {})
    plain = {key: value for key, value in (terms | own).items() if key not in BY_CASE}
    return Overhead(**plain | terms[case] | own.get(case, {}))


@cache
def _entries() -> list[tuple[Version, dict[str, Any]]]:
    """Read the models that come with the package, by the version from which on they hold."""
    raw = read_own(FILE)
    return [(read_version(since, 0) or (0, 0, 0), terms) for since, terms in raw.items()]


def unknown_overhead(name: str) -> str:
    """Say which engines there are, for a name that is none; "" for one that is."""
    return "" if name == VLLM else f"no engine {name!r}; there are {VLLM}"
