"""Find a model: a shipped one by its own name or a listed one of the hub, or a config.json."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from simulator.models.config_json import FOREIGN, read_config
from simulator.models.quantization import TABLE, read_quantization
from simulator.models.spec import ModelSpec
from simulator.util.config import Config
from simulator.util.errors import ScenarioError
from simulator.util.files import read_table, resolve, why_not_regular

MODELS, HUB = Path(__file__).parent / "configs", "hub_names.csv"

PRECISION, RELEASE = (re.compile(TABLE[key]) for key in ("precision", "release"))
"""Words of a model's name: how its weights are quantized; and its tuning by its maker, month and
day (0528) or year and month (2507), which tell releases of one shape apart."""


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


@cache
def _hub_names() -> dict[str, str]:
    """Return the shipped model of each listed name of the hub, in lower case."""
    return {row["hub"].lower(): row["model"] for row in read_table(__file__, HUB)}


@cache
def _under(name: str, model: ModelSpec) -> ModelSpec:
    """Return a model as a name of the hub has it: with its own longest requests."""
    rows = (row for row in read_table(__file__, HUB) if _plain(row["hub"]) == _plain(name))
    most = int(next(rows, {}).get("max_position_embeddings") or model.max_position_embeddings)
    config = {**model.config, "max_position_embeddings": most}
    return replace(model, max_position_embeddings=most, config=config)


def _plain(name: str) -> str:
    """Return the words of a name that say no precision."""
    return "-".join(word for word in _words(name) if not PRECISION.fullmatch(word))


def load_model(name_or_path: str | Path, base: Path | None = None) -> ModelSpec:
    """Load a shipped model by its name (`shipped_name`), or the config.json at a path or in one.

    A relative path is looked up in `base` (the current folder by default), then in the folder
    that HEADWAY_DATA names. Raises ValueError where neither is there, HeadwayError with all that
    is wrong in the file.
    """
    wanted = str(name_or_path)
    if not wanted:  # else the current folder's config.json
        raise ScenarioError("model", "is empty")
    if wanted in shipped_models():
        return _shipped_model(wanted)
    path = resolve(name_or_path, base or Path())
    if path.is_dir():
        path = _config_in(path)
    if not path.exists():
        if wanted[0] in "./~" or wanted.count("/") > 1:
            what = f"{wanted!r} is a path, and there is no file {str(path)!r}"
            raise ScenarioError("model", what, "value")
        if found := shipped_name(wanted):
            return _under(wanted, _shipped_model(found))
        if (by_name := _of_precision(wanted)) is None:
            raise _unknown(wanted)
        return _under(wanted, by_name)
    if wrong := why_not_regular(path):
        raise ScenarioError("model", wrong)
    if foreign := _foreign(path):
        raise ScenarioError("model", f"{path} {foreign}")
    return read_config(path)


ENCODERS = ("re:visual", "re:vision_tower")
"""Modules that makers of quantized checkpoints leave in 16 bits."""


def _foreign(path: Path) -> str:
    """Say of a file of another kind what it is, and what to give; "": of none that is known."""
    return FOREIGN.get(path.name) or FOREIGN.get(path.suffix, "")


def _config_in(folder: Path) -> Path:
    """Return the config.json in a folder; ValueError, with what is there instead, if none is."""
    if (path := folder / "config.json").exists():
        return path
    ours = sorted(one for one in folder.iterdir() if one.suffix in (".gguf", ".json"))
    there = f"has {', '.join(one.name for one in ours[:3])} and" if ours else "has"
    why = next((f"; {one.name} {_foreign(one)}" for one in ours if _foreign(one)), "")
    raise ScenarioError("model", f"{str(folder)!r} {there} no config.json{why}")


@cache
def _shipped_model(name: str) -> ModelSpec:
    return read_config(MODELS / name / "config.json")


def shipped_name(name: str) -> str | None:
    """Return the shipped model of this name, its own or one of `hub_names.csv`; None: no such."""
    return name if name in shipped_models() else _hub_names().get(name.lower())


def _of_precision(name: str) -> ModelSpec | None:
    """Return the shipped model of the name without the words of a precision, in that precision.

    None where the name has no such words, or no shipped model has its shape; its `unread` says
    that the formats are those of the name: of `named` of `formats.json`, the first that has its
    maker, its shape and one of its parts. Some makers leave attention, or all but the experts, in
    16 bits; Qwen pads the MLP of 72B in int4 and int8 from 29,568 to 29,696.
    """
    shape, maker = same_shape(name), name.lower().partition("/")[0]
    told = "-".join(word for word in _words(name) if PRECISION.fullmatch(word))
    if shape is None:
        return None
    own = _shipped_model(shape)
    for row in TABLE["named"]:
        meant = row.get("maker", maker) == maker and row.get("shape", shape) == shape
        parts = not row.get("parts") or any(getattr(own, part) for part in row["parts"])
        if meant and parts and re.fullmatch(row["words"], told):
            why = f"formats of the weights, taken for {told} by the name; its config.json has them"
            ignored = [*row["config"].get("ignore", ()), *ENCODERS]
            checkpoint = read_quantization(row["config"] | {"ignore": ignored})
            return replace(own, checkpoint=checkpoint, unread=why, **row.get("sizes", {}))
    return None


def _unknown(name: str) -> ValueError:
    """Say which names are near, and what a scenario says of other weights of a known shape."""
    from difflib import get_close_matches

    words = name.lower().rsplit("/", 1)[-1]
    hubs = {hub.rsplit("/", 1)[-1]: shipped for hub, shipped in _hub_names().items()}
    like = same_shape(name)
    close = get_close_matches(words, [*shipped_models(), *hubs], 9, cutoff=0.5)
    near = dict.fromkeys([*([like] if like else []), *(hubs.get(each, each) for each in close)])
    hint = f"; did you mean {' or '.join(list(near)[:3])}?;" if near else ";"
    other = f"model: {{like: {next(iter(near), 'NAME')}, name: ...}}"
    if near and not {*_words(name)}.issuperset(_words(next(iter(near)))):  # of another shape
        hint += " for another model give the path of its config.json"
    elif any(map(PRECISION.fullmatch, _words(name))):
        hint += f" the name says another precision: give {other} and engine.quantization"
    else:
        hint += f" a fine-tune is {other}"
    what = f"no file and no shipped model {name!r}{hint}; `headway profile list` has all names"
    return ScenarioError("model", what, "value")


def same_shape(name: str) -> str | None:
    """Return the shipped model that has the shape of a recorded run's; None where none has.

    Who published it, case and punctuation do not matter, nor do words of `PRECISION`, which a
    recorded run tells elsewhere, and `RELEASE`. Any other word is another model.
    """
    return _shapes().get(_shape_words(name))


@cache
def _shapes() -> dict[tuple[str, ...], str]:
    listed = _hub_names() | {name: name for name in shipped_models()}
    return {_shape_words(name): shipped for name, shipped in listed.items()}


def _shape_words(name: str) -> tuple[str, ...]:
    """Return the letters and numbers of a name without the words of a release."""
    kept = [
        one for one in _words(name) if not PRECISION.fullmatch(one) and not RELEASE.fullmatch(one)
    ]
    return tuple(re.findall(r"[a-z]+|\d+", "-".join(kept)))


def _words(name: str) -> list[str]:
    return re.split(r"[-\s:]+|_(?!\d)", name.rsplit("/", 1)[-1].lower())
