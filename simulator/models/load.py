"""Find a model: a shipped one by its name or by that of one of its shape, or a config.json."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import combinations
from pathlib import Path

from simulator.models.config_json import read_config
from simulator.models.spec import ModelSpec
from simulator.util.config import Config
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
    **{f"vicuna-{size}-v1.5": f"llama-2-{size}" for size in ("7b", "13b")},
    "llama-3.1-nemotron-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "mistral-7b-instruct-v0.1": "mistral-7b-v0.1",
    **{f"mistral-7b-instruct-v0.{number}": "mistral-7b-v0.3" for number in (2, 3)},
    **{
        f"mixtral-8x{size}{tuned}-v0.1": f"mixtral-8x{size}"
        for size in ("7b", "22b")
        for tuned in ("", "-instruct")
    },
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
    r"meta|base|chat|instruct|it|pt|hf|python|thinking|preview|reasoning|plus"
    r"|0[1-9]\d\d|2[45]\d\d|bf16|fp16|fp8|fp4|nvfp4|mxfp4|int[48]|w\d{1,2}a\d{1,2}|[48]bit|bnb|awq"
    r"|gptq|gguf|qat|q4_0|quantized(\.w\d{1,2}a\d{1,2})?|dynamic|block|kv|marlin"
)
"""Each word that the hub adds to a model's name for a release of the same shape: its tuning by its
maker, month and day (0528) or year and month (2507), how its weights are quantized."""


class FineTune(Config):
    """A model of one's own that has the shape of a known one; its name is what servers load."""

    like: str
    name: str

    def __str__(self) -> str:
        return self.name


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

        wanted = str(name_or_path)
        near = get_close_matches(wanted.lower(), names, n=len(names), cutoff=0.5)
        like = near[0] if near else "NAME"
        raise ValueError(
            f"model: no file {path} and no shipped model {wanted!r}{did_you_mean(wanted, names)}; "
            f"a scenario takes a fine-tune as model: {{like: {like}, name: ...}}; there are "
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
    words = re.split(r"[-\s:]+|_(?!\d)", name.rstrip("/").rsplit("/", 1)[-1].lower())
    known = _names_by_parts(tuple(shipped))
    # The longest name first: `hermes-4-14b` before `hermes-4`.
    ends = combinations(range(len(words) + 1), 2)
    for first, last in sorted(ends, key=lambda pair: pair[0] - pair[1]):
        found = known.get(_parts("-".join(words[first:last])))
        if found and all(map(RELEASE_WORDS.fullmatch, words[:first] + words[last:])):
            return found
    return None


@lru_cache(maxsize=4)
def _names_by_parts(shipped: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Return the models by the letters and numbers of their names."""
    same = {_parts(name): shape for name, shape in SAME_SHAPE.items() if shape in shipped}
    return same | {_parts(name): name for name in shipped}


def _parts(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z]+|\d+", name))
