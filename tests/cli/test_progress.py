"""Progress bars."""

import re

from simulator.cli.progress import ProgressBar, runs_progress, search_progress


def test_the_progress_bar_waits_and_then_shows_how_far_the_run_is(monkeypatch, capsys):
    """A short run shows nothing; a long one requests and simulated time, on stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressBar("demo")
    bar(1.0, 1, 10)
    bar.close()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("simulator.cli.progress.DELAY", 0.0)
    bar = ProgressBar("azure-conv-llama3-8b-a100")
    bar(12345.6, 115_938, 116_196)
    bar.close()
    told = capsys.readouterr()
    assert told.out == ""
    assert re.search(r"azure.*115938/116196.*requests, 12,346 s simulated", told.err)


def test_on_a_terminal_runs_are_counted(monkeypatch, capsys):
    """Of a sweep with their total; of a search, which knows none, alone."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with runs_progress("points", quiet=False) as progress, search_progress(quiet=False) as search:
        progress(2, 3)
        search(7)
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with runs_progress("points", quiet=False) as progress:
        progress(2, 3)
    assert re.search(r"2/3.*points, left", capsys.readouterr().err)
    with search_progress(quiet=False) as progress:
        progress(3)
        progress(4)
    assert "searching: 7 runs" in capsys.readouterr().err
