"""Files appear whole or not at all, and are looked up in two places."""

import io
from pathlib import Path

import pytest

from simulator.util.errors import HeadwayError
from simulator.util.files import resolve, write_atomic, write_together


def test_interrupt_leaves_no_folder(tmp_path: Path) -> None:
    """Ctrl-C while a file is written takes back the file and the folders made for it."""

    def interrupted(file: io.BufferedWriter) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_together(tmp_path / "a" / "b", {"x": lambda f: f.write(b"x"), "y": interrupted})
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output_names_the_path(tmp_path: Path) -> None:
    """A file where the folder should be, or a folder where the file should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match=r"/file: cannot write: is not a folder"):
        write_atomic(tmp_path / "file" / "x", lambda f: f.write(b""))
    (tmp_path / "y").mkdir()
    with pytest.raises(HeadwayError, match=r"y: cannot write: is a folder"):
        write_together(tmp_path, {"x": lambda f: f.write(b""), "y": lambda f: f.write(b"")})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "y"]


def test_files_are_looked_up_beside_the_scenario_then_in_headway_data(tmp_path, monkeypatch):
    """Beside the scenario wins; where there is neither, the message names that place."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both.csv").touch()
    (there / "only.csv").touch()
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    assert resolve("only.csv", here) == here / "only.csv"
    monkeypatch.setenv("HEADWAY_DATA", str(there))
    assert resolve("only.csv", here) == there / "only.csv"
    assert resolve("both.csv", here) == here / "both.csv"
    assert resolve("none.csv", here) == here / "none.csv"
    assert resolve(there / "only.csv", here) == there / "only.csv"
