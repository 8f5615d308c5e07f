"""The text of a fitted profile: YAML whose numbers have their meaning behind them."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from calibration.errors import Errors
from simulator.costs.linear import Fitted
from simulator.costs.profile import FORMS, RESERVED_FIELDS, settings_of
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario

MEANINGS = {
    "overhead": "a step's scheduling, sampling, input and output in the engine",
    "head": "output projection and sampler: reading the weights",
    "head_per_sequence": "the same, where it is bound by its products",
    "decode": "attention of a pure decode step: its launches",
    "decode_per_context": "the same, per cached token read",
    "decode_per_sequence": "the same, per sequence, where the contexts are short",
    "decode_least": "the same, however little is read",
    "prefill": "attention of a step with prompts: its launches",
    "prefill_per_pair": "the same, per (query, key) pair of the prompts",
    "prefill_per_token": "the same, per token of the prompts",
    "mixed_per_context": "the same, per cached token that its decodes read",
    "mixed_per_sequence": "the same, per decode",
    "mixed_least": "mixed_per_context times them, however few",
    "state_per_sequence": "the states of linear attention of each decode, alone",
    "window": "tokens that layers with a sliding window read, at most",
    "decode_per_window": "decode_per_context of these layers",
    "mixed_per_window": "mixed_per_context of these layers",
    "prefill_per_window_pair": "prefill_per_pair of these layers",
    "per_key": "a decode step's wait, per key of its longest sequence",
    "kv_heads": "on each GPU",
    "multiprocessors": "of the GPU",
    "beyond_mean": "the wait is for keys that the longest has more than the mean",
    "serial_per_token": "the same, per token of the longest sequence: no step is faster",
}


def join_blocks(blocks: Iterable[Iterable[str]]) -> str:
    """Join blocks of lines with an empty line between them."""
    return "\n\n".join("\n".join(lines) for lines in map(list, blocks) if lines) + "\n"


def head_lines(
    title: str, author: str, model: object, hardware: Mapping[str, object]
) -> Iterator[str]:
    """Yield the comment above a profile, and what it is of."""
    yield f"# {title}."
    yield f"# Written by {author}."
    yield f"model: {model}"
    yield "hardware:"
    yield from (f"  {name}: {value}" for name, value in hardware.items())


def cost_lines(
    terms: Mapping[str, object], meanings: Mapping[str, str], kind: str = "piecewise"
) -> Iterator[str]:
    """Yield the block of a piecewise cost, without its dense table."""
    yield "cost: # seconds, all layers together"
    yield f"  kind: {kind}"
    yield from (f"  {name}: {value} # {meanings.get(name, '')}" for name, value in terms.items())


def range_lines(limits: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield the block of the range that a cost was fitted to."""
    yield "range: # of the steps fitted to; beyond, a run warns"
    yield from (f"  {name}: [{low}, {high}]" for name, (low, high) in limits.items())


def residual_lines(residuals: Mapping[str, float], meaning: str) -> Iterator[str]:
    """Yield the block of residuals, which is empty where there are none."""
    if residuals:
        yield f"residuals: # {meaning}"
        yield from (f"  {name}: {value:.4f}" for name, value in residuals.items())


def error_lines(errors: Errors, indent: str) -> Iterator[str]:
    """Yield errors as a profile's `fit` has them."""
    yield f"{indent}points: {errors.points}"
    yield f"{indent}median_relative_error: {errors.median:.4f}"
    yield f"{indent}p95_relative_error: {errors.p95:.4f}"


def cost_block(cost: Fitted) -> dict[str, Any]:
    """Return the `cost` of a scenario or profile that stands for a cost model."""
    kind = next(kind for kind, form in FORMS.items() if form is type(cost))
    names = [
        field.name for field in fields(cost) if field.init and field.name not in RESERVED_FIELDS
    ]
    values = {name: getattr(cost, name) for name in names}
    return {"kind": kind} | {k: [*v] if isinstance(v, tuple) else v for k, v in values.items()}


def how_to_use(path: Path, scenario: Scenario) -> str:
    """Tell the command that runs the scenario with this profile.

    What a scenario names is looked up beside its file; a profile elsewhere is named in full.
    """
    place, folder = path.absolute(), scenario.folder.absolute()
    if place.is_relative_to(folder):
        place = place.relative_to(folder)
    text = str(place)
    named = text if re.fullmatch(r"[\w./][\w./ -]*", text) else json.dumps(text)
    cost = f"cost={{profile: {named}}}"
    words = ["headway", "run", scenario.file, "--set", cost]
    return f"to use it: {shlex.join(words)}"


def scenario_profile(
    scenario: Scenario,
    cost: Fitted,
    residuals: Mapping[str, float],
    fit: Mapping[str, Any],
    sources: Sequence[str],
) -> str:
    """Write a profile that was fitted to a log of a scenario's model, GPU and precision."""
    import yaml

    spec = resolve(scenario)
    raw: dict[str, Any] = {
        "model": spec.model.name,
        "hardware": {"gpu": spec.gpu.name, **settings_of(spec.model, scenario.engine)},
        "cost": {name: rounded(value) for name, value in cost_block(cost).items()},
        "range": {name: [*map(int, pair)] for name, pair in (cost.limits or {}).items()},
        "residuals": {name: round(value, 4) for name, value in residuals.items()},
        "fit": fit,
        "sources": [*sources],
    }
    return str(yaml.safe_dump(raw, sort_keys=False, width=98))


def rounded(value: Any) -> Any:
    """Round numbers to five digits, make lists of sequences."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple | list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}")
