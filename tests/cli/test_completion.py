"""`headway completion`."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.cli.main import VERBS, main


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("ZSH_CUSTOM", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return home


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_knows_all_verbs_and_options(home: Path, capsys, shell: str) -> None:
    assert main(["completion", shell]) == 0
    path = Path(capsys.readouterr().out.partition("written to ")[2].partition(";")[0])
    assert path.is_relative_to(home)
    text = path.read_text()
    for word in (*VERBS, "from-metrics", "prometheus-interval"):
        assert word in text
    started = {"bash": ".bashrc", "zsh": ".zshrc"}.get(shell)
    if started is not None:
        assert str(path.parent) in (home / started).read_text()


def test_bash_completes(home: Path) -> None:
    """The function that bash calls gives the verbs and options that begin so."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    assert main(["completion", "bash", "--out", str(home / "c.sh")]) == 0
    assert sorted(path.name for path in home.iterdir()) == ["c.sh"]

    def complete(*words: str) -> list[str]:
        line = " ".join(words)
        program = (
            f'source {home}/c.sh; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; '
            f'name=$(complete -p headway | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
            f'$name headway "{words[-1]}" "{words[-2]}"; echo "${{COMPREPLY[@]}}"'
        )  # fmt: skip
        done = subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("headway", "tr") == ["trace"]
    assert "--prometheus-start" in complete("headway", "run", "--prom")


def test_bad_calls(home: Path, capsys) -> None:
    assert main(["completion", "csh"]) == 2
    assert "csh" in capsys.readouterr().err
    assert main(["completion", "bash", "--out", str(home)]) == 2
    assert "--out" in capsys.readouterr().err
    assert not list(home.iterdir())
