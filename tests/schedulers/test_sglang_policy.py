"""SGLang's scheduler with its queue in the order of a policy of Headway's."""

from pathlib import Path
from typing import Any

import pytest

from simulator.policies.fair import Fair
from simulator.policies.orders import SJF
from simulator.scenario.load import check_scenario, load_scenario, named_code
from simulator.schedulers.sglang.scheduler import SgLang
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.yaml_lines import SourceMap
from tests.support.engines import made
from tests.support.schedules import counter, prompts
from tests.support.schedules import run as play

OWN = """
class Newest:
    def key(self, request):
        return -request.arrival
"""


def scenario(order: object, **engine: object) -> dict[str, Any]:
    return {
        "model": "llama-3-8b",
        "cost": {"kind": "linear", "base": 2**-7, "per_token": 2**-12, "per_context": 0.0},
        "predictor": {"kind": "noisy", "sigma": 0.7},
        "engine": {
            "name": "sglang",
            "num_gpu_blocks_override": 600,
            "max_num_seqs": 8,
            "max_model_len": 200,
            "scheduling_policy": {"policy": "sglang", "order": order},
        }
        | engine,
        "workload": {
            "num_prompts": 60,
            "request_rate": 100,
            "input_len": 60,
            "output_len": 40,
            "range_ratio": 0.8,
            "clients": [3, 1, 1],
        },
    }


def test_the_shortest_goes_first_and_sglang_splits_and_admits() -> None:
    """One seat: of those who wait from second 0 on request 2 is the shortest, then 3."""
    scheduler = made(SgLang, counter(100, 1), policy=SJF(), max_num_seqs=1, max_model_len=50)
    seen, _ = play(scheduler, (0, 9, 1), (0, 20, 1), (0, 5, 1), (0, 7, 1))
    assert seen == [
        prompts(2, tokens=5),
        prompts(3, tokens=7),
        prompts(0, tokens=9),
        prompts(1, tokens=20),
    ]


def test_the_policy_is_asked_again_after_each_admission() -> None:
    """Within one pass each client in turn, as the books are charged at once."""
    scheduler = made(
        SgLang, counter(1000, 1), policy=Fair(), max_num_seqs=3, max_model_len=50, max_new_tokens=1
    )
    clients = ["a", "a", "a", "b"]
    seen, _ = play(scheduler, *[(0, 10, 1)] * 4, client=clients)
    assert seen == [prompts(0, 3, 1, tokens=10), prompts(2, tokens=10)]


@pytest.mark.parametrize("name", ["sjf", "boost", "hrrn", "fair", "wfq", "drr"])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_leaps_change_nothing(name: str, overlap: bool) -> None:
    raw = scenario({"policy": name}, async_scheduling=overlap)
    checked = check_scenario(raw, SourceMap("s", {}))
    logs = [run(checked, stepwise=stepwise).logs[0] for stepwise in (True, False)]
    assert bytes(logs[0].request_rows) == bytes(logs[1].request_rows)
    plain = check_scenario(scenario("fcfs", async_scheduling=overlap), SourceMap("s", {}))
    assert bytes(run(plain).logs[0].request_rows) != bytes(logs[1].request_rows)


def test_an_own_class_orders_and_counts_as_code(tmp_path: Path) -> None:
    (tmp_path / "own_order.py").write_text(OWN)
    raw = scenario({"policy": "own_order:Newest"})
    checked = check_scenario(raw, SourceMap("s", {}), tmp_path)
    key = ("engine", "scheduling_policy", "order")
    assert list(named_code(checked)) == [(key, "own_order:Newest")]
    assert run(checked).summary()["completed"] == 60


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"policy": "srpt"}, "order: srpt lets waiting requests displace running ones"),
        ({"policy": "virtual-finish-time"}, "order: virtual-finish-time picks victims"),
        ({"policy": "static"}, "order: static is a scheduler of its own"),
        ({"policy": "sjff"}, "order: no policy 'sjff'; there are .*did you mean sjf"),
        ({"policy": "sjf", "age": 3}, "order.age: sjf takes no such argument"),
        ({"by": "hint"}, "order: must name a policy"),
        ("sjf", "order: must be fcfs, lof, .*not 'sjf'"),
    ],
)
def test_what_cannot_order_sglangs_queue_is_refused(order: object, message: str) -> None:
    with pytest.raises(HeadwayError, match=message) as caught:
        check_scenario(scenario(order), SourceMap("s", {}))
    assert "\n" not in str(caught.value)


def test_hints_and_priorities() -> None:
    raw = scenario({"policy": "sjf", "by": "hint"}) | {"predictor": None}
    with pytest.raises(HeadwayError, match="order: sjf ranks by predicted lengths"):
        check_scenario(raw, SourceMap("s", {}))
    with pytest.raises(ValueError, match="needs order fcfs, without priorities"):
        made(SgLang, counter(100, 1), policy=SJF(), order="lof")


@pytest.mark.parametrize(
    ("policy", "own"),
    [("sjf", r"sglang, in this order \{policy: sglang, order: \{policy: sjf"), ("fcfs", "sglang$")],
)
def test_a_policy_in_the_place_of_sglangs_scheduler_is_told(policy, own) -> None:
    """It is vLLM's scheduler then, under SGLang's defaults; shipped scenarios pin fcfs."""
    keys = [f"engine={{name: sglang, scheduling_policy: {policy}}}", "workload.num_prompts=4"]
    with pytest.warns(HeadwayWarning, match=f"vLLM's scheduler runs.*its own is {own}"):
        run(load_scenario("demo", keys))
