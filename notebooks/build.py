"""Execute the notebooks: each NN_name.py beside this file becomes NN_name.ipynb with outputs.

python notebooks/build.py [NN ...]
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def build(source: Path) -> Path:
    """Execute one notebook; write nothing if a cell fails."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # else a random one, new every time
    NotebookClient(
        notebook, timeout=300, record_timing=False, resources={"metadata": {"path": HERE}}
    ).execute()
    notebook.metadata = {"kernelspec": KERNEL}
    target = source.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


if __name__ == "__main__":
    for source in sorted(HERE.glob("[0-9][0-9]_*.py")):
        if not sys.argv[1:] or source.name[:2] in sys.argv[1:]:
            target = build(source)
            print(f"{target.name}: {target.stat().st_size:,} bytes", flush=True)
