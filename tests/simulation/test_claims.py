"""What docs/claims.md says of common claims: the figures that carry each verdict."""

from pathlib import Path

import pytest

from simulator import load_scenario, run
from simulator.models.gpus import HOST_SHARE, find_gpu
from simulator.models.load import load_model

EXAMPLES = Path(__file__).parents[2] / "scenarios" / "examples"
STATIC, CONTINUOUS = "engine.scheduling_policy=static", "engine.scheduling_policy=fcfs"


def play(name: str, *overrides: str) -> dict[str, float]:
    """Run an example, and return its summary with the keys of `headway` beside the others."""
    summary = run(load_scenario(EXAMPLES / f"{name}.yaml", list(overrides))).summary()
    return {**summary, **summary["headway"]}


@pytest.mark.parametrize(("others", "steps"), [("4", 116), ("5", 125)])
def test_500_steps_become_120_where_one_in_ten_is_long(others: str, steps: int) -> None:
    """In each ten one of 50: static, 10 x 50. Continuous: each takes the seat that is free next."""
    values = ", ".join(["50", *others * 9])
    lengths = f"workload.output_len={{kind: cycle, values: [{values}]}}"
    assert play("hundred-requests", lengths, STATIC)["duration"] == 500
    assert play("hundred-requests", lengths, CONTINUOUS)["duration"] == steps


def test_answers_of_50_on_average_cannot_take_120_steps() -> None:
    """5,000 tokens in ten seats: 500 steps at least, by any scheduler."""
    for policy in (STATIC, CONTINUOUS):
        assert play("hundred-requests", policy)["duration"] >= 500


def test_the_cache_of_a_70b_at_4096_tokens() -> None:
    """2 x 8 heads x 128 x 80 layers x 2 bytes = 320 KiB a token; 64 heads: eight times as much."""
    for name in ("llama-3-70b", "llama-2-70b"):
        assert load_model(name).kv_bytes_per_token() * 4096 == 1.25 * 2**30
    assert load_model("llama-2-70b").num_key_value_heads == 8


def test_p50_is_alike_and_p99_better_at_low_load_but_a_token_waits_for_prompts() -> None:
    """P50 of E2EL within 30 %, P99 of TTFT 40 times better; P99 of ITL is the other way round."""
    static, continuous = (
        play("load", "workload.request_rate=0.1", p) for p in (STATIC, CONTINUOUS)
    )
    assert static["median_e2el_ms"] < 1.3 * continuous["median_e2el_ms"]
    assert static["p99_ttft_ms"] > 40 * continuous["p99_ttft_ms"]
    static, continuous = (play("load", "workload.request_rate=9", p) for p in (STATIC, CONTINUOUS))
    assert static["median_e2el_ms"] > 50 * continuous["median_e2el_ms"]
    assert static["p99_itl_ms"] < continuous["p99_itl_ms"] / 2


@pytest.mark.medium
def test_drafts_raise_ttft_below_saturation() -> None:
    """A prompt waits for longer steps: 5 to 15 % more TTFT, while TPOT is halved."""
    drafts = "{num_speculative_tokens: 3, acceptance: 0.7, draft: {fraction: 0.05}}"
    for rate in (2, 6):
        sets = (f"workload.request_rate={rate}", "workload.num_prompts=600")
        plain = play("load", *sets)
        drafted = play("load", *sets, f"engine.speculative_config={drafts}")
        assert 1.03 < drafted["mean_ttft_ms"] / plain["mean_ttft_ms"] < 1.2
        assert drafted["mean_tpot_ms"] < 0.55 * plain["mean_tpot_ms"]


def test_shortest_job_first_moves_waits_and_no_work() -> None:
    """Under overload the throughput is the same within 5 %; median down, P99 up."""
    sets = ("predictor={kind: oracle}", "workload.request_rate=12")
    fcfs = play("load", *sets, CONTINUOUS)
    sjf = play("load", *sets, "engine.scheduling_policy={policy: sjf, by: hint}")
    assert sjf["output_throughput"] == pytest.approx(fcfs["output_throughput"], rel=0.05)
    assert sjf["output_throughput"] < fcfs["output_throughput"]
    assert sjf["median_e2el_ms"] < 0.7 * fcfs["median_e2el_ms"]
    assert sjf["p99_e2el_ms"] > 1.3 * fcfs["p99_e2el_ms"]


def test_continuous_on_an_a100_beats_static_on_a_b200() -> None:
    """Llama-3-8B, 32 seats, exponential answers: scheduling is worth more than two generations."""
    sets = ["model=llama-3-8b", "cost=null", "engine.max_num_seqs=32", "workload.num_prompts=1000"]
    rates = [
        play("claims", *sets, f"gpu.name={gpu}", policy)["output_throughput"]
        for gpu, policy in (
            ("A100-80GB", STATIC),
            ("H100-80GB", STATIC),
            ("B200", STATIC),
            ("A100-80GB", CONTINUOUS),
        )
    ]
    assert rates == sorted(rates)


def test_a_hidden_host_costs_nothing_until_it_is_longer_than_the_gpu() -> None:
    """5 ms of host: a quarter of a synchronous step, none of an asynchronous one of 20 ms."""

    def share(seconds: float, asynchronous: str) -> float:
        cost = f"cost={{profile: llama-3-8b.a100.bf16, overhead: {{host: {seconds}}}}}"
        scheduling = f"engine.async_scheduling={asynchronous}"
        return play("load", cost, scheduling, "workload.num_prompts=300")["host_share"]

    assert share(0.005, "true") == pytest.approx(share(0.0, "true"))
    assert share(0.005, "false") > share(0.0, "false") + 0.1
    assert share(0.02, "true") > share(0.0, "true") + 0.1


def test_a_gb_takes_tens_of_milliseconds_over_pcie() -> None:
    """32 GB/s and 64 GB/s by the bus, 85 % of it by a copy."""
    times = [1e12 / (find_gpu(g).host_bandwidth * HOST_SHARE) for g in ("A100-80GB", "H100-80GB")]
    assert times == pytest.approx([36.8, 18.4], abs=0.05)
