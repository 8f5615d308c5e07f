"""What of an engine its memory depends on."""

from functools import cache
from typing import Literal

from simulator.core.engine_config import EngineConfig
from simulator.models.dtypes import HALF, bytes_of
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.util.files import read_table

Release = tuple[int, int, int]
NEWEST: Release = (0, 33, 0)
LONGER = {
    **dict.fromkeys(("vllm", "vllm-v0"), "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
}
"""Variables without which engines do not start with requests beyond a model's positions."""
KEEPS_WINDOWS_SINCE: Release = (0, 23, 0)
"""Before, any connector (--kv-transfer-config) turned vLLM's hybrid KV cache manager off."""
SGLANG_PAGE = 16  # tokens of the shortest page that TensorRT-LLM's kernels take there
BFLOAT16 = 8.0  # compute capability from which on GPUs compute in it

FractionOf = Literal["all", "static", "free"]
"""What `gpu_memory_utilization` is a share of. `all`: of the GPU's memory, of which weights,
activations and libraries leave the rest to the cache (vLLM). `static`: of what is free before
loading, but activations and libraries lie outside (SGLang's `mem_fraction_static`). `free`: of what
weights, activations and libraries leave (TensorRT-LLM's `free_gpu_memory_fraction`; TGI)."""


@cache
def term_of(name: str, share: FractionOf, release: Release) -> int:
    """Return what `memory_terms.csv` has of a term in a release, its last; 0: nothing."""
    table = read_table(__file__, "memory_terms.csv")
    rows = [row for row in table if (row["term"], row["share"]) == (name, share)]
    known = [one for one in rows if tuple(map(int, one["since"].split("."))) <= release]
    return int(known[-1]["value"]) if known else 0


class EngineSizes(EngineConfig):
    """An engine's keys, and what else its memory depends on."""

    fraction_of: FractionOf = "all"
    release: Release = NEWEST  # of vLLM
    positions: int = 0  # most tokens of a request where none are given; 0: of the model
    exports_states: bool = False  # a chunk's kernels keep a state beside that of its end
    draft: ModelSpec | None = None  # a draft model's or EAGLE's, by its config.json
    adapters: int = 0  # bytes set aside for adapters (LoRA)
    kv_cache_memory: bool = False  # num_gpu_blocks_override is vLLM's kv_cache_memory_bytes

    def term(self, name: str) -> int:
        """Bytes, or numbers, of a term of `memory_terms.csv`."""
        return term_of(name, self.fraction_of, self.release)

    @property
    def in_flight(self) -> int:
        """Tokens at most that are being computed, in all steps that overlap."""
        overlap = self.term("steps that overlap")
        steps = self.pipeline_parallel_size + self.async_scheduling if overlap else 1
        return steps * self.max_num_batched_tokens

    def has_windows(self, model: ModelSpec) -> bool:
        """Whether layers with a window, or chunks, keep no more than that."""
        plain = self.draft_method in (None, "ngram", "draft_model")
        chunks = model.chunked and self.term("tables of chunks") > 0 and plain
        return not self.disable_hybrid_kv_cache_manager and (chunks or model.keeps_window)

    def encodes(self, *modalities: str) -> bool:
        """Whether the encoder of these is loaded."""
        return self.multimodal_config is None or self.multimodal_config.takes(*modalities)

    def cache(self, model: ModelSpec) -> str:
        """Dtype of the KV cache."""
        own, method = (one.cache, one.method) if (one := model.checkpoint) else ("", "")
        read = self.term(f"cache of {own if method.startswith('modelopt') else method}")
        if self.fraction_of == "all" and not read:
            own = ""
        if model.latent is not None and model.latent.index_n_heads and self.term("narrow index"):
            own = "fp8"
        asked = (own or self.dtype) if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return model.resolve_dtype(asked)

    def on(self, gpu: Gpu, model: ModelSpec) -> "EngineSizes":
        """Return them as on a GPU: in blocks of its kernels, without bfloat16 if it has none."""
        changed: dict[str, object] = {}
        block = self.term(f"block_{self._kernels(model)}_{gpu.compute_capability}")
        if block and self.block_size % (block if self.fraction_of == "all" else SGLANG_PAGE):
            changed["block_size"] = block
        bare = self.dtype == "auto" and 0 < gpu.compute_capability < BFLOAT16
        if bare and model.resolve_dtype() == "bfloat16":
            changed["dtype"] = "float32" if model.no_float16 else "float16"
        return self.model_copy(update=changed) if changed else self

    def _kernels(self, model: ModelSpec) -> str:
        """Name the kernels of a model's attention, which may take some sizes of blocks alone."""
        drafts = self.speculative_config
        if model.latent is None:
            return "tree" if drafts and drafts.speculative_eagle_topk > 1 else "dense"
        narrow = bytes_of(self.cache(model)) < HALF
        return "indexed" if model.latent.index_n_heads else "narrow" if narrow else "latent"

    def more_layers(self, model: ModelSpec) -> float:
        """Layers with a KV cache that draft, as many as one of the model's takes."""
        if self.draft is None or self.fraction_of == "static":  # SGLang: as large as the model's
            layers = self.draft.num_hidden_layers if self.draft else 1
            return float(layers * (self.draft_method in ("eagle", "eagle3", "mtp")))
        gpus, kind, cache = self.tensor_parallel_size, max(model.cached_layers), self.cache(model)
        own = self.draft.kv_bytes_per_token(cache, gpus)
        return own / model.layer_bytes(kind, cache, gpus)
