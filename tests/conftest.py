"""Where the tests find the published traces and tables, and how they draw examples."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Where a change is judged (CI=true), every test that takes less than ten seconds or so, half of the
# cases of a test that has many, and a quarter of the examples, the same ones every time; every week
# (CI=full) the slow tests, all cases and all examples. Elsewhere no test that takes two seconds, a
# fifth of the cases and of the examples, new ones each time, which find bugs.
JUDGED = bool(os.environ.get("CI"))
FULL = os.environ.get("CI") == "full"
SHARE, LEAST = 1 if FULL else 2 if JUDGED else 5, 10
EXAMPLES = 4 if SHARE == 2 else SHARE
# On a machine that others use, too, an example may take any time.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if JUDGED:
    settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests and cases out and draw fewer examples but where all are wanted.

    What is left out is counted as deselected: to skip 3,000 tests, each in a line, takes longer.
    """
    cases: Counter[str] = Counter()
    out = set()
    for item in items:
        if item.get_closest_marker("slow") and not FULL:
            out.add(item)
        if item.get_closest_marker("medium") and not JUDGED:
            out.add(item)
        if item.get_closest_marker("many"):
            kind = item.nodeid.partition("[")[0]
            if (cases[kind] + cases[kind] // SHARE) % SHARE:  # aslant through two parameters
                out.add(item)
            cases[kind] += 1
        test = getattr(item, "obj", None)
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if asked is not None and asked.max_examples > LEAST:
            few = max(asked.max_examples // EXAMPLES, LEAST)
            test._hypothesis_internal_use_settings = settings(asked, max_examples=few)
    if out:
        config.hook.pytest_deselected(items=[*out])
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder that HEADWAY_DATA names."""
    folder = os.environ.get("HEADWAY_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HEADWAY_DATA names no folder with the published data")
    return Path(folder)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `check_policy` draw cases of up to 6 requests, not 15, but where all are wanted."""
    if not FULL:
        monkeypatch.setattr("headway.testing.check.CASES", 48)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer: to train one takes a second."""
    pytest.importorskip("tokenizers")
    from headway.twin.api.tokenizers import train

    folder = tmp_path_factory.mktemp("tokenizer")
    assert train(folder, 1500)[0] == 1500
    return folder


@pytest.fixture
def write(tmp_path):
    """Write a scenario and return its path."""

    def writer(text: str, name: str = "s.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return writer


@pytest.fixture
def put(tmp_path: Path):
    """Write a text or bytes into a file and give its path."""

    def _put(content: str | bytes, name: str = "trace") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return _put
