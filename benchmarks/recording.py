"""Record the terminal: the README's picture of a first session, 20 seconds in a loop.

    python benchmarks/recording.py > docs/images/session.svg

Each command is run in a folder of its own, and what it prints is what is shown; waits are cut. No
tool but this file: an SVG in which each screen is shown for its time.
"""

import io
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from html import escape

from headway.cli.main import main as headway

COLUMNS, ROWS = 80, 24
WIDTH, HEIGHT, EDGE = 8.43, 18, 14  # px of a letter of 14 px, of a line, around all
SECONDS = 20.0
SESSION = (
    # a command's words, and how long each part of what it prints is read, s
    (("init", "chat.yaml", "--yes"), (1.5,)),
    (("run", "chat.yaml", "--set", "workload.request_rate=14"), (2.5, 4.0)),
    (
        (
            *("compare", "chat.yaml", "--set", "workload.request_rate=14"),
            *(
                "--variant",
                "today:",
                "--variant",
                "small steps: engine.max_num_batched_tokens=1024",
            ),
        ),
        (3.0,),
    ),
    (("plan", "chat.yaml", "--jobs", "1"), (4.0,)),
)
TYPING = 1.0  # s, of each command


def printed(words: tuple[str, ...]) -> list[str]:
    """Run a command; give the lines it prints, as a terminal breaks them."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = headway(words)
    assert code == 0, (words, code)
    lines = out.getvalue().splitlines()
    return [
        line[at : at + COLUMNS] for line in lines for at in range(0, max(len(line), 1), COLUMNS)
    ]


def command(words: tuple[str, ...]) -> list[str]:
    """Write a command as it is typed, over several lines where it is long."""
    lines = ["$ headway"]
    for word in words:
        shown = f"'{word}'" if " " in word or word.endswith(":") else word
        if len(lines[-1]) + len(shown) + 3 > COLUMNS:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += " " + shown
    return lines


def screens() -> list[tuple[float, list[str]]]:
    """Return what the terminal shows, and for how long, s."""
    shown: list[tuple[float, list[str]]] = []
    before: list[str] = []
    for words, times in SESSION:
        typed = command(words)
        shown.append((TYPING, [*before, *typed][-ROWS:]))
        lines = [*typed, *printed(words)]
        for part, seconds in enumerate(times):  # the first screens, and the last
            last = part == len(times) - 1
            shown.append(
                (seconds, lines[-ROWS:] if last else lines[part * ROWS : (part + 1) * ROWS])
            )
        before = [*lines, ""]
    return shown


def svg(shown: list[tuple[float, list[str]]]) -> str:
    """Draw the screens, one after the other."""
    total = sum(seconds for seconds, _ in shown)
    width, height = COLUMNS * WIDTH + 2 * EDGE, ROWS * HEIGHT + 2 * EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">',
        "<title>A terminal: headway init, run, compare and plan</title>",
        '<rect width="100%" height="100%" rx="6" fill="#14171b"/>',
        "<style>text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#d7dbe0;white-space:pre} .typed{fill:#7fd1ae;font-weight:600}</style>",
    ]
    at = 0.0
    for seconds, lines in shown:
        begin, end = at / total, min((at + seconds) / total, 1.0)
        times, values = [0.0, begin, end], ["none", "inline", "none"]
        if begin == 0:
            times, values = times[1:], values[1:]
        if end == 1:
            times, values = times[:-1], values[:-1]
        parts.append(
            f'<g display="none"><animate attributeName="display" dur="{SECONDS:g}s" '
            f'repeatCount="indefinite" calcMode="discrete" values="{";".join(values)}" '
            f'keyTimes="{";".join(f"{time:.4f}" for time in times)}"/>'
        )
        typing = False
        for row, line in enumerate(lines):
            typing = line.startswith("$ ") or (typing and lines[row - 1].endswith("\\"))
            kind = ' class="typed"' if typing else ""
            place = EDGE + HEIGHT * (row + 0.78)
            parts.append(f'<text x="{EDGE}" y="{place:.1f}"{kind}>{escape(line)}</text>')
        parts.append("</g>")
        at += seconds
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.stdout.write(svg(screens()))


if __name__ == "__main__":
    main()
