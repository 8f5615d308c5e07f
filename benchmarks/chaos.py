"""Kill commands at random moments: `python benchmarks/chaos.py [--kills 50] [--seed 0]`.

Each of run, sweep, compare, plan and report is begun and gets SIGINT (with its workers, as from a
terminal), SIGTERM or SIGKILL, somewhere between its start and its usual end. Afterwards

- every file that is there is whole, and no temporary one is among them;
- sweep and plan, run again, write the bytes of a run that nobody disturbed;
- within LINGER seconds no process of it is left.

Exit code 1, and a line for each, where that fails. Linux alone: processes are found in /proc.
"""

import argparse
import csv
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
LINGER = 4.0  # s
PATIENCE = 60.0  # s that a command may take
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SCENARIO = """name: chaos
engine: {max_num_seqs: 16}
cost: {kind: linear, base: 1e-2, per_token: 1e-5}
workload: {num_prompts: 1500, request_rate: 30, input_len: 64, output_len: 16}
plan: {replications: 1, most_replications: 1, tolerance: 0.5}
"""
VARY = "engine.max_num_seqs=4,8,16,32"
COMMANDS = {
    "run": ["run", "s.yaml", "--out", "out", "--quiet"],
    "sweep": ["sweep", "s.yaml", "--vary", VARY, "--jobs", "2", "--out", "out", "--quiet"],
    "compare": ["compare", "s.yaml", "--vary", "engine.max_num_seqs=4,8", "--out", "out"],
    "plan": ["plan", "s.yaml", "--slo", "p99_ttft_ms<=500", "--jobs", "2", "--out", "out"],
    "report": ["report", "ready", "--out", "out/report.html"],
}
RESUMES = ("sweep", "plan")
AT_ONCE = 2  # trials
SHARES = {"run": 3, "sweep": 3, "compare": 2, "plan": 2, "report": 2}


@dataclass
class Trial:
    """One command in a folder of its own, and what is wrong with what it left."""

    verb: str
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    wrong: list[str] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the command, its processes marked in their environment."""
        return subprocess.Popen(
            [sys.executable, "-m", "headway", *COMMANDS[self.verb]],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CHAOS_MARK": self.mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """List the processes of this trial that are still there."""
        mark, found = f"CHAOS_MARK={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    there = mark in (entry / "environ").read_bytes()
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    continue
                found += [int(entry.name)] if there and not dead else []
        return found

    def check_processes(self) -> None:
        """See that all have gone within LINGER seconds; end those that have not."""
        until = time.monotonic() + LINGER
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self.wrong.append(f"{len(left)} processes are there after {LINGER:g} s")
        for number in left:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def check_files(self) -> None:
        """See that every file is whole, and none a temporary one."""
        for path in self.files():
            name = path.relative_to(self.folder)
            if path.suffix == ".tmp":
                self.wrong.append(f"{name} is left")
            elif why := damage(path):
                self.wrong.append(f"{name}: {why}")

    def files(self) -> list[Path]:
        """List what is in the command's folder."""
        return sorted(path for path in (self.folder / "out").rglob("*") if path.is_file())

    def contents(self) -> dict[str, bytes]:
        """Read what is there, by its path; journals, whose rows come in any order, left out."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.files()
            if path.suffix not in (".jsonl", ".tmp")
        }


def damage(path: Path) -> str:
    """Say what is wrong with a file, or nothing."""
    data = path.read_bytes()
    ends = {".png": b"IEND\xaeB`\x82", ".html": b"</html>\n"}
    if path.suffix in ends:
        return "" if data.endswith(ends[path.suffix]) else "is cut short"
    if path.suffix == ".jsonl":
        data = data[: data.rfind(b"\n") + 1]  # a last line may be cut: it is run again
    try:
        if path.suffix == ".jsonl":
            [json.loads(line) for line in data.splitlines()]
        elif path.suffix == ".json":
            json.loads(data)
        elif path.suffix == ".yaml":
            yaml.safe_load(data)
        elif (
            path.suffix == ".csv"
            and len({len(row) for row in csv.reader(io.StringIO(data.decode()))}) != 1
        ):
            return "has rows of several lengths"
    except (ValueError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    return "" if not data or data.endswith(b"\n") else "ends within a line"


def prepare(folder: Path) -> None:
    """Write what the commands read."""
    folder.mkdir()
    (folder / "s.yaml").write_text(SCENARIO)


def undisturbed(folder: Path) -> tuple[dict[str, float], dict[str, dict[str, bytes]]]:
    """Run each command to its end; give the seconds that it takes, and the files."""
    seconds, files = {}, {}
    for verb in COMMANDS:
        trial = Trial(verb, folder / f"whole-{verb}")
        prepare(trial.folder)
        if verb == "report":
            (trial.folder / "ready").symlink_to(folder / "whole-run" / "out")
        begin = time.monotonic()
        if trial.start().wait(PATIENCE):
            sys.exit(f"{verb} fails without being disturbed")
        seconds[verb], files[verb] = time.monotonic() - begin, trial.contents()
    return seconds, files


def kill(trial: Trial, number: signal.Signals, after: float) -> None:
    """Begin a trial's command and end it by a signal, `after` so many seconds."""
    child = trial.start()
    time.sleep(after)
    try:
        if number == signal.SIGINT:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
        child.wait(LINGER)
    except ProcessLookupError:
        child.wait(LINGER)
    except subprocess.TimeoutExpired:
        trial.wrong.append(f"is still there {LINGER:g} s after the signal")
        child.kill()
        child.wait()


def trials(folder: Path, kills: int, seed: int) -> Iterator[tuple[str, Trial]]:
    """Do all trials, some at once; yield what was done, and the trial."""
    draw = random.Random(seed)
    seconds, whole = undisturbed(folder)
    verbs = [verb for verb, share in SHARES.items() for _ in range(share)]

    def do(index: int, number: signal.Signals, share: float) -> tuple[str, Trial]:
        verb = verbs[index % len(verbs)]
        after = share * seconds[verb]
        trial = Trial(verb, folder / f"{index}-{verb}")
        prepare(trial.folder)
        (trial.folder / "ready").symlink_to(folder / "whole-run" / "out")
        kill(trial, number, after)
        trial.check_processes()
        trial.check_files()
        if verb in RESUMES:
            run_again(trial, whole[verb])
        return f"{verb}, {number.name} after {after:.2f} s", trial

    tasks = [(index, draw.choice(SIGNALS), draw.uniform(0.0, 1.1)) for index in range(kills)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda task: do(*task), tasks)


def run_again(trial: Trial, whole: dict[str, bytes]) -> None:
    """Run a killed command to its end, and see that nobody can tell."""
    if trial.start().wait(PATIENCE):
        trial.wrong.append("fails when it is run again")
    trial.check_files()
    now = trial.contents()
    for name in sorted({*now, *whole}):
        if now.get(name) != whole.get(name):
            trial.wrong.append(f"{name} differs once the command is run again")


def main() -> int:
    """Kill, look, and tell; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for what, trial in trials(Path(folder), given.kills, given.seed):
            failed += bool(trial.wrong)
            for wrong in trial.wrong:
                print(f"{what}: {wrong}", flush=True)
    took = time.monotonic() - begin
    print(f"{given.kills} kills in {took:.0f} s: {failed} left something wrong behind")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
