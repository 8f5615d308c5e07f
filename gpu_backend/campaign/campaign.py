"""Everything that wants a GPU, in one command of at most nine minutes.

`python -m gpu_backend.campaign --out FOLDER` checks the kernels, times them against the roofline,
calibrates a model, replays two workloads live and compares them with the simulation, then
calibrates a small model if time is left. Each part is a process of its own, so that one which
fails, hangs or breaks the GPU's context is written down and the next one begins. All is in FOLDER
as soon as it is known; a table comes last. With `--device cpu` it is a rehearsal.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu_backend.campaign.report import write_report

HEADWAY = (sys.executable, "-c", "from simulator.cli.main import main; raise SystemExit(main())")
LARGEST = 4 << 20  # bytes of a file that is left unpacked
FIT = 30.0  # seconds that a part is left for what follows its measuring
GRACE = 15.0  # seconds that a part has to end once it is told to


@dataclass(frozen=True)
class Part:
    """One process: what it runs, the most seconds it may take, the least it is begun with."""

    name: str
    command: tuple[str, ...]
    most: float
    least: float = 5.0
    needs: tuple[
        str, ...
    ] = ()  # files in the folder, by pattern; `{0}` in the command is the first


@dataclass
class Outcome:
    """What became of a part."""

    name: str
    status: str  # ok, failed, timeout, skipped
    seconds: float = 0.0
    note: str = ""
    command: list[str] = field(default_factory=list)


def run_part(part: Part, folder: Path, left: float) -> Outcome:
    """Run one part, for no more than `left` seconds; whatever happens is told, not raised."""
    if left < part.least:
        return Outcome(part.name, "skipped", note=f"{left:.0f} s were left")
    found = [sorted(folder.glob(pattern)) for pattern in part.needs]
    if not all(found):
        missing = [pattern for pattern, paths in zip(part.needs, found, strict=True) if not paths]
        return Outcome(part.name, "skipped", note=f"there is no {', '.join(missing)}")
    files = [str(paths[0].resolve()) for paths in found]
    limit = min(part.most, left)
    known = {"{budget}": f"{max(limit - FIT, limit / 4):.0f}"}
    known |= {f"{{{place}}}": file for place, file in enumerate(files)}
    command = [_fill(word, known) for word in part.command]
    log = folder / f"{part.name}.log"
    begun = time.monotonic()
    try:
        code = _wait(command, log, limit)
    except OSError as error:
        return Outcome(part.name, "failed", note=str(error), command=command)
    seconds = time.monotonic() - begun
    if code == 0:
        return Outcome(part.name, "ok", seconds, command=command)
    status = "timeout" if code is None else "failed"
    return Outcome(part.name, status, seconds, _last_line(log), command)


def _fill(word: str, known: dict[str, str]) -> str:
    for mark, text in known.items():
        word = word.replace(mark, text)
    return word


def _wait(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Run a command into a log; give its exit code, None where it had to be ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    for sign in (signal.SIGINT, signal.SIGKILL):  # the first lets it write down what it has
        os.killpg(process.pid, sign)
        try:
            process.wait(GRACE)
            break
        except subprocess.TimeoutExpired:
            continue
    return None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:160] if lines else "no output"


def run_parts(parts: Sequence[Part], folder: Path, budget: float) -> list[Outcome]:
    """Run all parts one after the other, the record written after each."""
    until = time.monotonic() + budget
    outcomes: list[Outcome] = []
    for part in parts:
        print(f"{part.name} ...", flush=True)
        outcomes.append(run_part(part, folder, until - time.monotonic()))
        last = outcomes[-1]
        print(f"  {last.status}, {last.seconds:.0f} s {last.note}", flush=True)
        record = {"parts": [asdict(outcome) for outcome in outcomes]}
        (folder / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")
    return outcomes


SCENARIO = """\
# Conversations as in the demo scenario, at another rate.
name: {name}
model: {model}
gpu: {{name: {gpu}, count: 1}}
engine:
  max_num_seqs: {seqs}
  max_num_batched_tokens: {tokens}
  max_model_len: {length}
  num_gpu_blocks_override: {blocks}
  dtype: {dtype}
  enable_prefix_caching: false
cost: {{profile: {profile}}}
workload:
  num_prompts: {prompts}
  request_rate: {rate}
  burstiness: 0.835
  input_len: {{kind: uniform, low: {shortest}, high: {longest}}}
  output_len: {{kind: uniform, low: {few}, high: {many}}}
