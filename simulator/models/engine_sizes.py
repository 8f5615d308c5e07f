"""What of an engine its memory depends on."""

import csv
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec

Release = tuple[int, int, int]
NEWEST: Release = (0, 33, 0)
WIDE_INDEXED_SINCE: Release = (0, 11, 1)
"""Before, vLLM's `auto` was fp8_ds_mla for DeepSeek-V3.2 (verify_and_update_config)."""
BFLOAT16 = 8.0  # compute capability from which on GPUs compute in it

FractionOf = Literal["all", "static", "free"]
"""What `gpu_memory_utilization` is a share of. `all`: of the GPU's memory, of which weights,
activations and libraries leave the rest to the cache (vLLM). `static`: of what is free before
loading, but activations and libraries lie outside (SGLang's `mem_fraction_static`). `free`: of what
weights, activations and libraries leave (TensorRT-LLM's `free_gpu_memory_fraction`; TGI)."""


@cache
def term_of(name: str, share: FractionOf, release: Release) -> int:
    """Return the bytes that `memory_terms.csv` has of a term in a release, its last; 0: none."""
    table = Path(__file__).with_name("memory_terms.csv").read_text("utf-8").splitlines()
    found = 0
    for row in csv.DictReader(table):
        since = tuple(map(int, row["since"].split(".")))
        if (row["term"], row["share"]) == (name, share) and since <= release:
            found = int(row["bytes"])
    return found


class EngineSizes(NamedTuple):
    """Keys of an engine on which its memory depends, with vLLM's names and defaults."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.92
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int | Literal["auto"] | None = None  # None: the model's; auto: that fits
    positions: int = 0  # most tokens of a request in the model; 0: by max_position_embeddings
    num_gpu_blocks_override: int | None = None  # None: as many as fit
    enable_prefix_caching: bool = True
    mamba_cache_mode: str = "none"
    exports_states: bool = False  # a chunk's kernels keep a state beside that of its end
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    tower: bool = True  # encoders are loaded
    fraction_of: FractionOf = "all"
    hybrid: bool = False  # vLLM's hybrid KV cache manager
    release: Release = NEWEST  # of vLLM
    drafts: str | None = None  # eagle, eagle3, mtp: who drafts
    ahead: int = 0  # tokens that they draft
    draft: ModelSpec | None = None  # a draft model's or EAGLE's, by its config.json
    unread_draft: bool = False  # one is named
    adapters: int = 0  # bytes set aside for adapters (LoRA)
    encoder_cache: int | None = None  # tokens; None: by the other keys
    trtllm: bool = False

    def term(self, name: str) -> int:
        """Bytes of a term of `memory_terms.csv`."""
        return term_of(name, self.fraction_of, self.release)

    @property
    def weights(self) -> str:
        """Dtype that the weights are asked to have; auto: as published."""
        return self.quantization or self.dtype

    def cache(self, model: ModelSpec) -> str:
        """Dtype of the KV cache."""
        own = model.checkpoint.cache if model.checkpoint else ""
        indexed = model.latent is not None and model.latent.index_n_heads > 0
        if indexed and self.fraction_of == "all" and self.release < WIDE_INDEXED_SINCE:
            own = "fp8"
        asked = (own or self.dtype) if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return model.resolve_dtype(asked)

    def on(self, gpu: Gpu, model: ModelSpec) -> "EngineSizes":
        """Return them as on a GPU: vLLM's `auto` takes no bfloat16 where the GPU has none."""
        bare = self.dtype == "auto" and 0 < gpu.compute_capability < BFLOAT16
        if not bare or model.resolve_dtype() != "bfloat16":
            return self
        return self._replace(dtype="float32" if model.no_float16 else "float16")

    def more_layers(self, model: ModelSpec) -> float:
        """Layers with a KV cache that draft, as many as one of the model's takes."""
        if self.draft is None or self.fraction_of == "static":  # SGLang: as large as the model's
            layers = self.draft.num_hidden_layers if self.draft else 1
            return float(layers * (self.drafts in ("eagle", "eagle3", "mtp")))
        gpus, kind, cache = self.tensor_parallel_size, max(model.cached_layers), self.cache(model)
        own = self.draft.kv_bytes_per_token(cache) * self.draft.kv_share(gpus)
        return own / (model.layer_bytes(kind, cache) * model.kv_share(gpus))
