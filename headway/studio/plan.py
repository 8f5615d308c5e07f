"""A plan that the studio's page asks for: `headway plan` in a process of its own, line by line."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.report.html.table_page import answer_of

PATIENCE = 10.0  # s that a plan may take to end once nobody wants it
MOST_LINE = 2**20  # bytes of a line of progress
ERROR = "headway: error: "
NO_LEVEL = "a plan needs a service level: set SLO: TTFT, SLO: TPOT or both"
QUESTIONS = {
    "buy": ("Which GPUs to buy, how many, how set", ("--buy",)),
    "fewest": ("How few replicas of this GPU do", ("--fewest", "cluster.replicas=1..16")),
    "rate": ("How much load this fleet carries", ()),
}
"""What a plan may answer: in words, and as options of the command."""
SEARCHED = ("workload.request_rate=", "workload.trace.rate_scale=")
"""Settings that the search for the largest load refuses: it tries values of its own."""


def command(scenario: str, settings: Sequence[str], question: str) -> list[str]:
    """Return the words of the command that answers a question about a scenario."""
    kept = [one for one in settings if question != "rate" or not one.startswith(SEARCHED)]
    sets = [word for setting in kept for word in ("--set", setting)]
    return ["plan", scenario, *sets, *QUESTIONS[question][1]]


async def plan(words: Sequence[str], folder: Path) -> AsyncGenerator[dict[str, Any]]:
    """Yield what the command says while it searches, then its answer: text, YAML, page.

    Whoever closes the iterator ends the command. Its files lie in `folder`.
    """
    lines = []
    async for line in _lines(*words, "--out", str(folder)):
        if isinstance(line, str):
            lines.append(line)
            yield {"told": line}
        elif line[0]:
            errors = [one.removeprefix(ERROR) for one in lines if one.startswith(ERROR)]
            errors = [NO_LEVEL if "no service level; give" in one else one for one in errors]
            yield {"errors": errors or lines[-1:], "last": True}
            return
        else:
            text = line[1]
    async for _ in _lines("report", str(folder), "--out", str(folder / "plan.html")):
        pass  # it is silent, and quick
    found = {}
    for key, name in (("yaml", "best.yaml"), ("page", "plan.html")):
        path = folder / name
        found[key] = path.read_text("utf-8") if path.exists() else ""  # where nothing holds
    if found["page"]:
        found |= await asyncio.to_thread(answer_of, folder)
    yield {"text": text.partition("\nwritten to ")[0], **found, "last": True}


async def _lines(*words: str) -> AsyncGenerator[str | tuple[int, str]]:
    """Run a command of Headway: yield each line on stderr, then its exit code and what it printed.

    It loads no code that a scenario names.
    """
    command = (sys.executable, "-m", "headway", *words)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HEADWAY_NO_OWN_CODE": "1"},
        limit=MOST_LINE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed = asyncio.create_task(process.stdout.read())
    try:
        async for line in process.stderr:
            yield line.decode("utf-8", "replace").rstrip()
        text = (await printed).decode("utf-8", "replace")
        yield await process.wait(), text
    finally:
        printed.cancel()
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PATIENCE)
        if process.returncode is None:
            process.kill()
