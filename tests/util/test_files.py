"""Files appear whole or not at all, and are looked up in two places."""

import io
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.util.errors import HeadwayError
from simulator.util.files import (
    check_file,
    check_target,
    lock_folder,
    resolve,
    write_atomic,
    write_together,
)


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
from simulator.util.files import (
    check_file,
    check_target,
    lock_folder,
    resolve,
    write_atomic,
    write_together,
)

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
        with pytest.raises(HeadwayError, match="another command is writing"), lock_folder(folder):
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


@pytest.fixture(params=["pipe", "socket", "folder", "link to a pipe"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A name that no file may take. No device: whoever fails here as root would replace it."""
    path = tmp_path / "there"
    if request.param == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif request.param == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    if request.param == "link to a pipe":
        (tmp_path / "link").symlink_to("there")
        return tmp_path / "link"
    return path


@pytest.mark.usefixtures("drafts")
def test_what_is_no_file_is_not_replaced(no_file: Path) -> None:
    """Neither when it is written, nor beforehand, under the name of an option or without."""
    before = [(path.name, path.lstat().st_mode) for path in sorted(no_file.parent.iterdir())]
    wrong = r"(there|link): (cannot write: )?is a (pipe or a device, not a file|folder)"
    for write in (
        lambda: write_atomic(no_file, b"x"),
        lambda: write_together(no_file.parent, {"a": b"a", no_file.name: b"x"}),
        lambda: check_file("--out", no_file),
        lambda: check_target(no_file.parent / "other", no_file),
    ):
        with pytest.raises(HeadwayError, match=wrong):
            write()
    after = [(path.name, path.lstat().st_mode) for path in sorted(no_file.parent.iterdir())]
    assert after == before


@pytest.mark.usefixtures("drafts")
def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    """Be it there already or not, and on whatever disk the target is."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "old").write_bytes(b"old")
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(f"far/{name}")
        assert write_atomic(tmp_path / name, name.encode() * 2) == tmp_path / name
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "far" / name).read_bytes() == name.encode() * 2
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["new", "old"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(HeadwayError, match="loop: cannot write: is a symbolic link to itself"):
        write_atomic(tmp_path / "loop", b"x")
