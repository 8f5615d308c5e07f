"""How far off whole runs were that are like a prediction's, and where none was judged.

`accuracy.csv` has the errors of measured runs by class, from `make accuracy`; `blind.csv` those of
runs that were scored once.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from math import ceil
from typing import Any

from simulator.models.load import load_model, shipped_models
from simulator.util.files import read_table

DATA_SHEET = "by data sheet"  # runs that are predicted by it, though kernels of them were measured
LONG = 4096  # computed tokens, from which on a prompt is long
HOST_BOUND = 0.25  # of the steps' time, from which on an error of a host is one of the whole run


def run_band(gauges: Mapping[str, Any]) -> str:
    """Say how far whole runs of that kind were off; "" where nobody knows.

    `mean_prompt` among the gauges is of the tokens that are computed. By GPU, engine and release
    the runs are judged that any of its `engines` is like.
    """
    profile = str(gauges.get("profile"))
    lacks = str((gauges.get("step_times") or {}).get("unmeasured"))
    if lacks.startswith("kernels") or " scaled to " in profile:
        kind, more = DATA_SHEET, "by more on a GPU without any measured kernels"
    else:
        name = profile.rsplit(".", 2)[0]
        if name not in shipped_models() or ".cpu." in profile:
            return ""
        model = "experts" if load_model(name).num_experts else "dense"
        kind = run_kind(model, gauges.get("mean_prompt", 0.0))
        kind = kind if ("run", kind) in campaign() else model
        first = f"{blind(model)}; of 38 other runs {blind('study')}"
        more = f"median errors of first scores (docs/accuracy.md): {first}"
    errors = ", ".join(campaign()["run", kind].values())
    parts = [f"nine of ten runs ({kind}; in sample) are off by less than {errors}", more]
    for name, known in judged(gauges.get("engines") or ()).items():
        parts.append(f"with {name}: {known or 'no run was judged'}")
    if (gauges.get("host_share") or 0.0) >= HOST_BOUND:
        many = "the host takes a quarter of the steps' time or more"
        parts.append(f"{many}: on others runs take half to twice")
    return "; ".join(parts)


def of_group(gauges: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the engines of a group among a summary's; of all where nobody says."""
    engines = gauges.get("engines") or ()  # not in the files of earlier versions
    return [one for one in engines if not one["groups"] or name in one["groups"]]


def judged(engines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Say how far off runs were on GPUs, of engines and of releases, by these; "": there is none.

    `engines` as in a summary.
    """
    kinds: dict[str, str] = {}
    for engine in engines:
        release = re.match(r"(\w+) \d+\.\d+", engine["follows"])
        name = release[1] if release else engine["name"]
        name += ", drafts" * ("speculative_config" in engine["set"])
        kinds |= {engine["gpu"]: "GPU", name: "engine"}
        kinds |= {release[0]: "release"} if release else {}
    of = {name: campaign().get((kind, name), {}) for name, kind in kinds.items()}
    shown = ("TPOT", "TTFT")  # that all runs have
    return {name: ", ".join(one[key] for key in shown if key in one) for name, one in of.items()}


def run_kind(model: str, prompt: float) -> str:
    """Name a kind of run by its model, `experts` or `dense`, and its mean prompt, tokens."""
    return f"{model}, long prompts" if prompt >= LONG else model


def blind(kind: str) -> str:
    """Return the medians of a row of docs/accuracy.md that was scored once: no tool writes it."""
    found = [row for row in read_table(__file__, "blind.csv") if row["kind"] == kind]
    return ", ".join(f"{row['metric']} {row['median_percent']}" for row in found) + " %"


@cache
def campaign() -> dict[tuple[str, str], dict[str, str]]:
    """Read from `make accuracy` what nine of ten runs of a class were off by, at most.

    By the class's kind and name, then by metric.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in read_table(__file__, "accuracy.csv"):
        if row["p90"]:
            percent = ceil(round(100 * float(row["p90"]), 2))
            runs = f"{row['runs']} run{'s' * (row['runs'] != '1')}"
            error = f"{percent} % in {row['metric']} ({runs})"
            found.setdefault((row["kind"], row["name"]), {})[row["metric"]] = error
    return found
