"""Progress bars."""

import re

from headway.cli.progress import run_progress, runs_progress, search_progress
from headway.planning.candidate import Candidate
from headway.planning.search import SearchResult
from headway.planning.verdict import Trial


def test_the_progress_bar_waits_and_then_shows_how_far_the_run_is(monkeypatch, capsys):
    """A short run shows nothing; a long one requests and simulated time, on stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with run_progress("demo", quiet=False) as show:
        show(1.0, 1, 10)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("headway.cli.progress.DELAY", 0.0)
    with run_progress("azure-conv-llama3-8b-a100", quiet=False) as show:
        show(12345.6, 115_938, 116_196)
    told = capsys.readouterr()
    assert told.out == ""
    assert re.search(r"azure.*115938/116196.*requests, 12,346 s simulated", told.err)


def test_on_a_terminal_runs_are_counted(monkeypatch, capsys):
    """Of a sweep with their total; of a search by candidate, with what is known of each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    trial = Trial(at=2.0, seconds=600.0, runs=[{}, {}], ok=True)
    candidate = Candidate({"engine.max_num_seqs": "8"}, result=SearchResult(None, [trial]))
    with (
        runs_progress("points", quiet=False) as progress,
        search_progress(False, "workload.request_rate", rising=False) as search,
    ):
        progress(2, 3)
        search([candidate], 2, None)
    assert capsys.readouterr().err == ""  # no terminal, and nothing decided
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with runs_progress("points", quiet=False) as progress:
        progress(2, 3)
    assert re.search(r"2/3.*points, left", capsys.readouterr().err)
    with search_progress(False, "workload.request_rate", rising=False) as search:
        search([candidate], 3, None)
        search([candidate], 4, None)
    assert re.search(r"7 runs, 0 of 1 candidates done", capsys.readouterr().err)


def test_a_pipe_has_a_line_for_each_decision(capsys):
    """Whatever is not a terminal."""
    trial = Trial(at=2.0, seconds=600.0, runs=[{}], ok=True)
    found = Candidate({"engine.max_num_seqs": "8"}, result=SearchResult(trial, [trial]), done=True)
    with search_progress(False, "workload.request_rate", rising=False) as search:
        search([found], 1, found)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told == (
        "engine.max_num_seqs=8: request_rate=2 keeps the bounds (1 run of 600 s); "
        "done: request_rate=2 keeps the bounds\n"
    )


def test_where_nothing_is_searched_a_line_has_no_place(capsys):
    trial = Trial(at=1.0, seconds=600.0, runs=[{}], why="p99_ttft_ms", strain=(1.0, 2.0, 3.0))
    found = Candidate({"gpu.name": "H200"}, result=SearchResult(None, [trial]), done=True)
    with search_progress(False, "", rising=True) as search:
        search([found], 1, found)
    assert capsys.readouterr().err == "gpu.name=H200: breaks p99_ttft_ms (1 run of 600 s)\n"


def test_the_lines_of_a_search_do_not_contradict_its_answer(capsys):
    """Of replicas the fewest that hold are told, once more was thought to be needed, too."""
    trials = [
        Trial(at=1.0, seconds=60.0, runs=[{}], superseded=True),
        Trial(at=4.0, seconds=60.0, runs=[{}], ok=True),
        Trial(at=24.0, seconds=60.0, runs=[{}], ok=True),
    ]
    found = Candidate({}, result=SearchResult(None, trials))
    with search_progress(False, "cluster.replicas", rising=True) as search:
        search([found], 1, found)
        trials.append(Trial(at=1.0, seconds=120.0, runs=[{}], ok=True))
        found.result, found.done = SearchResult(trials[-1], trials), True
        search([found], 1, found)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("so far: cluster.replicas=4 is enough")
    assert last.endswith("done: cluster.replicas=1 is enough")


def test_a_long_plan_says_what_is_done_and_estimates_the_rest_once_a_quarter_is(
    monkeypatch, capsys
):
    """A first run, which may have waited for workers, says nothing of the other candidates."""
    now = [0.0]
    monkeypatch.setattr("headway.cli.progress.perf_counter", lambda: now[0])
    trials = [Trial(1.0, 300.0, runs=[{}] * 2), Trial(2.0, 600.0, runs=[{}] * 4)]
    found = [
        Candidate({"engine.max_num_seqs": f"{seats}"}, result=SearchResult(trials[0], trials))
        for seats in range(4)
    ]
    for one in found[1:]:
        one.result = SearchResult(None, [])
    with search_progress(False, "workload.request_rate", rising=False) as search:
        for now[0] in (16.0, 42.0, 60.0):
            search(found, 1, None)
        found[0].done = True
        now[0] = 100.0
        search(found, 1, None)  # 10 times its first run in 100 s: three more take three times that
        found[1].done, found[1].not_tried = True, "costs more"
        search.enter("The best two")
        now[0] = 140.0
        search(found, 1, None)
    assert capsys.readouterr().err == (
        "2 runs made in 42 s, 0 of 4 candidates done\n"
        "4 runs made in 100 s, 1 of 4 candidates done, about 5.0 min left if the others take as "
        "long\n"
        "The best two:\n"
        "5 runs made in 140 s, 2 of 4 candidates done, about 1.3 min left in this phase if "
        "the others take as long\n"
    )
