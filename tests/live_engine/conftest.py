"""Tests against a real vLLM: its models, and the tables that are printed at the end."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.live_calibration import Calibrated, fitted, send
from tests.support.live_vllm import (
    CLIENT_CORE,
    LiveServer,
    engine_folder,
    recording_server,
    write_model,
)

HERE = Path(__file__).parent
TABLES: list[str] = []
TURNS = 3  # of calibration loads and blind ones: each of the latter comes nine times
SECONDS = 480.0  # that they take


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave them out where HEADWAY_ENGINE is not set; `make test-engine` sets it."""
    for item in items:
        if HERE in item.path.parents and engine_folder() is None:
            item.add_marker(pytest.mark.skip(reason="HEADWAY_ENGINE is not set: make test-engine"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for table in TABLES:
        terminalreporter.write_line(f"\n{table}")


@pytest.fixture(scope="session", autouse=True)
def _engine() -> Iterator[None]:
    """Fail where HEADWAY_ENGINE names no environment; keep off the server's core."""
    folder = engine_folder()
    if folder is None:
        pytest.skip("HEADWAY_ENGINE is not set: make test-engine")
    assert (folder / "bin" / "vllm").exists(), f"HEADWAY_ENGINE: {folder} has no vLLM"
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CLIENT_CORE})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny model of a kind of MODELS, once; give its folder."""
    folder = tmp_path_factory.mktemp("models")

    def model(kind: str) -> Path:
        return write_model(folder / kind, kind)

    return model


@pytest.fixture(scope="session")
def live(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The server that most tests share: the tiny Llama, by the name `tiny`, its steps recorded."""
    log = tmp_path_factory.mktemp("live") / "server.log"
    with recording_server(models("llama"), log, "--enable-prompt-tokens-details") as server:
        yield server


@pytest.fixture(scope="session")
def calibrated(live: LiveServer, models: Callable[[str], Path]) -> Calibrated:
    """The one calibration of that server, from which all is predicted."""
    return fitted(send(live, models("llama"), SECONDS, TURNS))


@pytest.fixture(scope="session")
def show() -> Callable[[str], None]:
    """Take a table that is printed when all tests are over."""
    return TABLES.append
