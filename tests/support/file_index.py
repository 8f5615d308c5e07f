"""Every file in one line: the first sentence of its docstring, printed."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABOVE = (
    "calibration",
    "conformance",
    "deploy",
    "gpu_backend",
    "headway_sglang",
    "headway_vllm",
    "tools",
    "twin",
)
"""The packages that stand on the simulator."""


def floors() -> list[str]:
    """Return the packages of `simulator/` from the top down, as the import contract has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    return [name.strip() for layer in layers for name in layer.split("|")]


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
