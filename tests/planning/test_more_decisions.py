"""Further decisions: what `diagnose` puts first keeps the levels in long runs of other seeds."""

import json
import warnings
from typing import Any

import pytest

from headway.cli.main import main
from simulator import load_scenario, run
from simulator.diagnosis.finding import follow

L40S = {"model": "llama-3.1-8b", "gpu": "L40S"}
H100 = {"model": "llama-3.1-8b", "gpu": "H100-80GB"}
SHORT = {"num_prompts": 400, "request_rate": 4, "input_len": 150, "output_len": 120}
TWO = {"input_len": 1200, "output_len": 200, "clients": [1, 4], "priorities": [0, 1]}
DECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a shared system prompt of 3,000 tokens without a prefix cache": (
        L40S
        | {
            "engine": {"enable_prefix_caching": False},
            "workload": SHORT | {"prefix_len": 3000},
            "slo": ["p99_ttft_ms<=800", "p90_tpot_ms<=60"],
        },
        "engine.enable_prefix_caching",
    ),
    "paid requests and a batch that share too few seats": (
        H100
        | {
            "engine": {"max_num_seqs": 32},
            "workload": {"num_prompts": 500, "request_rate": 15} | TWO,
            "slo": ["client client-0: p95_ttft_ms<=500", "client client-1: p95_e2el_ms<=60000"],
        },
        "engine.max_num_seqs",
    ),
    "24 adapters on three replicas of four slots": (
        L40S
        | {
            "engine": {"max_loras": 4, "enable_lora": True},
            "cluster": {"replicas": 3, "router": "round_robin"},
            "workload": {"num_prompts": 600, "request_rate": 9, "input_len": 500}
            | {"output_len": 100, "adapters": {"num_adapters": 24}},
            "slo": ["p90_ttft_ms<=1500"],
        },
        "engine.max_loras",
    ),
    "experts on one pair of L40S, at seven times what it keeps": (
        {
            "model": "qwen3-30b-a3b",
            "gpu": {"name": "L40S", "count": 2},
            "workload": {"num_prompts": 600, "request_rate": 16}
            | {"input_len": 600, "output_len": 250},
            "slo": ["p99_ttft_ms<=2000", "p90_tpot_ms<=40"],
        },
        "cluster.replicas",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", DECISIONS)
def test_the_first_advice_keeps_the_levels_of_long_runs(name: str, tmp_path, capsys) -> None:
    raw, key = DECISIONS[name]
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(raw))
    assert main(["diagnose", str(path), "--json", "--jobs", "1"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    first = next(one for one in trials if one["advice"]["key"] == key)
    print([(one["advice"]["key"], one["advice"]["to"], one["missed"]) for one in trials])
    assert first["missed"] == 0
    own = load_scenario(raw, [f"workload.num_prompts={3 * raw['workload']['num_prompts']}"])
    for seed in (100, 101):
        for followed, met in ((False, False), (True, True)):
            long = load_scenario(own.resolved(), [f"seed={seed}"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run(follow(long, first["advice"]) if followed else long).summary()
            assert found["headway"]["slo_met"] is met
