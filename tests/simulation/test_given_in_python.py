"""What a caller of `run` gives in place of the scenario's: a workload, a cost model."""

import json
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from simulator.core import Leap, Timing
from simulator.costs import CostModel
from simulator.simulation import write_run
from simulator.workload import Workload

BASE = {
    "name": "x",
    "engine": {"max_num_seqs": 8},
    "workload": {"num_prompts": 5, "request_rate": 4, "input_len": 200, "output_len": 4},
}
SHORT = np.full(3, 10)


class Flat(CostModel):
    """Every step takes as long."""

    def execute(self, step):
        return Timing(0.01)

    def leap(self, step, repeats):
        return Leap([0.01] * repeats)


def columns(**other):
    return Workload(
        **{"arrival": np.arange(3.0), "prompt_tokens": SHORT, "output_tokens": SHORT} | other
    )


@pytest.mark.parametrize(
    ("given", "comment", "profile"),
    [
        ({"cost": Flat(), "workload": columns()}, "cost and workload", "Flat"),
        ({"cost": Flat()}, "cost", "Flat"),
        ({"workload": columns()}, "workload", "roofline"),
    ],
)
@pytest.mark.parametrize("cluster", [None, {"replicas": 2, "router": "round_robin"}])
def test_the_folder_says_what_it_does_not_repeat(
    tmp_path: Path, given: dict, comment: str, profile: str, cluster: dict | None
) -> None:
    """A scenario.yaml alone would run with the scenario's own."""
    scenario = hw.load_scenario(BASE | ({} if cluster is None else {"cluster": cluster}))
    write_run(hw.run(scenario, **given), tmp_path)
    text = (tmp_path / "scenario.yaml").read_text()
    told = f"# {comment} given in Python: this file alone does not repeat the run\n"
    assert text.startswith(told)
    named = json.loads((tmp_path / "summary.json").read_text())["headway"]["profile"]
    assert (named == "Flat") == (profile == "Flat")
    write_run(hw.run(tmp_path / "scenario.yaml"), tmp_path / "again")
    assert (tmp_path / "again" / "scenario.yaml").read_text() == text.removeprefix(told)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"arrival": [0.0]}, "workload: must be a Workload, not a dict"),
        (
            columns(arrival=[0, 1, 2]),
            "workload.arrival: must be a numpy array of numbers, not list",
        ),
        (
            columns(output_tokens=SHORT / 3),
            "workload.output_tokens: must be a numpy array of integers, not float64",
        ),
        (
            columns(arrival=np.array([0, np.nan, 1])),
            "workload.after: request 1 needs either a time or a predecessor (its arrival is NaN)",
        ),
        (columns(client=["a"]), "workload.client: 1 values for 3 requests"),
    ],
)
def test_a_wrong_workload_is_refused_at_the_door(workload: object, message: str) -> None:
    with pytest.raises(hw.HeadwayError) as caught:
        hw.run(BASE, workload=workload)
    assert caught.value.messages == [message]


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (BASE, [5], "overrides: must be texts dotted.key=value, not 5"),
        ("", [], "scenario: must be a file, the name of a shipped one, or a dict, not ''"),
        (
            BASE | {"workload": {"trace": "x.csv"}},
            [],
            "scenario: workload.trace: must be a mapping of keys, as "
            "{path: <the file, plain or packed (gzip, bz2, xz, zip, zstd)>}, not 'x.csv'",
        ),
    ],
)
def test_what_is_no_scenario(source: object, overrides: list, message: str) -> None:
    with pytest.raises(hw.HeadwayError) as caught:
        hw.load_scenario(source, overrides)
    assert caught.value.messages == [message]
