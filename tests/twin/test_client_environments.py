"""Environments of real clients: what cannot be installed says why, and ends nothing."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("aiohttp")

from tests.support import client_environments
from tests.support.client_environments import CLIENTS, main
from tests.support.clients import program
from tests.support.commands import ROOT


@pytest.mark.slow
def test_a_client_that_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"gone": {"python": "python0.0", "pip": []}, "there": {"pip": []}}
    wrong = {"pip": [["--no-index", "no-such-client==1"]]}
    monkeypatch.setattr(client_environments, "CLIENTS", rows | {"wrong": wrong})
    monkeypatch.setenv("HEADWAY_CLIENTS", str(tmp_path))
    main(tmp_path, [])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "gone: cannot be installed: python0.0: No such file or directory"
    assert second.startswith("wrong: cannot be installed: ERROR: No matching distribution")
    assert Path(program("there", "python")).exists()
    for name, why in (("gone", "python0.0: No such"), ("wrong", "ERROR: No matching")):
        with pytest.raises(pytest.skip.Exception, match=why):
            program(name, "python")
    with pytest.raises(SystemExit, match="other: no client; there is gone"):
        main(tmp_path, ["other"])


def test_each_client_has_a_job_of_its_own() -> None:
    text = (Path(ROOT) / ".github" / "workflows" / "weekly.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]["make"]["strategy"]["matrix"]["include"]
    assert [job["client"] for job in jobs] == [*CLIENTS]
