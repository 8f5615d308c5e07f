"""Files appear whole or not at all, and are looked up in two places."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.util.errors import HeadwayError
from simulator.util.files import lock_folder, resolve, write_atomic, write_together


@pytest.fixture(params=["no names", "hidden names"])
def drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What files are called before they are complete; not every system knows the former."""
    if request.param == "hidden names":
        monkeypatch.setattr("simulator.util.files.OPEN_FILES", Path("/nowhere"))
    return str(request.param)


@pytest.mark.usefixtures("drafts")
def test_files_replace_those_that_were_there(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        write_together(tmp_path / "a" / "b", {"x": text, "y": lambda f, t=text: f.write(t)})  # type: ignore[misc]
        assert {p.name: p.read_bytes() for p in (tmp_path / "a/b").iterdir()} == {
            "x": text,
            "y": text,
        }
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "a/b/x").stat().st_mode & 0o777 == 0o666 & ~mask


KILLED = """
import os, signal
from pathlib import Path
from simulator.util.files import write_together

def die(file):
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

write_together(Path("a/b"), {"x": b"whole", "y": die})
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files have names from the start")
def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_locked_against_others_and_made_for_as_long(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with lock_folder(folder):
        with pytest.raises(HeadwayError, match="another sweep or plan"), lock_folder(folder):
            pass
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    with lock_folder(folder):
        (folder / "x").touch()
    with lock_folder(folder):
        pass
    assert (folder / "x").exists()


def test_a_folder_that_was_moved_away_is_not_mistaken(tmp_path: Path) -> None:
    """An empty one that somebody else has put in its place stays."""
    folder = tmp_path / "a"
    with lock_folder(folder):
        folder.rename(tmp_path / "b")
        folder.mkdir()
    assert sorted(tmp_path.iterdir()) == [folder, tmp_path / "b"]


@pytest.mark.usefixtures("drafts")
def test_interrupt_leaves_no_folder(tmp_path: Path) -> None:
    """Ctrl-C while a file is written takes back the file and the folders made for it."""

    def interrupted(file: io.BufferedWriter) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_together(tmp_path / "a" / "b", {"x": lambda f: f.write(b"x"), "y": interrupted})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("drafts")
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
