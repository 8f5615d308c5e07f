"""A run that leaps and one that goes step by step tell the same, in every figure."""

import os
import warnings
from collections.abc import Iterator
from math import isclose
from typing import Any

import pytest
import yaml

from simulator.scenario.load import load_scenario
from simulator.simulation.run import run
from simulator.simulation.stream import run_streamed
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.conftest import SHARE
from tests.support.random_scenarios import draw_scenario
from tests.support.run_files import flatten

CHECKS = int(os.environ.get("HEADWAY_CHECKS", 60 // SHARE))
BATCH = 10  # scenarios of a test: few names, and workers share them out
GAUGES = ("kv_cache_usage_mean", "kv_cache_usage_max", "memory_efficiency", "mean_waiting")


def differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the figures that are not the same to 1e-9 of themselves, words and findings included.

    Sums of the same floats differ in their last digits, by the order in which they are added up.
    """
    mine, theirs = dict(flatten(one)), dict(flatten(other))
    for key in {*mine, *theirs}:
        a, b = mine.get(key, "missing"), theirs.get(key, "missing")
        numbers = isinstance(a, float) and isinstance(b, float)
        if a != b and not (numbers and isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)):
            yield key, a, b


def load(folder, scenario):
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return load_scenario(path)


@pytest.mark.medium
@pytest.mark.parametrize("first", range(0, CHECKS, BATCH))
def test_leaping_and_stepwise_summaries_agree(tmp_path, first):
    """Engines, policies, clusters of any kind; diagnosis and warnings as well."""
    wrong, leapt = [], 0
    for seed in range(first, min(first + BATCH, CHECKS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeadwayWarning)
            try:
                scenario = load(tmp_path, draw_scenario(seed))
                result = run(scenario)
                stepwise = run(scenario, stepwise=True).summary()
            except HeadwayError:
                continue
        wrong += [(seed, *one) for one in differences(result.summary(), stepwise)]
        leapt += any((log.steps["steps"] > 1).any() for log in result.logs)
    assert not wrong, "\n".join(map(str, wrong))
    assert leapt > BATCH // 3


def outgrowing(**engine):
    """Answers of 400 tokens, for which blocks of few are reserved."""
    return {
        "name": "outgrown",
        "model": "llama-3-8b",
        "gpu": {"name": "A100-80GB"},
        "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-5, "per_context": 1e-6},
        "engine": {
            "name": "textbook",
            "max_num_seqs": 8,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 140,
            "enable_prefix_caching": False,
            **engine,
        },
        "workload": {
            "num_prompts": 12,
            "request_rate": 2.0,
            "input_len": 20,
            "output_len": {"kind": "uniform", "low": 100, "high": 400},
        },
        "seed": 1,
    }


@pytest.mark.parametrize("tokens", [0, 10, 100, 300])
@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_that_outgrow_their_reservation(tmp_path, tokens, overlaps):
    """Blocks grow from where what is reserved is full; what is in use is never less than stored."""
    engine = {"reserve_output_tokens": tokens, "async_scheduling": overlaps}
    scenario = load(tmp_path, outgrowing(**engine))
    leapt, stepwise = run(scenario).summary(), run(scenario, stepwise=True).summary()
    assert list(differences(leapt, stepwise)) == []
    assert leapt["headway"]["memory_efficiency"] <= 1
    assert leapt["headway"]["kv_cache_usage_max"] > 0.6


def test_a_streamed_run_tells_the_same(tmp_path, monkeypatch):
    """Its logs are cut into parts, those of leaps as well."""
    monkeypatch.setattr("simulator.simulation.stream.CHUNK", 3)
    monkeypatch.setattr("simulator.engine.drive.EVENTS_PER_LOOK", 2)
    for tokens in (None, 100):
        scenario = outgrowing(reserve_output_tokens=tokens)
        scenario["workload"] |= {"num_prompts": 40, "request_rate": 0.4}
        scenario = load(tmp_path, scenario)
        streamed = run_streamed(scenario)["headway"]
        stepwise = run(scenario, stepwise=True).summary()["headway"]
        for name in GAUGES:
            assert streamed[name] == pytest.approx(stepwise[name], rel=1e-9), name
