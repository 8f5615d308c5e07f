"""Record what the installed vLLM's own scheduler decides on a case file.

    python -m calibration.record_vllm CASE.json OUT.jsonl.gz

The output is a recorded schedule for `headway conform CASE.json --golden OUT.jsonl.gz`. It needs a
vLLM that can be imported (its CPU dependencies suffice) but neither a GPU nor weights.
"""

import gzip
import json
import sys
from importlib.metadata import version
from pathlib import Path

from simulator.conformance.cases import Case, read_cases
from simulator.conformance.replay import Replay
from simulator.util.errors import HeadwayError
from simulator.util.files import write_atomic


def record(case: Case) -> list[str]:
    """Return the lines of one case's recorded schedule."""
    replay = Replay(case, installed=True)
    header = json.loads(replay.header())
    del header["headway"]
    begin = {key: header.pop(key) for key in ("type", "schema", "name")}
    versions = {"vllm": version("vllm"), "torch": version("torch")}
    return [json.dumps(begin | versions | header, separators=(",", ":")), *replay.rows()]


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    if len(arguments) != 2:
        print("usage: python -m calibration.record_vllm CASE OUT", file=sys.stderr)
        return 2
    case, out = map(Path, arguments)
    try:
        lines = [line for one in read_cases(case) for line in record(one)]
        data = "".join([f"{line}\n" for line in lines]).encode()
        packed = gzip.compress(data, mtime=0) if out.suffix == ".gz" else data
        write_atomic(out, packed)
    except (HeadwayError, ValueError) as error:
        print(f"record_vllm: error: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}: {len(lines):,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
