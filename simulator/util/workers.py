"""A function over many items on all cores, or on a Dask or Ray cluster, through joblib.

A worker that dies takes nothing along: what it had in hand is done again by others. Only an item
that kills its worker even when it runs by itself is given up. A worker whose parent dies, however
it does, ends within LOOK_PARENT seconds.
"""

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from simulator.util.environment import SAFE_PATH, environment, need_package
from simulator.util.errors import HeadwayError, one_line

BACKENDS = ("loky", "dask", "ray")
PACKAGES = Path(__file__).parents[2]  # where Headway is imported from
LOOK_PARENT = 0.5  # s between two looks at whether a worker's parent lives
RAY_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
TRACKER = "ignore:resource_tracker:UserWarning"  # its warnings, in Python's words for filters
TIMEOUT = 5.0  # s to wait for a cluster's address to answer

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True, frozen=True)
class WorkerDied:
    """In place of a result: the worker died each time it had this item."""

    reason: str


def parallel_map(
    function: Callable[[T], R], items: Sequence[T], jobs: int | None = None
) -> Iterator[tuple[int, R | WorkerDied]]:
    """Yield (index, result) for every item, in the order in which they get done.

    Runs on joblib's active backend (`joblib.parallel_config`), on `jobs` workers; None: as many
    as that says, all cores for joblib's own default. Whatever `function` raises counts as the
    death of its worker, so it should not.
    """
    left = list(range(len(items)))
    while left:
        done: set[int] = set()
        try:
            for index, result in _run_batch(function, items, left, jobs):
                done.add(index)
                yield index, result
            return
        except (HeadwayError, KeyboardInterrupt):
            raise
        except Exception as error:  # each backend has its own word for a dead worker
            left = [index for index in left if index not in done]
            in_flight = min(2 * worker_count(jobs), len(left))  # as many as joblib had sent out
            suspects, left = left[:in_flight], left[in_flight:]
            if left:
                left += suspects
            else:
                yield from _run_one_by_one(function, items, suspects, error)


def _run_one_by_one(
    function: Callable[[T], R], items: Sequence[T], suspects: Sequence[int], error: Exception
) -> Iterator[tuple[int, R | WorkerDied]]:
    """Run items one by one, so that it can be told whose fault it is when a worker dies."""
    for index in suspects:
        try:
            # With 1 job loky would use this process.
            yield from _run_batch(function, items, [index], 2)
        except (HeadwayError, KeyboardInterrupt):
            raise
        except Exception as again:
            reason = one_line(again) or one_line(error)
            yield index, WorkerDied(f"the worker died: {reason[:160]}")


def _run_batch(
    function: Callable[[T], R], items: Sequence[T], chosen: Sequence[int], jobs: int | None
) -> Iterator[tuple[int, R]]:
    from joblib import Parallel, delayed

    parallel = Parallel(
        n_jobs=_jobs(jobs),
        batch_size=1,
        pre_dispatch="2 * n_jobs",
        return_as="generator_unordered",
        **_watching(),
    )
    call = delayed(partial(_numbered, os.getpid(), os.getcwd(), function))
    outcomes: Any = None
    try:
        with _quiet_tracker(jobs), _without_interrupts():
            outcomes = parallel(call(index, items[index]) for index in chosen)
        for outcome in outcomes:  # noqa: UP028  # `yield from` would close them with a warning
            yield outcome
    finally:
        # Of the tasks that are given up after an interrupt.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            if outcomes is not None:
                outcomes.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes started here leave Ctrl-C, which a terminal sends them too, to their parent.

    They inherit that it is blocked, so that they hear nothing even while they import; a traceback
    of each would drown what the parent says. It ends them. One that comes here is heard behind.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _quiet_tracker(jobs: int | None) -> Iterator[None]:
    """Start resource trackers so that they clean up after a killed parent without a word."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = {"PYTHONWARNINGS": f"{before},{TRACKER}" if before else TRACKER}
    with environment(SAFE_PATH | quiet):
        if worker_count(jobs) > 1:
            resource_tracker.ensure_running()  # else it lets interrupts through as workers start
        yield


def _watching() -> dict[str, Any]:
    """Have loky's workers watch this process from their start: they may never get an item."""
    from joblib.parallel import get_active_backend

    backend, _ = get_active_backend()
    if type(backend).__name__ != "LokyBackend" or "initializer" in backend.backend_kwargs:
        return {}  # a user's own; then with an item
    return {"initializer": _watch_parent, "initargs": (os.getpid(), True)}


def _watch_parent(parent: int, is_parent: bool = False) -> None:
    """End this process soon after the one that made it ends, which may be killed without a word.

    Else it would wait five minutes for items, and keep open what it was given, stderr for one.
    Nothing where `parent` did not make it, as on another machine, unless `is_parent` says so.
    """
    if _watched or (os.getppid() != parent and not is_parent):
        return
    _watched.append(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_PARENT)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


_watched: list[int] = []  # the parent of this process, if it is a worker that watches


def _numbered(
    parent: int, folder: str, function: Callable[[T], R], index: int, item: T
) -> tuple[int, R]:
    """Do an item, from the caller's folder: a worker may be older than the caller's last chdir."""
    _watch_parent(parent)
    if os.getpid() != parent:
        with suppress(OSError):  # another machine may not have it
            os.chdir(folder)
    return index, function(item)


