"""The engine: a model, its paged KV cache and the texts that grow out of it.

It decides nothing. A step's chunks say what to compute, each request's `blocks` where its keys and
values lie; the engine carries that out, samples the likeliest token of every request whose known
tokens are all computed, and feeds it back in the next step. At the end: whether an engine can be
had: is the device there, does it run such a model, does it fit.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.cuda.graphs import Graphs, sizes_for
from gpu_backend.input_batch import InputBatch, InputBatchBuilder
from gpu_backend.kv_cache import KVCache
from gpu_backend.model import Transformer, rotary_table
from gpu_backend.request_states import RequestStates
from gpu_backend.torch_backend import TorchBackend
from gpu_backend.weights import random_weights, read_weights
from simulator.core.request import Chunk, Request
from simulator.models.gpus import GIB
from simulator.models.spec import ModelSpec
from simulator.util.errors import HeadwayError

HEADROOM = GIB // 2
"""Bytes that must be left beside all that is counted: CUDA graphs, fragments."""
LIBRARY_BYTES = 3 * (32 << 20)
"""Workspaces of cuBLAS, 32 MiB per stream on Hopper (CUBLAS_WORKSPACE_CONFIG's default)."""
MAX_DECODE_PARTS = 1024
"""Splits of all rows of a decode together, at most: 256 rows in 4, which most batches are below."""
MAX_PINNED = 8 * GIB
"""Bytes of host memory that are pinned before a run, at most."""


@dataclass(slots=True)
class Measured:
    """What a step took, in seconds."""

    device_s: float  # the forward pass: CPU time of the thread, or CUDA events
    host_s: float  # inputs before and book-keeping after it: CPU time of the thread
    wall_s: float  # all of it, on the wall's clock
    launch_s: float = 0.0  # of device_s, CPU time of the launches; on a CPU nothing is launched
    swap_out_s: float = 0.0  # copies of KV blocks to the host, before it
    swap_in_s: float = 0.0  # and back
    bucket: int = 0  # tokens that a CUDA graph was padded to, 0: launched kernel by kernel
    n_logits: int = 0  # tokens after which a new one was sampled
    listing_s: float = 0.0  # of host_s, what the executor took before and after the engine
    unique_ctx: int = 0  # KV entries of all running requests, shared ones once; a scheduler's

    @property
    def busy_s(self) -> float:
        """Seconds of work: device, host and copies one after the other."""
        return self.device_s + self.host_s + self.swap_out_s + self.swap_in_s


class Engine:
    """Runs a model over a paged KV cache.

    `dtype` is a torch dtype or its name; by default bfloat16 on CUDA and float32 on CPU. `weights`
    is a folder with safetensors; without it the weights are random, drawn from `seed`. On CUDA
    steps of decodes alone run as CUDA graphs for up to `max_num_seqs` sequences, and steps with
    prompts as graphs of `mixed_sizes` tokens (ascending), unless `graphs` is false; memory is kept
    for steps of `max_num_batched_tokens`. On CPU the engine uses one thread,
    and sets torch to that: more of them wait for one another as soon as anything else runs, and
    their time could not be measured.
    Raises HeadwayError where the device is not there or the model does not fit it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int = 16,
        device: str = "cpu",
        dtype: torch.dtype | str | None = None,
        *,
        weights: Path | None = None,
        seed: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        graphs: bool = True,
        mixed_sizes: Sequence[int] = (),
    ) -> None:
        check_supported(spec)
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = find_device(device)
        on_cuda = self.device.type == "cuda"
        if dtype is None:
            dtype = torch.bfloat16 if on_cuda else torch.float32
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        work = 0
        if on_cuda:
            work = work_bytes(spec, max_num_seqs, max_num_batched_tokens, self.dtype)
            work += graph_bytes(spec, max_num_seqs, mixed_sizes, self.dtype) if graphs else 0
        check_fits(spec, num_blocks, block_size, self.device, self.dtype, work=work)
        if not on_cuda:
            torch.set_num_threads(1)
        generator = torch.Generator(self.device).manual_seed(seed)
        if weights is None:
            loaded = random_weights(spec, self.device, self.dtype, generator)
        else:
            loaded = read_weights(spec, weights, self.device, self.dtype)
        self.cache = KVCache(spec, num_blocks, block_size, self.device, self.dtype)
        self.states = RequestStates(spec.vocab_size)
        self.rotary = rotary_table(spec, spec.max_position_embeddings, self.device)
        self._max_num_seqs = max_num_seqs
        self._mixed_sizes = mixed_sizes
        self.model = Transformer(spec, loaded, TorchBackend(spec, self.cache, self.rotary))
        self.inputs = InputBatchBuilder(self.states, block_size, self.device)
        self.graphs: Graphs | None = None
        if on_cuda:
            self.use_triton(graphs=graphs)
        self._swapped: dict[int, list[torch.Tensor]] = {}  # by request
        self._generator = generator

    def use_triton(self, *, graphs: bool) -> None:
        """Do it in Triton's kernels, and in CUDA graphs if so wanted, as always on CUDA."""
        from gpu_backend.cuda.ops import CudaBackend, prefill_cut

        self.model.backend = CudaBackend(self.spec, self.cache, self.rotary, self._max_num_seqs)
        blocks = -(-self.spec.max_position_embeddings // self.block_size)
        self.inputs = InputBatchBuilder(
            self.states, self.block_size, self.device,
            capture_sizes=sizes_for(self._max_num_seqs) if graphs else (),
            mixed_sizes=self._mixed_sizes if graphs else (),
            max_blocks=min(blocks, self.num_blocks), tile_rows=prefill_cut(self.dtype).rows,
        )  # fmt: skip
        self.graphs = Graphs(self.model, self.inputs) if graphs else None

    def execute(
        self,
        chunks: Sequence[Chunk] | None,
        decoding: Sequence[Request] = (),
        *,
        keep: bool = True,
    ) -> Measured:
        """Run one forward pass and append what it sampled to the texts.

        `decoding` are requests beside the chunks that go on by the token that came out of them
        last. None for `chunks`: the step before was of decodes alone, and all of them decode on.
        `keep=False` throws the sampled tokens away, so that the same step can be timed again.
        Raises ValueError for a chunk that ends beyond the model's positions.
        """
        wall = time.perf_counter()
        begun = time.thread_time()
        inputs = self.inputs
        batch, emitting = inputs.advance() if chunks is None else inputs.build(chunks, decoding)
        host, limit = batch.host, self.spec.max_position_embeddings
        if host.longest > limit:
            raise ValueError(
                f"{self.spec.name} has {limit} positions, not {host.longest}: lower max_model_len"
            )
        tokens, device_s, launch_s, ready, over = self._forward(batch)
        if keep:
            self.states.append(emitting, tokens)
        host_s = ready - begun + time.thread_time() - over
        wall_s = time.perf_counter() - wall
        return Measured(
            device_s, host_s, wall_s, launch_s, bucket=batch.bucket, n_logits=len(host.emits)
        )

    @property
    def gpu_name(self) -> str:
        """What the driver calls the device, CPU where it is none."""
        cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if cuda else "CPU"

    @property
    def capture_sizes(self) -> list[int]:
        """Batches of decodes that have a CUDA graph, ascending; none where there are no graphs."""
        return list(self.inputs.capture_sizes)

    @property
    def mixed_sizes(self) -> list[int]:
        """Tokens of steps with prompts that have a CUDA graph, ascending; none: no such graphs."""
        return list(self.inputs.mixed_sizes)

    def _forward(
        self, batch: InputBatch
    ) -> tuple[npt.NDArray[np.integer], float, float, float, float]:
        """Run the model: sampled tokens, seconds of device and launches, CPU time before and after.

        The inputs are on their way before the first event, so that the device's seconds are those
        of kernels, and of waits for their launches where these take longer.
        """
        run = (self.graphs or self.model).sample
        if self.device.type != "cuda":
            begun = time.thread_time()
            with torch.inference_mode():
                found = run(batch).numpy()
            over = time.thread_time()
            return found, over - begun, 0.0, begun, over
        with torch.inference_mode():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            begun = time.thread_time()
            events[0].record()
            tokens = run(batch)
            events[1].record()
            launched = time.thread_time()
            tokens = tokens.cpu()
            events[1].synchronize()  # where no token was sampled the copy has waited for nothing
            over = time.thread_time()
            device_s = events[0].elapsed_time(events[1]) / 1e3
            return tokens.numpy(), device_s, launched - begun, begun, over

    def swap_out(self, request: Request, blocks: list[int]) -> float:
        """Copy a request's blocks to the host; give the seconds, CPU time on CPU."""
        begun = self._clock()
        with torch.inference_mode():
            self._swapped[request.id] = self.cache.copy_out(blocks)
        return self._clock() - begun

    def swap_in(self, request: Request, blocks: list[int], first: int = 0) -> float:
        """Copy a request's saved blocks, from number `first` on, into `blocks`; give the seconds.

        What was saved is dropped.
        """
        begun = self._clock()
        with torch.inference_mode():
            self.cache.copy_in(self._swapped.pop(request.id), blocks, first)
        return self._clock() - begun

    def _clock(self) -> float:
        """Read the clock of copies: CPU time on CPU; on CUDA the wall's, all work waited for."""
        if self.device.type != "cuda":
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def reserve_host(self, blocks: int) -> None:
        """Pin host memory for so many swapped blocks beforehand; without CUDA nothing is done."""
        self.cache.reserve(min(blocks, MAX_PINNED // self.cache.block_bytes))

    def tokens(self, request_id: int) -> list[int]:
        """Return a request's text, prompt and answer so far, until it is retired."""
        return self.states.tokens(request_id).tolist()

    def answer(self, request_id: int) -> list[int] | None:
        """Return what a request has answered so far, also once it is retired."""
        answer = self.states.answer(request_id)
        return None if answer is None else answer.tolist()

    def retire(self, request_id: int) -> None:
        """Forget a request but its answer, which the prompt of a later turn may contain."""
        self.states.retire(request_id)

    def reset(self) -> None:
        """Forget all requests; the cache keeps its numbers, which nobody owns any more."""
        self.states = RequestStates(self.spec.vocab_size)
        self.inputs.reset(self.states)
        for pieces in self._swapped.values():
            self.cache.release(pieces)
        self._swapped.clear()

    def fill_random(self) -> None:
        """Fill the cache with noise: steps over any context can then be timed without prefill."""
        self.cache.fill_random(self._generator)


def find_device(name: str) -> torch.device:
    """Find a device by its torch name; HeadwayError where it is none, or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HeadwayError(f"--device {name}: must be cpu or cuda") from None
    if device.type not in {"cpu", "cuda"}:
        raise HeadwayError(f"--device {name}: must be cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise HeadwayError(f"--device {name}: torch {torch.__version__} finds no CUDA GPU")
        if (device.index or 0) >= torch.cuda.device_count():
            raise HeadwayError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    return device


def check_supported(spec: ModelSpec) -> None:
    """Raise HeadwayError for a model that the simulator knows but the engine does not."""
    if spec.num_experts:
        raise HeadwayError(
            f"model: {spec.name} is a mixture of experts; the engine runs dense ones"
        )
    if spec.latent is not None or spec.sliding_window:
        what = "latent attention" if spec.latent is not None else "a sliding window"
        raise HeadwayError(f"model: {spec.name} has {what}; the engine has full attention alone")
    if spec.norms_per_layer != 2:
        raise HeadwayError(
            f"model: {spec.name} has {spec.norms_per_layer} norms in a layer; the engine has 2"
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.rope_type not in {"llama3", "linear"}:
        raise HeadwayError(
            f"model: {spec.name} has rope_scaling {scaling.rope_type!r}; the engine knows llama3 "
            "and linear"
        )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that the device has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def work_bytes(spec: ModelSpec, sequences: int, tokens: int, dtype: torch.dtype) -> int:
    """Count what a GPU holds beside weights and cache: one layer's activations, logits, workspaces.

    Of a layer the largest are alive at once: the stream, its norm, gate and up and their product.
    """
    logits = max(sequences, 1) * spec.vocab_size
    heads = spec.num_attention_heads * spec.head_dim
    partials = 4 * MAX_DECODE_PARTS * heads  # float32
    return (tokens * _layer_width(spec) + logits) * dtype.itemsize + partials + LIBRARY_BYTES


def graph_bytes(
    spec: ModelSpec, sequences: int, mixed_sizes: Sequence[int], dtype: torch.dtype
) -> int:
    """Count what the graphs hold, which share one pool: activations and logits of the largest.

    Those of steps with prompts leave two streams each, that the output projection reads.
    """
    decodes = sequences * (_layer_width(spec) + spec.vocab_size)
    prompts = max(mixed_sizes, default=0) * _layer_width(spec)
    outputs = sum(mixed_sizes) * 2 * spec.hidden_size
    return (max(decodes, prompts) + outputs) * dtype.itemsize


def _layer_width(spec: ModelSpec) -> int:
    """Count the numbers per token that one layer holds at once."""
    wide = 3 * spec.hidden_size + 3 * spec.intermediate_size
    return wide + 2 * (spec.num_attention_heads + spec.num_key_value_heads) * spec.head_dim


def check_fits(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    work: int = 0,
) -> None:
    """Raise HeadwayError where weights, cache and `work` bytes do not fit what is left."""
    headroom = HEADROOM + work
    weights = spec.parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    cache = int(num_blocks * block_size * spec.kv_bytes_per_token(name))
    free = free_bytes(device)
    if weights + cache + headroom <= free:
        return
    fitting = int((free - headroom - weights) // (cache / num_blocks))
    keys = "engine.num_gpu_blocks_override, or --num-blocks of calibrate"
    hint = f"at most {fitting} blocks fit: {keys}" if fitting > 1 else "take a smaller model"
    raise HeadwayError(
        f"device: {spec.name} in {name} does not fit {device}: {weights / GIB:.2f} GiB of weights, "
        f"{cache / GIB:.2f} GiB for {num_blocks} KV blocks and {headroom / GIB:.2f} GiB to work "
        f"with, but {free / GIB:.2f} GiB are free; {hint}"
    )
