"""The terms of an engine's overhead without one source, and that source's error."""

from pathlib import Path

import numpy as np
import pytest

from calibration.measured.predict import predict
from calibration.measured.runs import read_runs
from tests.support.measured_runs import CLOSED, HEAD
from tools.profiles.leave_one_source_out import (
    METRICS,
    leave_one_source_out,
    main,
    mean_of_best,
)


@pytest.mark.medium
def test_a_source_left_out_is_predicted_with_the_terms_of_the_others(tmp_path: Path) -> None:
    """Two sources whose measurements are those of 1.0 ms + 20 us, and of 0.5 ms + 0 us."""
    row = CLOSED.replace("0.12.0", "0.19.0").replace(",4,,,1024", ",4,,8,1024")
    (tmp_path / "runs.csv").write_text(HEAD + row)
    (run,) = read_runs(tmp_path)
    rows = []
    for name, terms in (("a", (1.0e-3, 20e-6)), ("b", (0.5e-3, 0.0))):
        found = {r.metric: r.predicted for r in predict(run, tmp_path, terms).rows}
        rows.append(
            row.replace("two,them", f"{name},{name}").replace(",12,", f",{found[METRICS[0]]},")
        )
    (tmp_path / "runs.csv").write_text(HEAD + "".join(rows))
    (a, b) = leave_one_source_out([tmp_path])
    assert (a[0], a[1], a[3]) == ("asynchronous, from 0.14", "a", (0.5e-3, 0.0))
    assert (b[1], b[3]) == ("b", (1.0e-3, 20e-6))
    assert 0.0 < b[4] < 0.2


def test_terms_that_sources_cannot_tell_apart_are_averaged() -> None:
    """Of the worse two, the second is within a standard error where runs differ."""
    grid = [(1e-3, 0.0), (1e-3, 20e-6), (3e-3, 20e-6)]
    two = np.array([[0.02, 0.03, 0.06], [0.02, 0.01, 0.06], [0.02, 0.03, np.nan]])
    assert mean_of_best(grid, [two]) == pytest.approx((1e-3, 10e-6))
    one = np.array([[0.02, 0.021, 0.06]])  # a single run: the best alone
    assert mean_of_best(grid, [one]) == grid[0]
    assert mean_of_best(grid, [one, two]) == pytest.approx((1e-3, 10e-6))


def test_a_folder_that_is_not_there_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--measured", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: --measured: " in capsys.readouterr().err
