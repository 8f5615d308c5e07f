"""Every file in one line: the first sentence of its docstring, printed."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABOVE = ("calibration", "gpu_backend", "headway", "tools")
"""The packages above the simulator."""


def layers() -> list[list[list[str]]]:
    """Return the import contracts that are layers, each from the top down: folders side by side."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    found = [one["layers"] for one in contracts if one["type"] == "layers"]
    return [
        [[name.strip().replace(".", "/") for name in row.split("|")] for row in rows]
        for rows in found
    ]


def floors() -> list[str]:
    """Return the packages of `simulator/` from the top down."""
    return [name for row in layers()[0] for name in row]


def summary(path: Path) -> str:
    """Return the first paragraph of a file's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    for folder in [*ABOVE, *(f"simulator/{name}" for name in floors())]:
        package = ROOT / folder
        yield f"## {folder}\n\n{summary(package / '__init__.py')}\n"
        for path in sorted(package.rglob("*.py")):
            if path.name != "__init__.py":
                yield f"- `{path.relative_to(package).as_posix()}`: {summary(path)}"
        yield ""


def page() -> str:
    """Return the page's text."""
    return "\n".join(lines()).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
