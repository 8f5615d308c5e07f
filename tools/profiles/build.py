"""Build the cost profile of one model on one GPU out of published kernel tables.

python -m tools.profiles.build --model llama-3.1-70b --gpu H200 --tp 4 --data DIR --out FILE
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from simulator.models.load import load_model
from simulator.util.errors import HeadwayError, ScenarioError, one_line
from simulator.util.files import check_file
from tools.profiles.compose import Target
from tools.profiles.fit import write_profile
from tools.profiles.tables import find_gpu_tables

HALVES = ("auto", "bfloat16", "float16", "bf16", "fp16")


def build(
    *,
    model: Annotated[str, Parameter(help="shipped model, or the path of a config.json")],
    gpu: Annotated[str, Parameter(help="GPU with kernel tables, e.g. H100-80GB")],
    tp: Annotated[int, Parameter(help="GPUs that share each layer")] = 1,
    dtype: Annotated[
        str, Parameter(help="type of weights and activations: auto or a 16-bit type")
    ] = ("auto"),
    quantization: Annotated[
        str | None,
        Parameter(
            help="type of the weights: fp8, int8, int4, nvfp4 or mxfp4 [default: as published]"
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str, Parameter(help="type of the KV cache: auto, bfloat16, fp8")
    ] = "auto",
    data: Annotated[
        Path | None, Parameter(help="folder with the tables [default: $HEADWAY_DATA]")
    ] = None,
    out: Annotated[Path, Parameter(help="file to write")],
) -> int:
    """Compose a model's steps from kernel tables, fit a cost profile to them and write it."""

    check_file("--out", out)
    try:
        spec = load_model(model)
    except ScenarioError as error:
        raise HeadwayError(f"--model: {error.what}") from None
    quantization = quantization or (spec.quantization if dtype == "auto" else "") or None
    weights, cache = _precision(dtype, quantization, kv_cache_dtype)
    target = Target(spec, find_gpu_tables(gpu), tp, weights, cache)
    report = write_profile(_data(data), target, out)
    if report.errors is None or report.held_out is None:
        print(f"written to {out}: {report.notes[0]}")
        return 0
    print(
        f"written to {out}: median error {report.errors.median:.1%} of {report.errors.points:,} "
        f"composed steps, {report.held_out.median:.1%} of unseen ones"
    )
    for note in report.notes:
        print(f"not measured: {note}")
    return 0


def _precision(dtype: str, quantization: str | None, cache: str) -> tuple[str, str]:
    """Return the dtypes of weights and cache in a profile's words; 16 bits are all the same."""
    from simulator.models.dtypes import bytes_of

    if dtype not in HALVES:
        raise HeadwayError(f"--dtype: must be one of {', '.join(HALVES)}, not {dtype!r}")
    known = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
    if quantization not in (None, *known):
        raise HeadwayError(f"--quantization: must be one of {', '.join(known)}")
    if cache not in HALVES and not cache.startswith("fp8"):
        raise HeadwayError(f"--kv-cache-dtype: must be a 16-bit one or fp8, not {cache!r}")
    try:
        bytes_of("bfloat16" if cache == "auto" else cache)
    except ValueError as error:
        raise HeadwayError(f"--kv-cache-dtype: {error}") from None
    return quantization or "bfloat16", "fp8" if cache.startswith("fp8") else "bfloat16"


def _data(given: Path | None) -> Path:
    """Find the folder of the tables."""
    place = given or (Path(os.environ["HEADWAY_DATA"]) if "HEADWAY_DATA" in os.environ else None)
    if place is None:
        raise HeadwayError("--data: say where the kernel tables are, or set HEADWAY_DATA")
    if not place.is_dir():
        raise HeadwayError(f"--data {place}: no such folder")
    return place


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; what is wrong becomes a line, and the exit code 2."""
    app = App(name="tools.profiles.build", result_action="return_value")
    app.default(build)
    try:
        code: int = app(words, exit_on_error=False, print_error=False)
    except (HeadwayError, CycloptsError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
