"""Find a model: a shipped one by its name or by that of one of its shape, or a config.json."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

from simulator.models.config_json import read_config
from simulator.models.spec import ModelSpec
from simulator.util.errors import did_you_mean
from simulator.util.files import resolve, why_not_regular

MODELS = Path(__file__).parent / "configs"

LLAMA_VARIANTS = ("hermes-4", "llama-3.1-tulu-3")
SAME_SHAPE = {
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "deepseek-v3.1": "deepseek-v3",
    "nous-hermes-2-mixtral-8x7b-dpo": "mixtral-8x7b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "llama-7b": "llama-2-7b",
    "llama-13b": "llama-2-13b",
    "vicuna-7b": "llama-2-7b",
    "vicuna-13b": "llama-2-13b",
    "llama-3.1-nemotron-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "qwq-32b": "qwen2.5-32b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-coder-v2-lite": "deepseek-v2-lite",
    "phi-3.5-mini": "phi-3-mini-128k",
    "glm-4.6": "glm-4.5",
    "hermes-4-14b": "qwen3-14b",
    "zephyr-7b-beta": "mistral-7b-v0.1",
    **{f"glm-z1-{size}": f"glm-4-{size}" for size in ("9b", "32b")},
    **{
        f"{name}-{size}": f"llama-3.1-{size}"
        for name in LLAMA_VARIANTS
        for size in ("8b", "70b", "405b")
    },
    **{f"hermes-3-llama-3.1-{size}": f"llama-3.1-{size}" for size in ("8b", "70b", "405b")},
    **{
        f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}"
        for size in ("1.5b", "7b", "14b", "32b")
    },
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{
        f"qwen2.5-{kind}-{size}": f"qwen2.5-{size}"
        for kind in ("coder", "math")
        for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
    },
    **{f"mistral-small-{version}-24b": "mistral-small-24b" for version in ("3.1", "3.2")},
}
"""Models whose shape is that of a shipped one of another name."""

RELEASE_WORDS = re.compile(
    r"(meta|base|chat|instruct|it|pt|hf|python|thinking|preview|reasoning(plus)?|v\d{1,2}|\d{4}"
    r"|bf16|fp16|fp8|fp4|nvfp4|mxfp4|int[48]|w\d{1,2}a\d{1,2}|[48]bit|bnb|awq|gptq|gguf|qat|q40"
    r"|quantized|dynamic|block|kv|marlin)*"
)
"""What the hub adds to a model's name for a release of the same shape: its tuning by its maker, its
date or version, how its weights are quantized."""


@cache
def shipped_models() -> list[str]:
    """Names of the models whose config.json comes with the package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def load_model(name_or_path: str | Path, base: Path | None = None) -> ModelSpec:
    """Load a shipped model by its name, or the config.json at a path or in a folder.

    A Hugging Face name stands for the shipped model of that shape (`shipped_shape`).
    A relative path is looked up in `base` (the current folder by default), then in the folder
    that HEADWAY_DATA names. Raises ValueError where neither is there, HeadwayError with all that
    is wrong in the file.
    """
    if not str(name_or_path):  # else the current folder's config.json
        raise ValueError("model: is empty")
    names = shipped_models()
    if name_or_path in names:
        return _shipped_model(str(name_or_path))
    path = resolve(name_or_path, base or Path())
    if not path.exists() and (found := shipped_shape(str(name_or_path), names)):
        return _shipped_model(found)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        from difflib import get_close_matches

        near = get_close_matches(str(name_or_path).lower(), names, n=len(names), cutoff=0.5)
        raise ValueError(
            f"model: no file {path} and no shipped model {str(name_or_path)!r}"
            f"{did_you_mean(str(name_or_path), names)}; there are "
            f"{', '.join(dict.fromkeys([*near, *names]))}"
        )
    if wrong := why_not_regular(path):
        raise ValueError(f"model: {wrong}")
    return read_config(path)


@cache
def _shipped_model(name: str) -> ModelSpec:
    return read_config(MODELS / name / "config.json")


def shipped_shape(name: str, shipped: Sequence[str]) -> str | None:
    """Return the one of `shipped` that has the shape of a Hugging Face name; None where none has.

    The owner, case and punctuation do not matter, nor do `RELEASE_WORDS`:
    `RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8` is `llama-3.1-8b`. Any other word is another model.
    """
    word = _normalised(name.rstrip("/").rsplit("/", 1)[-1])
    known = _names_by_key(tuple(shipped))
    for found in sorted((plain for plain in known if plain in word), key=len, reverse=True):
        before, after = word.split(found, 1)
        if RELEASE_WORDS.fullmatch(before) and RELEASE_WORDS.fullmatch(after):
            return known[found]
    return None


@lru_cache(maxsize=4)
def _names_by_key(shipped: tuple[str, ...]) -> dict[str, str]:
    """Return the models by their names without punctuation."""
    same = {_normalised(name): shape for name, shape in SAME_SHAPE.items() if shape in shipped}
    return same | {_normalised(name): name for name in shipped}


def _normalised(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
