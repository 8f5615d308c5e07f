"""What a campaign runs: its parts in order, the time and files of each, the sizes of its engine.

What is wanted most comes first. A part is a process of its own, so that one which fails, hangs or
breaks the GPU's context is written down and the next one begins.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHON = (sys.executable, "-m")
HEADWAY = (*PYTHON, "headway")
PROFILES = "calibration*/*.yaml"
TRITON = "triton"


@dataclass(frozen=True)
class Part:
    """One process: what it runs, the most seconds it may take, the least it is begun with.

    In `command`, `{budget}` stands for the seconds it should measure, `{graph_tokens}` for what the
    timings found, `{0}` for the largest file of the first pattern that it `needs`, in `extra` for
    that of its own pattern.
    """

    name: str
    command: tuple[str, ...]
    most: float
    least: float = 5.0
    needs: tuple[str, ...] = ()  # files in the folder, by pattern
    unless: str = ""  # a pattern: where there is such a file, the part is not needed
    extra: tuple[str, tuple[str, ...]] = ("", ())  # words that are added where there is such a file
    retry: tuple[str, ...] = ()  # words that are added when it has failed and is begun again
    leaves: str = ""  # its folder, set aside before it begins again
    module: str = ""  # that must be installed
    result: str = ""  # a pattern: once there is such a file, what the part is for is done


@dataclass(frozen=True)
class Setup:
    """The engine of a campaign, its workloads, and the seconds of its parts on a kind of device."""

    model: str
    gpu: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    input_len: tuple[int, int]  # tokens, from and to
    output_len: tuple[int, int]
    loads: tuple[tuple[str, float, int, int], ...]  # name, requests/s, requests, reruns
    calibrate_s: str  # that `headway calibrate` measures
    seconds: Mapping[str, float]  # the most of each part


SETUPS = {
    "cuda": Setup(
        model="llama-3.1-8b",
        gpu="H200",
        dtype="auto",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        num_blocks=24576,
        input_len=(64, 2000),
        output_len=(16, 384),
        loads=(("light", 4.0, 60, 2), ("heavy", 14.0, 210, 2)),  # 20 s each time
        calibrate_s="{budget}",
        seconds={  # 530 in all, some 20 of which go to the imports of each part
            "precompile": 45, "checks": 50, "timings": 60, "calibration": 150, "refit": 15,
            "live-light": 85, "validate-light": 15, "live-heavy": 95, "validate-heavy": 15,
        },
    ),
    "cpu": Setup(
        model="tiny-test",
        gpu="CPU",
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=256,
        input_len=(8, 64),
        output_len=(2, 16),
        loads=(("light", 5.0, 6, 1), ("heavy", 20.0, 12, 0)),
        calibrate_s="5",
        seconds={  # some five times what they take, for machines that others use, too
            "checks": 120, "timings": 60, "calibration": 90, "refit": 40,
            "live-light": 60, "validate-light": 40, "live-heavy": 60, "validate-heavy": 40,
        },
    ),
}  # fmt: skip

SCENARIO = """\
# Conversations as in the demo scenario, at another rate.
name: {name}
model: {model}
gpu: {{name: {gpu}, count: 1}}
engine:
  name: textbook
  max_num_seqs: {setup.max_num_seqs}
  max_num_batched_tokens: {setup.max_num_batched_tokens}
  max_model_len: {setup.max_model_len}
  num_gpu_blocks_override: {setup.num_blocks}
  dtype: {setup.dtype}
  enable_prefix_caching: false
workload:
  num_prompts: {prompts}
  request_rate: {rate}
  burstiness: 0.835
  input_len: {{kind: uniform, low: {setup.input_len[0]}, high: {setup.input_len[1]}}}
  output_len: {{kind: uniform, low: {setup.output_len[0]}, high: {setup.output_len[1]}}}
seed: {seed}
"""


def plan(folder: Path, device: str, model: str, gpu: str = "") -> list[Part]:
    """List the parts in order, and write the scenarios that they replay.

    `gpu` is the scenarios' name of it, by default the one that the sizes were chosen for.
    """
    setup = SETUPS[device]
    times = setup.seconds
    no_graphs = ("--no-graphs",) if device == "cuda" else ()
    on = ("--device", device)
    engine = TRITON if device == "cuda" else ""  # on a CPU it is plain torch
    parts = (
        [
            Part(
                "precompile",
                (*PYTHON, "tools.campaign.precompile"),
                times["precompile"],
                module=TRITON,
            )
        ]
        if device == "cuda"
        else []
    )  # fmt: skip; the interpreter compiles nothing
    parts += [
        Part(
            "checks", (*PYTHON, "tools.campaign.checks", *on), times["checks"], module=TRITON
        ),
        Part(
            "timings",
            (*PYTHON, "tools.campaign.timings", *on, "--model", model,
             "--out", str(folder), "--budget-s", "{budget}"),
            times["timings"], retry=no_graphs,
        ),
        Part(
            "calibration",
            (*HEADWAY, "calibrate", "--model", model, *on,
             "--out", str(folder / "calibration"), "--budget-s", setup.calibrate_s,
             "--num-blocks", str(setup.num_blocks), "--max-num-seqs", str(setup.max_num_seqs),
             "--max-num-batched-tokens", str(setup.max_num_batched_tokens),
             "--max-model-len", str(setup.max_model_len), "--graph-tokens", "{graph_tokens}"),
            times["calibration"], least=times["calibration"] / 3, retry=no_graphs,
            leaves="calibration", module=engine, result="calibration/*.yaml",
        ),
        Part(
            "refit", (*HEADWAY, "calibrate", "--from", "{0}"), times["refit"],
            needs=("calibration*/steps.csv.gz",), unless=PROFILES,
        ),
    ]  # fmt: skip
    for seed, (name, rate, prompts, reruns) in enumerate(setup.loads, 1):
        text = SCENARIO.format(
            name=name, model=model, gpu=gpu or setup.gpu, setup=setup, prompts=prompts, rate=rate,
            seed=seed,
        )  # fmt: skip
        scenario, out = folder / f"{name}.yaml", folder / f"live-{name}"
        scenario.write_text(text)
        clock = "exec" if device == "cpu" else "wall"
        parts += [
            Part(
                f"live-{name}",
                (*HEADWAY, "live", str(scenario), *on, "--clock", clock,
                 "--reruns", str(reruns), "--out", str(out)),
                times[f"live-{name}"], extra=(PROFILES, ("--set", "cost.profile={0}")),
                retry=no_graphs, leaves=out.name, module=engine,
                result=f"{out.name}/live.json",
            ),
            Part(
                f"validate-{name}", (*HEADWAY, "validate", str(out)), times[f"validate-{name}"],
                needs=(f"live-{name}/live.json",),
            ),
        ]  # fmt: skip
    return parts


def scaled(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Share seconds out among parts as their own limits have it."""
    share = seconds / sum(part.most for part in parts)
    return [replace(part, most=share * part.most, least=share * part.least) for part in parts]
