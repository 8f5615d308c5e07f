"""How an engine runs a model, as far as its steps' cost depends on it: dtypes, GPUs, buses."""

from typing import Protocol

from simulator.models.spec import HALF, ModelSpec, bytes_of

FP8 = "fp8"
FP8S = (FP8, "fp8_e4m3", "fp8_e5m2")


class Precision(Protocol):
    """How an engine runs a model; `engine` of a scenario has these."""

    @property
    def block_size(self) -> int:
        """Tokens in a block of the KV cache."""

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that share each layer."""

    @property
    def data_parallel_size(self) -> int:
        """Engine cores of a server, which share the experts."""

    @property
    def dtype(self) -> str:
        """Of weights and activations."""

    @property
    def quantization(self) -> str | None:
        """Of the weights."""

    @property
    def kv_cache_dtype(self) -> str:
        """Of the KV cache."""

    @property
    def async_scheduling(self) -> bool:
        """Whether a step is decided while the one before it runs."""

    @property
    def version(self) -> str | None:
        """Of vLLM: says what the engine adds to its kernels; None: the latest."""

    @property
    def swap_bandwidth(self) -> float | None:
        """GB/s between a GPU and its host, each way; None: as measured, else as the bus has."""

    @property
    def kv_offloading_bandwidth(self) -> float | None:
        """GB/s from the host tier to a GPU; None: that of swap."""

    @property
    def kv_offloading_latency(self) -> float:
        """Ms for each request whose prefix comes from there."""

    @property
    def swap_overlap(self) -> bool:
        """Whether copies of KV blocks run beside the compute of their step."""


def settings_of(model: ModelSpec, engine: Precision) -> dict[str, object]:
    """Put an engine's settings into a profile's words."""
    dtype = model.resolve_dtype(engine.dtype)
    return {
        "tensor_parallel_size": engine.tensor_parallel_size,
        "dtype": engine.quantization or dtype,
        "kv_cache_dtype": dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
    }


def alike(one: object, two: object) -> bool:
    """Compare two settings; dtypes of the same kind and width take the same time."""
    one, two = (FP8 if word in FP8S else word for word in (one, two))
    halves = {word for word in (one, two) if isinstance(word, str) and _is_half(word)}
    return one == two or halves == {one, two}


def _is_half(word: str) -> bool:
    try:
        return bytes_of(word) == HALF
    except ValueError:
        return False


def kv_block_bytes(model: ModelSpec, engine: Precision) -> float:
    """Bytes of a KV block on each GPU."""
    dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    share = model.kv_share(engine.tensor_parallel_size)
    return engine.block_size * model.kv_bytes_per_token(dtype) * share
