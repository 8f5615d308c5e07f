"""The Python functions `sweep` and `plan`: tables back, and the same errors as from a file."""

import re
from functools import partial
from inspect import signature
from pathlib import Path

import pandas as pd
import pytest
import yaml

from simulator import diagnose, load_scenario, plan, run, sweep
from simulator.util.errors import HeadwayError


def test_the_function_returns_the_table(small: Path):
    frame = sweep(small, {"engine.max_num_seqs": [1, 4]}, out=small.parent / "out", jobs=2)
    assert isinstance(frame, pd.DataFrame)
    assert frame["engine.max_num_seqs"].tolist() == [1, 4]
    assert (frame["completed"] == 20).all()


def test_the_function_without_files_and_with_the_rest_of_its_arguments(small: Path):
    """`plan` takes the same, by name."""
    more = {"slo": ["p99_ttft_ms<=1000"], "overrides": ["workload.num_prompts=5"], "seed": 7}
    frame = sweep(small, {"engine.max_num_seqs": [1, 4]}, jobs=1, **more)
    assert (frame["completed"] == 5).all()
    assert [path.name for path in small.parent.iterdir()] == [small.name]
    same = set(signature(sweep).parameters) - {"scenario"}
    assert same == set(signature(plan).parameters) - {"scenario", "fewest", "cheapest"}
    with pytest.raises(ValueError, match=r"vary: engine\.max_num_seqs: is not a list"):
        sweep(small, {"engine.max_num_seqs": "1,4"})
    with pytest.raises(ValueError, match="slo: is a list of bounds; what is varied goes to vary="):
        plan(small, {"engine.max_num_seqs": [1, 4]})


GIVEN = {"model": "llama-3-8b", "workload": {"num_prompts": 8}}


QUICK = ["plan.min_duration=10", "plan.replications=1", "plan.most_replications=1"]


@pytest.mark.medium
def test_every_function_takes_what_load_scenario_takes(write):
    """A dict, a file, a name; in what is wrong with it all say the same."""
    alike = sweep(GIVEN, {"engine.max_num_seqs": [2]}, jobs=1)
    assert alike.equals(sweep(write(yaml.dump(GIVEN)), {"engine.max_num_seqs": [2]}, jobs=1))
    summary = run(GIVEN).summary()
    assert summary == run(load_scenario(GIVEN)).summary()
    assert run("examples/batch-of-four").scenario.name == "batch-of-four"
    found = diagnose(GIVEN, jobs=1)
    assert found.values["completed"] == 8
    assert repr(found).startswith("<Diagnosis: ")
    answer = plan(GIVEN, ["p99_ttft_ms<=1000"], overrides=QUICK, jobs=1)
    assert answer["holds"][0]


@pytest.mark.parametrize("call", [load_scenario, run, sweep, plan, diagnose])
@pytest.mark.parametrize("given", [7, None, ["demo"], b"demo"])
def test_what_is_no_scenario_is_a_value_error(call, given):
    with pytest.raises(ValueError, match="scenario: must be a file, the name of a shipped one"):
        call(given)


@pytest.mark.parametrize("call", [load_scenario, sweep, plan])
def test_what_sets_keys_needs_them_as_they_were_written(call):
    with pytest.raises(ValueError, match="not a Scenario, loaded already"):
        call(load_scenario(GIVEN))


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"engine.max_num_seqs": []}, "vary: engine.max_num_seqs: has no values"),
        ({"engine.max_num_seqs": 3}, "vary: engine.max_num_seqs: is not a list of values, but 3"),
        (["seed=1"], "vary: must be a mapping of dotted keys to lists, not ['seed=1']"),
    ],
)
def test_what_is_varied_is_checked(vary, message):
    for call in (sweep, partial(plan, slo=["p99_ttft_ms<=1000"])):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(GIVEN, vary=vary)


def test_what_cannot_be_swept_is_told_with_the_way_out():
    with pytest.raises(HeadwayError, match="jobs: 0: must be 1 or more"):
        sweep("demo", {"seed": [1, 2]}, jobs=0)
    with pytest.raises(HeadwayError, match="loaded already: give what it was loaded from"):
        sweep(load_scenario("demo"), {"seed": [1, 2]})  # type: ignore[arg-type]
