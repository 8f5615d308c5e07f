"""`workload.frontend`: what requests pass before the scheduler."""

from pathlib import Path

import pytest

from simulator import load_scenario, run
from simulator.util.errors import HeadwayError

LOAD = """
model: llama-3-8b
cost: {kind: linear, base: 1}
workload: {num_prompts: 2, input_len: 100, output_len: 2, frontend: %s}
engine: {async_scheduling: false}
"""


@pytest.mark.parametrize(
    ("frontend", "ttft"),
    [
        ("null", [1.0, 1.0]),
        ("{}", [1.0, 1.0]),
        # Requests pass one by one, 100 + 100 x 1 ms each; the second meets the first one's step
        # and waits until it ends at 1.2 s.
        ("{per_request: 100, per_token: 1}", [1.2, 2.2]),
        ("{latency: 500}", [1.5, 1.5]),
        ("server", [1.0018, 1.0018]),
        ("client", [1.0052, 2.0052]),  # 3 + 2 + 100 x 0.002 ms
    ],
)
def test_requests_pass_the_frontend(tmp_path: Path, frontend: str, ttft: list[float]) -> None:
    (tmp_path / "s.yaml").write_text(LOAD % frontend)
    scenario = load_scenario(tmp_path / "s.yaml")
    assert run(scenario).requests["ttft"].tolist() == pytest.approx(ttft)
    given = scenario.resolved()["workload"]["frontend"]
    assert (given is None) == (frontend == "null")


@pytest.mark.parametrize(
    ("frontend", "message"),
    [
        ("proxy", "4: workload.frontend: no frontend 'proxy'; there are server, client, or give"),
        ("{latency: -1}", "4: workload.frontend.latency: must be at least 0"),
        ("{delay: 1}", "4: workload.frontend.delay: "),
        ("server, client_latency: 1", "4: workload.client_latency: give it as frontend.latency"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, frontend: str, message: str) -> None:
    (tmp_path / "s.yaml").write_text(LOAD % frontend)
    with pytest.raises(HeadwayError, match=message):
        load_scenario(tmp_path / "s.yaml")
