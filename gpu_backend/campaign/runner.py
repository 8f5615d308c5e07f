"""Carries out the parts of a campaign, each a process with a limit; writes down what came of it."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu_backend.campaign.plan import Part

MAX_PLAIN_BYTES = 4 << 20  # bytes of a file that is left unpacked
FIT_SECONDS = 30.0  # seconds that a part is left for what follows its measuring
GRACE_SECONDS = 15.0  # seconds that a part has to end once it is told to


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
    file = str(found[0][0].resolve()) if found else ""
    limit = min(part.most, left)
    budget = f"{max(limit - FIT_SECONDS, limit / 4):.0f}"
    command = [word.replace("{budget}", budget).replace("{0}", file) for word in part.command]
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
            process.wait(GRACE_SECONDS)
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
        write_record(folder, outcomes)
    return outcomes


def write_record(folder: Path, outcomes: Sequence[Outcome], **about: object) -> None:
    """Write `campaign.json`: what is said about the campaign, and what became of each part."""
    record = {**about, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / "campaign.json").write_text(json.dumps(record, indent=1) + "\n")


def pack_large_files(folder: Path) -> int:
    """Pack every large file by gzip; return the bytes of the folder."""
    for path in sorted(folder.rglob("*")):
        large = path.is_file() and path.stat().st_size > MAX_PLAIN_BYTES
        if large and path.suffix not in {".gz", ".png"}:
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            path.unlink()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