def _jobs(jobs: int | None) -> int | None:
    """Return joblib's `n_jobs`: its own default of one worker is not what one wants here."""
    from joblib.parallel import get_active_backend

    backend, active = get_active_backend()
    own = active in (None, 1)  # 1 before joblib 1.6
    return -1 if jobs is None and own and type(backend).__name__ == "LokyBackend" else jobs


def worker_count(jobs: int | None) -> int:
    """Count the workers that `parallel_map` would use."""
    from joblib import effective_n_jobs

    return int(effective_n_jobs(_jobs(jobs)))


@contextmanager
def use_backend(name: str | None, jobs: int | None, address: str | None = None) -> Iterator[None]:
    """Make a backend joblib's active one; None leaves the active one as it is.

    Without `address`, dask and ray start workers on this machine, `jobs` or one per core, and
    stop them at the end. Raises HeadwayError where the package is missing or nobody answers at
    the address within TIMEOUT seconds.
    """
    if address is not None and name not in ("dask", "ray"):
        raise HeadwayError("--address: needs --backend dask or ray")
    if name is None:
        yield
        return
    if name not in BACKENDS:
        raise HeadwayError(f"--backend: {name!r} is none of {', '.join(BACKENDS)}")
    from joblib import parallel_config

    cluster: AbstractContextManager[None] = nullcontext()
    if name != "loky":
        cluster = (_dask if name == "dask" else _ray)(jobs, address)
    with (
        environment(SAFE_PATH),
        cluster,
        parallel_config(backend=name, n_jobs=-1 if jobs is None else jobs),
    ):
        yield


@contextmanager
def _dask(jobs: int | None, address: str | None) -> Iterator[None]:
    need_package("--backend dask", "dask", "dask.distributed")
    from dask import config
    from dask.distributed import Client

    where: dict[str, Any] = {"address": address}
    if address is None:
        cores = jobs or os.cpu_count()
        where = {"n_workers": cores, "threads_per_worker": 1, "dashboard_address": None}
    else:
        _check_address(address)
    quiet = {
        "distributed.logging.distributed": "error",
        # Workers read it as they are imported, before they are sent the above.
        "distributed.nanny.pre-spawn-environ": {
            **config.get("distributed.nanny.pre-spawn-environ", {}),
            "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "error",
        },
    }
    with config.set(quiet):
        try:
            with warnings.catch_warnings():  # another sweep may show its dashboard
                warnings.filterwarnings("ignore", "(?s).*Port .* is already in use")
                client = Client(timeout=TIMEOUT, **where)  # type: ignore[no-untyped-call, unused-ignore]
        except Exception as error:
            raise _unreachable("dask", address, error) from error
        with client:
            yield


@contextmanager
def _ray(jobs: int | None, address: str | None) -> Iterator[None]:
    need_package("--backend ray", "ray", "ray")
    import ray
    from ray.util.joblib import register_ray
    from ray.util.joblib.ray_backend import RayBackend

    if address is not None:
        _check_address(address)
    local: dict[str, Any] = {"num_cpus": jobs or os.cpu_count(), "include_dashboard": False}
    on_term = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings(), _loopback_alone(address is None), chdir(PACKAGES):
        # Ray's workers import from the folder in which it is started, before all others.
        warnings.simplefilter("ignore", FutureWarning)  # of accelerators that are not there
        try:
            ray.init(
                address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({} if address is not None else local),
            )
        except Exception as error:
            raise _unreachable("ray", address, error) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_term)  # Ray's own ends this process without a word
    register_ray()  # type: ignore[no-untyped-call, unused-ignore]
    # Ray's backend is joblib's multiprocessing one and can return as a generator; it has only
    # not said so (ray 2.60).
    RayBackend.supports_return_generator = True
    # A thread of Ray's pool that still waits, as for actors that were killed, would start Ray anew
    # once it is down, and without that tell by a traceback that it is.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    tell = threading.excepthook
    try:
        yield
    finally:
        ended = ray.exceptions.RaySystemError
        threading.excepthook = lambda a: None if issubclass(a.exc_type, ended) else tell(a)
        ray.shutdown()


@contextmanager
def _loopback_alone(local: bool) -> Iterator[None]:
    """Have a Ray cluster that is started in here listen to this machine alone.

    By default it listens to every network, and whoever reaches it may run anything. It has no
    option for that, but a switch for systems on which it never was made to listen to others.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = not local  # in this process; by the switch, in its own
    with environment({RAY_SWITCH: "0" if local else "1"}):
        yield


def _check_address(address: str) -> None:
    """See that somebody listens at HOST:PORT: the clients would wait for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise HeadwayError(f"--address {address}: must be host:port, or scheme://host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise HeadwayError(
            f"--address {address}: no answer: {getattr(error, 'strerror', None) or error}"
        ) from error


def _unreachable(name: str, address: str | None, error: Exception) -> HeadwayError:
    what = f"--address {address}" if address else f"--backend {name}"
    return HeadwayError(f"{what}: cannot start: {one_line(error)[:200]}")
