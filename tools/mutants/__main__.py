"""Mutation testing: which faults in the core does no test notice?

`python -m tools.mutants --seed 0 --count 200 [--package simulator/engine ...]`. Each mutant lives
in a forked process of a pytest session; no file changes. Of the tests that run its line, the
fastest go first, until one fails. Which test runs which line is found once and kept in out/mutants.
A mutant is unfinished where tests are left after --seconds of CPU time, and late where the clock
ran out: run those again with more. Exit code 1: some survive that `EQUIVALENT` does not explain.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.mutants.equivalent import EQUIVALENT
from tools.mutants.mutate import draw
from tools.mutants.session import WORKERS, Reach, Session

ROOT = Path(__file__).resolve().parents[2]
WINGS = (
    "simulator/engine",
    "simulator/kv_cache",
    "simulator/policies",
    "simulator/schedulers",
    "headway/planning",
    "headway/runs",
    "simulator/cluster",
    "simulator/costs",
    "simulator/diagnosis",
    "simulator/simulation",
    "simulator/features",
    "simulator/core",
)
RECORDED = ("conformance", "sglang", "vllm")
"""Tests that hold decisions against recordings."""


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants",
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--package", action="append", help="a folder; may be given again")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="CPU seconds of tests for each mutant"
    )
    asked = parser.parse_args()
    if asked.count < 1:
        parser.error(f"--count: must be at least 1, not {asked.count}")
    for package in asked.package or ():
        if not (ROOT / package).is_dir() or not (ROOT / "tests" / Path(package).name).is_dir():
            parser.error(f"--package {package}: takes a folder of code that tests/ has one for")
    print("which test runs which line is found first: some minutes", file=sys.stderr)
    packages = [p.rstrip("/") for p in asked.package or WINGS]
    folders = sorted(
        {f"tests/{p.split('/')[1]}" for p in packages if "/" in p}
        | {f"tests/{name}" for name in ("simulation", *RECORDED)}
    )
    result: list[int] = []

    def work(session: Session) -> None:
        began = time.monotonic()
        took, lines = _reach(session, packages)
        traced = time.monotonic()
        reached = {file: {int(n) for n, some in by.items() if some} for file, by in lines.items()}
        mutants = draw(ROOT, packages, reached, asked.seed, asked.count)
        tests = [
            [(n, took[n]) for n in sorted(lines[m.path][str(m.line)], key=took.__getitem__)]
            for m in mutants
        ]
        words: Counter[str] = Counter()
        left = 0
        for at, word in session.judge(mutants, tests, asked.seconds):
            words[word] += 1
            if word in ("survived", "unfinished", "late"):
                reason = EQUIVALENT.get(mutants[at].key())
                left += reason is None
                print(
                    f"{mutants[at]}\n    {reason or f'{word}: {len(tests[at])} tests'}", flush=True
                )
        counts = ", ".join(f"{n} {word}" for word, n in sorted(words.items()))
        print(f"{len(mutants)} mutants (seed {asked.seed}): {counts}; {left} not explained")
        print(
            f"seconds: {traced - began:.0f} for lines, {time.monotonic() - traced:.0f} for mutants"
        )
        result.append(int(left > 0))

    os.chdir(ROOT)
    os.environ["CI"] = "true"
    base = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        options = [
            "-p",
            "no:terminal",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "addopts=",
        ]
        pytest.main(
            [*options, "--capture=sys", f"--basetemp={base}", *folders], [Session(ROOT, work)]
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return result[0] if result else 2


def _reach(session: Session, packages: list[str]) -> tuple[dict[int, float], Reach]:
    """Read, or find, how long each test takes and which lines it runs."""
    digest = hashlib.sha256(repr([i.nodeid for i in session.items]).encode())
    for folder in ("headway", "simulator", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    kept = ROOT / "out" / "mutants" / f"{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        session.reach(packages, kept)
        whole: dict[str, dict[str, Any]] = {"took": {}, "lines": {}}
        for worker in range(WORKERS):
            part = json.loads(kept.with_suffix(f".{worker}").read_text())
            whole["took"] |= part["took"]
            for file, by_line in part["lines"].items():
                into = whole["lines"].setdefault(file, {})
                for line, tests in by_line.items():
                    into.setdefault(line, []).extend(tests)
            kept.with_suffix(f".{worker}").unlink()
        kept.write_text(json.dumps(whole))
    found = json.loads(kept.read_text())
    return {int(n): t for n, t in found["took"].items()}, found["lines"]


if __name__ == "__main__":
    sys.exit(main())
