"""The notebooks: each .ipynb is its .py, executed; `make test-notebooks` executes them anew."""

from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(HERE.glob("[0-9][0-9]_*.py"))


def test_they_are_numbered() -> None:
    """Numbered without a gap."""
    assert [source.name[:2] for source in SOURCES] == [f"{n:02}" for n in range(1, 12)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebook_is_its_source_executed(source: Path) -> None:
    """The same cells, run from first to last without an error, small, with pictures."""
    jupytext = pytest.importorskip("jupytext")
    target = source.with_suffix(".ipynb")
    assert target.stat().st_size < 300_000
    notebook = jupytext.read(target)
    cells = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == cells, (
        f"python notebooks/build.py {source.name[:2]}"
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