seed: {seed}
"""


GPU = {
    "gpu": "H200", "seqs": 256, "tokens": 2048, "length": 8192, "blocks": 24576, "dtype": "auto",
    "budget": "{budget}",
    "shortest": 64, "longest": 2000, "few": 16, "many": 384,
}  # fmt: skip
CPU = {
    "gpu": "CPU", "seqs": 16, "tokens": 64, "length": 256, "blocks": 256, "dtype": "float32",
    "budget": "5",
    "shortest": 8, "longest": 64, "few": 2, "many": 16,
}  # fmt: skip
GPU_SECONDS = {  # the most of each part; most take less
    "checks": 75, "timings": 110, "calibration": 190, "live": 120, "validate": 25, "small": 110,
}  # fmt: skip
CPU_SECONDS = {  # some five times what they take, for machines that others use, too
    "checks": 60, "timings": 60, "calibration": 90, "live": 60, "validate": 40, "small": 90,
}  # fmt: skip
GPU_RATES = (("light", 4.0, 120), ("heavy", 14.0, 420))  # per second, requests: half a minute each
CPU_RATES = (("light", 5.0, 6), ("heavy", 20.0, 12))


def write_scenarios(folder: Path, device: str, model: str) -> list[str]:
    """Write the two workloads that are replayed live, a light one and a heavy one; name them."""
    sizes = CPU if device == "cpu" else GPU
    rates = CPU_RATES if device == "cpu" else GPU_RATES
    for seed, (name, rate, prompts) in enumerate(rates, 1):
        text = SCENARIO.format(
            name=name,
            model=model,
            profile="PROFILE",
            prompts=prompts,
            rate=rate,
            seed=seed,
            **sizes,
        )
        (folder / f"{name}.yaml").write_text(text)
    return [name for name, _, _ in rates]


def plan(folder: Path, device: str, model: str, small: str, scale: float) -> list[Part]:
    """List the parts in order: what is wanted most comes first. `scale` is 1 for nine minutes."""
    python = (sys.executable, "-m")
    clock = "exec" if device == "cpu" else "wall"
    most = CPU_SECONDS if device == "cpu" else {k: v * scale for k, v in GPU_SECONDS.items()}
    parts = [
        Part(
            "checks", (*python, "gpu_backend.campaign.checks", "--device", device), most["checks"]
        ),
        Part(
            "timings",
            (*python, "gpu_backend.campaign.timings", "--device", device, "--model", model,
             "--out", str(folder), "--budget-s", "{budget}"),
            most["timings"],
        ),
        _calibrate("calibration", folder, device, model, most["calibration"]),
    ]  # fmt: skip
    for reruns, name in zip(("1", "0"), write_scenarios(folder, device, model), strict=True):
        live = folder / f"live-{name}"
        parts += [
            Part(
                f"live-{name}",
                (*HEADWAY, "live", str(folder / f"{name}.yaml"), "--device", device, "--clock",
                 clock, "--reruns", reruns, "--set", "cost.profile={0}", "--out", str(live)),
                most["live"], needs=("calibration/*.yaml",),
            ),
            Part(
                f"validate-{name}", (*HEADWAY, "validate", str(live)), most["validate"],
                needs=(f"live-{name}/*",),
            ),
        ]  # fmt: skip
    return [*parts, _calibrate("calibration-small", folder, device, small, most["small"])]


def _calibrate(name: str, folder: Path, device: str, model: str, most: float) -> Part:
    sizes = CPU if device == "cpu" else GPU
    return Part(
        name,
        (*HEADWAY, "calibrate", "--model", model, "--device", device,
         "--out", str(folder / name), "--budget-s", str(sizes["budget"]),
         "--num-blocks", str(sizes["blocks"]), "--max-num-seqs", str(sizes["seqs"]),
         "--max-num-batched-tokens", str(sizes["tokens"]), "--max-model-len", str(sizes["length"])),
        most, least=most / 3,
    )  # fmt: skip


def slim(folder: Path) -> int:
    """Pack every large file by gzip; return the bytes of the folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > LARGEST and path.suffix not in {".gz", ".png"}:
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            path.unlink()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit code is 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default=None, help="llama-3.1-8b; tiny-test on cpu")
    parser.add_argument("--small-model", default=None, help="llama-3.2-1b; tiny-test on cpu")
    given = parser.parse_args(words)
    begun = time.time()
    cpu = given.device == "cpu"
    model = given.model or ("tiny-test" if cpu else "llama-3.1-8b")
    small = given.small_model or ("tiny-test" if cpu else "llama-3.2-1b")
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--out {given.out}: is not empty")
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    parts = plan(folder, given.device, model, small, given.budget_s / 540)
    outcomes = run_parts(parts, folder, given.budget_s - 5)
    record = {
        "begun": begun, "ended": time.time(), "device": given.device, "model": model,
        "small_model": small, "budget_s": given.budget_s, "bytes": slim(folder),
        "parts": [asdict(outcome) for outcome in outcomes],
    }  # fmt: skip
    (folder / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")
    print(write_report(folder))
    return int(any(outcome.status in {"failed", "timeout"} for outcome in outcomes))
