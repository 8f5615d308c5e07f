"""What a campaign runs: its parts in order, the time and files of each, the sizes of its engine.

What is wanted most comes first. A part is a process of its own, so that one which fails, hangs or
breaks the GPU's context is written down and the next one begins.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PYTHON = (sys.executable, "-m")
HEADWAY = (*PYTHON, "simulator")


@dataclass(frozen=True)
class Part:
    """One process: what it runs, the most seconds it may take, the least it is begun with.

    In `command`, `{budget}` stands for the seconds it should measure, `{0}` for the first file that
    it `needs`.
    """

    name: str
    command: tuple[str, ...]
    most: float
    least: float = 5.0
    needs: tuple[str, ...] = ()  # files in the folder, by pattern


@dataclass(frozen=True)
class Setup:
    """The engine of a campaign, its workloads, and the seconds of its parts on a kind of device."""

    model: str
    small_model: str
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
        small_model="llama-3.2-1b",
        gpu="H200",
        dtype="auto",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        num_blocks=24576,
        input_len=(64, 2000),
        output_len=(16, 384),
        loads=(("light", 4.0, 120, 1), ("heavy", 14.0, 420, 0)),  # half a minute each
        calibrate_s="{budget}",
        seconds={  # most take less
            "checks": 75, "timings": 110, "calibration": 190, "live": 120, "validate": 25,
            "calibration-small": 110,
        },
    ),
    "cpu": Setup(
        model="tiny-test",
        small_model="tiny-test",
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
            "checks": 60, "timings": 60, "calibration": 90, "live": 60, "validate": 40,
            "calibration-small": 90,
        },
    ),
}  # fmt: skip

SCENARIO = """\
# Conversations as in the demo scenario, at another rate.
name: {name}
model: {model}
gpu: {{name: {setup.gpu}, count: 1}}
engine:
  max_num_seqs: {setup.max_num_seqs}
  max_num_batched_tokens: {setup.max_num_batched_tokens}
  max_model_len: {setup.max_model_len}
  num_gpu_blocks_override: {setup.num_blocks}
  dtype: {setup.dtype}
  enable_prefix_caching: false
cost: {{profile: PROFILE}}
workload:
  num_prompts: {prompts}
  request_rate: {rate}
  burstiness: 0.835
  input_len: {{kind: uniform, low: {setup.input_len[0]}, high: {setup.input_len[1]}}}
  output_len: {{kind: uniform, low: {setup.output_len[0]}, high: {setup.output_len[1]}}}
seed: {seed}
"""


def plan(folder: Path, device: str, model: str, small: str, scale: float = 1.0) -> list[Part]:
    """List the parts in order, and write the scenarios that they replay.

    `scale` is 1 for nine minutes; it counts for GPUs alone.
    """
    setup = SETUPS[device]
    times = {name: s * (scale if device == "cuda" else 1) for name, s in setup.seconds.items()}
    parts = [
        Part(
            "checks", (*PYTHON, "gpu_backend.campaign.checks", "--device", device), times["checks"]
        ),
        Part(
            "timings",
            (*PYTHON, "gpu_backend.campaign.timings", "--device", device, "--model", model,
             "--out", str(folder), "--budget-s", "{budget}"),
            times["timings"],
        ),
        _calibrate("calibration", folder, device, model, times),
    ]  # fmt: skip
    for seed, (name, rate, prompts, reruns) in enumerate(setup.loads, 1):
        text = SCENARIO.format(
            name=name, model=model, setup=setup, prompts=prompts, rate=rate, seed=seed
        )
        scenario, out = folder / f"{name}.yaml", folder / f"live-{name}"
        scenario.write_text(text)
        parts += [
            Part(
                f"live-{name}",
                (*HEADWAY, "live", str(scenario), "--device", device, "--clock",
                 "exec" if device == "cpu" else "wall", "--reruns", str(reruns),
                 "--set", "cost.profile={0}", "--out", str(out)),
                times["live"], needs=("calibration/*.yaml",),
            ),
            Part(
                f"validate-{name}", (*HEADWAY, "validate", str(out)), times["validate"],
                needs=(f"live-{name}/*",),
            ),
        ]  # fmt: skip
    return [*parts, _calibrate("calibration-small", folder, device, small, times)]


def _calibrate(
    name: str, folder: Path, device: str, model: str, times: Mapping[str, float]
) -> Part:
    setup = SETUPS[device]
    return Part(
        name,
        (*HEADWAY, "calibrate", "--model", model, "--device", device,
         "--out", str(folder / name), "--budget-s", setup.calibrate_s,
         "--num-blocks", str(setup.num_blocks), "--max-num-seqs", str(setup.max_num_seqs),
         "--max-num-batched-tokens", str(setup.max_num_batched_tokens),
         "--max-model-len", str(setup.max_model_len)),
        times[name], least=times[name] / 3,
    )  # fmt: skip
