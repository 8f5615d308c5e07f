"""A comparison, a sweep and a live run's steps, to be drawn."""

from pathlib import Path

import pytest

from headway.cli.main import main

SCENARIO = """
name: small
engine: {max_num_seqs: 4, enable_prefix_caching: false}
workload: {num_prompts: 40, request_rate: 20, input_len: 64, output_len: 32, clients: 2,
           range_ratio: 0.5}
"""


LIVE = (
    "start,seconds,predicted_s,chunks\n0,0.010,0.011,\n0.01,0.020,0.018,64:0\n0.03,0.011,0.011,\n"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A comparison, a sweep and a live run's steps."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "small.yaml").write_text(SCENARIO, "utf-8")
    scenario, out = str(folder / "small.yaml"), str(folder / "cmp")
    vary = "engine.scheduling_policy=static,fcfs"
    assert main(["compare", scenario, "--vary", vary, "--out", out, "--quiet"]) == 0
    keys = ("workload.request_rate=5,10,20", "engine.max_num_batched_tokens=64,128")
    options = [word for key in keys for word in ("--vary", key)]
    sweep = ["sweep", scenario, *options, "--jobs", "1", "--out", str(folder / "swp"), "--quiet"]
    assert main(sweep) == 0
    (folder / "live").mkdir()
    (folder / "live" / "steps_measured.csv").write_text(LIVE, "utf-8")
    return folder
