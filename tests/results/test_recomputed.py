"""An independent checker: all of summary.json again, from the tables and the scenario, of any run.

`HEADWAY_CHECKS=1000` checks the first 1,000 drawn scenarios in place of 60 (20 without CI=true).
"""

import os
import re
import warnings
from math import isclose

import numpy as np
import pandas as pd
import pytest
import yaml

from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.conftest import SHARE
from tests.support.random_scenarios import draw_scenario
from tests.support.recompute import recompute
from tests.support.run_files import flatten, not_in_files, read_run

CHECKS = int(os.environ.get("HEADWAY_CHECKS", 60 // SHARE))
BATCH = 10  # scenarios of a test: few names, and workers share them out
PARTS = ("queue_time", "prefill_time", "decode_alone_time", "decode_slowed_time", "preempted_time")
PARTS += ("recompute_time", "swap_time", "retry_time", "decode_queue_time", "transfer_time")
PARTS += ("encoder_time", "ec_transfer_time")
PARTS += ("delivery_time",)


def simulate(folder, scenario, seed):
    """Run a drawn scenario, every other one step by step; None where it contradicts itself."""
    folder.mkdir()
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(scenario))
    trim = {3: (1.0, 0.5), 7: (0.3, 0.0)}.get(seed % 10, (0.0, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadwayWarning)
        try:
            result = run(load_scenario(path), stepwise=seed % 2 == 0)
            result.warmup, result.cooldown = trim
            write_run(result, folder, "parquet")
            write_run(result, folder, "csv")
        except HeadwayError:
            return None
    return read_run(folder, *trim)


def agrees(mine, theirs, key):
    """Compare to 1e-9, relative; milliseconds that should be 0 are within 1e-9, others 1e-12."""
    if mine is None or theirs is None or isinstance(theirs, str | bool | list):
        return mine == theirs
    return isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-9 if key.endswith("_ms") else 1e-12)


def differences(found):
    """List the figures that are not those of the tables, and count those that are looked at."""
    mine, theirs, unknown = recompute(found), dict(flatten(found.summary)), not_in_files(found)
    told = [
        key
        for key in {*mine, *theirs}
        if not any(re.fullmatch(pattern, key) for pattern in unknown)
    ]
    wrong = [
        (key, mine.get(key, "missing"), theirs.get(key, "missing"))
        for key in told
        if key not in mine or key not in theirs or not agrees(mine[key], theirs[key], key)
    ]
    return wrong, len(told)


@pytest.mark.medium
@pytest.mark.parametrize("first", range(0, CHECKS, BATCH))
def test_the_summary_is_that_of_its_tables(tmp_path, first):
    """Each key is recomputed, or the files do not tell it, for a reason; tables agree."""
    wrong, checked = [], 0
    for seed in range(first, min(first + BATCH, CHECKS)):
        found = simulate(tmp_path / str(seed), draw_scenario(seed), seed)
        if found is None:
            continue
        different, count = differences(found)
        wrong += [(seed, *one) for one in different]
        checked += count
        check_tables(tmp_path / str(seed), found)
    assert not wrong, "\n".join(map(str, wrong))
    assert checked > 40 * BATCH


def check_tables(folder, found):
    """CSV has Parquet's values, the parts add up to e2el, and both tables count the preempted."""
    for name in ("requests", "steps"):
        exact = pd.read_parquet(folder / f"{name}.parquet")
        text = pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values=[""])
        assert list(text) == list(exact), folder
        for column in exact.select_dtypes("number"):
            values = exact[column].where(exact[column] >= 0)
            off = (text[column] - values).abs().max()
            assert (text[column].isna() == values.isna()).all(), (folder, column)
            assert np.isnan(off) or off <= 0.6e-9, (folder, column)
    done = found.completed
    parts = done[[name for name in PARTS if name in done]].sum(axis=1)
    assert np.allclose(parts, done.e2el, rtol=0, atol=1e-9), folder
    if not found.scenario["cluster"]:
        assert found.steps.preempted.sum() == found.requests.preemptions.sum(), folder


def test_a_wrong_figure_is_found(tmp_path):
    """One part in a hundred million is enough."""
    found = simulate(tmp_path / "run", draw_scenario(2), 2)
    assert differences(found)[0] == []
    found.summary["mean_ttft_ms"] *= 1 + 1e-8
    found.summary["headway"]["mfu"] *= 1 + 1e-8
    assert sorted(key for key, _, _ in differences(found)[0]) == ["headway.mfu", "mean_ttft_ms"]


def test_rejections_at_one_instant(tmp_path):
    """Of 400 requests that come as fast as they may, those whose prompts are too long."""
    scenario = {
        "model": "llama-3-8b",
        "gpu": {"name": "A100-80GB"},
        "engine": {"max_num_seqs": 8, "max_model_len": 100},
        "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-5},
        "workload": {
            "num_prompts": 400,
            "max_concurrency": 100,
            "input_len": {"kind": "uniform", "low": 50, "high": 150},
            "output_len": 4,
        },
    }
    found = simulate(tmp_path / "run", scenario, 1)
    assert found.summary["headway"]["rejected"] == 192
    assert found.summary["headway"]["trend_p_value"] > 0
    assert differences(found)[0] == []
