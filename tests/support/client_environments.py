"""Real clients of `headway serve`, each in an environment of its own, as clients.json names them.

    TORCH=torch==2.13.0 python tests/support/client_environments.py FOLDER [NAME...]

A client that cannot be installed ends nothing: FOLDER/NAME.txt and a line say why. vLLM comes
without what its server needs; its benchmark wants the packages before it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLIENTS: dict[str, Any] = json.loads(Path(__file__).with_name("clients.json").read_text("utf-8"))


def commands(folder: Path, row: dict[str, Any]) -> Iterator[list[str]]:
    """Yield what installs a client in its folder."""
    if "npm" in row:
        yield ["npm", "install", "--loglevel=error", "--prefix", str(folder / "bin"), *row["npm"]]
        return
    yield [row.get("python", sys.executable), "-m", "venv", str(folder)]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    torch = os.environ.get("TORCH", "").split()
    for words in row["pip"]:
        wanted = [one for word in words for one in (torch if word == "TORCH" else [word])]
        yield [*pip, "install", "--quiet", "--no-cache-dir", *wanted]  # a cache fills the disk


def install(folder: Path, row: dict[str, Any]) -> str:
    """Install a client, unless the same one is there; return why it cannot be, or nothing."""
    stamp = folder / "installed"
    if stamp.exists() and json.loads(stamp.read_text("utf-8")) == row:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    for command in commands(folder, row):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
            said = (line for line in reversed(lines) if re.search("error|not found", line, re.I))
            return next(said, lines[-1])
    stamp.write_text(json.dumps(row), "utf-8")
    return ""


def main(folder: Path, names: list[str]) -> None:
    """Install clients, all of them where none is named."""
    if unknown := {*names} - CLIENTS.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: no client; there is {', '.join(CLIENTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or CLIENTS:
        note = folder / f"{name}.txt"
        note.unlink(missing_ok=True)
        if why := install(folder / name, CLIENTS[name]):
            shutil.rmtree(folder / name, ignore_errors=True)
            note.write_text(why, "utf-8")
            print(f"{name}: cannot be installed: {why}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
