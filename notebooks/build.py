"""Execute the notebooks: each NN_name.py beside this file becomes NN_name.ipynb with outputs.

python notebooks/build.py [--check] [NN ...]

--check writes nothing: exit code 1 where a notebook's text is not what it says today. Cells
with the tag `fitted` are left out: a search over a rough loss ends elsewhere on another processor.
"""

import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(source: Path) -> Any:
    """Execute one notebook; raises where a cell fails."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # else a random one, new every time
    folder = {"metadata": {"path": HERE}}
    NotebookClient(notebook, timeout=300, record_timing=False, resources=folder).execute()
    notebook.metadata = {"kernelspec": KERNEL}
    return notebook


def texts(notebook: Any) -> list[str]:
    """Return what its cells print and the tables they show, as text."""
    cells = [cell for cell in notebook.cells if "fitted" not in cell.metadata.get("tags", ())]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]


def main(words: list[str]) -> int:
    """Build, or check, the notebooks whose numbers are named, or all."""
    check, stale = "--check" in words, []
    numbers = [word for word in words if word != "--check"]
    for source in sorted(HERE.glob("[0-9][0-9]_*.py")):
        if numbers and source.name[:2] not in numbers:
            continue
        target = source.with_suffix(".ipynb")
        notebook = execute(source)
        if not check:
            nbformat.write(notebook, target)
            print(f"{target.name}: {target.stat().st_size:,} bytes", flush=True)
        elif texts(notebook) != texts(nbformat.read(target, 4)):
            stale.append(source.name[:2])
    if stale:
        print(f"out of date: python notebooks/build.py {' '.join(stale)}", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
