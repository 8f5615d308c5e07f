"""Items on worker processes: whoever dies takes nothing along.

That this holds on every backend is seen in tests/planning/test_sweep.py, where clusters run.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import joblib
import pytest

from simulator.util.errors import HeadwayError
from simulator.util.workers import WorkerDied, parallel_map, use_backend, worker_count
from tests.support.commands import ROOT


@pytest.mark.medium
def test_an_item_that_always_kills_its_worker_is_given_up_and_no_other():
    def square(number: int) -> int:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    with use_backend("loky", 2):
        results = dict(parallel_map(square, range(9), 2))
    died = results.pop(1)
    assert isinstance(died, WorkerDied)
    assert died.reason.startswith("the worker died: ")
    assert results == {k: k * k for k in range(9) if k != 1}


HEARS = """
import signal
from simulator.util.workers import parallel_map, use_backend

def hears(_):
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

with use_backend("loky", 2):
    assert dict(parallel_map(hears, range(4), 2)) == dict.fromkeys(range(4), False)
assert hears(0)
"""


@pytest.mark.medium
def test_workers_leave_an_interrupt_to_their_parent():
    """A terminal sends Ctrl-C to all of them; only the parent is to tell it.

    In a process of its own: the first workers of one start with a tracker that unblocks it.
    """
    subprocess.run([sys.executable, "-c", HEARS], check=True, env=os.environ | {"PYTHONPATH": ROOT})


def test_an_interrupt_while_workers_start_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    # A shell starts what runs in its background with the signal ignored.
    at_first = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(joblib.Parallel, "__call__", started)
    try:
        with pytest.raises(KeyboardInterrupt):
            [*parallel_map(abs, range(4), 2)]
    finally:
        signal.signal(signal.SIGINT, at_first)


def test_workers_follow_the_callers_folder(tmp_path, monkeypatch):
    """They are kept from one call to the next."""
    with use_backend("loky", 2):
        dict(parallel_map(str, range(4), 2))
        monkeypatch.chdir(tmp_path)
        found = dict(parallel_map(lambda _: os.getcwd(), range(4), 2))
    assert found == dict.fromkeys(range(4), os.path.realpath(tmp_path))


BUSY_AND_IDLE = """
import os, sys, time
from simulator.util.workers import parallel_map, use_backend

def work(number):
    if number:
        time.sleep(600)
    return os.getpid()

with use_backend("loky", 2):
    for number, pid in parallel_map(work, [0, 1], 2):
        print(pid, flush=True)
"""


def test_workers_end_with_a_parent_that_is_killed():
    """One is busy, one waits for items; both would hold the pipes open, the latter for minutes."""
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", BUSY_AND_IDLE], stdout=pipe, stderr=pipe)
    assert parent.stdout is not None
    assert int(parent.stdout.readline())  # both have begun
    parent.kill()
    _, said = parent.communicate(timeout=20)  # raises where a worker still holds a pipe
    assert said == b""  # nor does loky's tracker tell what it cleans up


@pytest.mark.medium
@pytest.mark.filterwarnings("always")
def test_who_stops_early_is_told_nothing(recwarn: pytest.WarningsRecorder):
    """As Ctrl-C does between two results; joblib would tell of the tasks that it gives up."""
    with use_backend("loky", 2):
        results = parallel_map(slowly, range(40), 2)
        assert next(results)[1] is None
        results.close()
    assert [str(warning.message) for warning in recwarn] == []


def slowly(_: int) -> None:
    time.sleep(0.05)


def test_without_a_number_there_is_a_worker_for_each_core():
    """Of joblib's own the default is one."""
    assert worker_count(None) == joblib.cpu_count()


def test_the_users_own_parallel_config_is_obeyed():
    with joblib.parallel_config(backend="threading", n_jobs=2), use_backend(None, None):
        pids = {pid for _, pid in parallel_map(lambda _: os.getpid(), range(4))}
    assert pids == {os.getpid()}


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_dead_address_is_told_at_once(name: str):
    pytest.importorskip({"dask": "distributed"}.get(name, name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        pytest.raises(HeadwayError, match=rf"--address 127.0.0.1:{port}: no answer"),
        use_backend(name, 2, f"127.0.0.1:{port}"),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("loky", "a:1", "--address: needs --backend dask or ray"),
        ("slurm", None, "--backend: 'slurm' is none of loky, dask, ray"),
        ("dask", "nowhere", "--address nowhere: must be host:port"),
    ],
)
def test_a_wrong_backend_or_address_is_told(name: str, address: str | None, message: str):
    with pytest.raises(HeadwayError, match=message), use_backend(name, 1, address):
        pass
