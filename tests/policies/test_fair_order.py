"""The heap of the fair policies: at every choice the smallest rank of all who wait."""

import pytest

from simulator.policies.fair import WFQ, Account, Fair
from simulator.scenario.load import check_scenario
from simulator.simulation.run import run
from simulator.util.yaml_lines import SourceMap

chosen: list[Account] = []


def by_looking_at_all(queue) -> Account:
    """Choose as the policies are written down: the first of the smallest."""
    return min(queue.active, key=lambda account: (queue._rank(account), account.joined))


class CheckedFair(Fair):
    def _pick(self) -> Account:
        return checked(self, super()._pick())


class CheckedWFQ(WFQ):
    def _pick(self) -> Account:
        return checked(self, super()._pick())


def checked(queue, account: Account) -> Account:
    chosen.append(account)
    assert account is by_looking_at_all(queue)
    return account


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("policy", "arguments"),
    [
        (CheckedFair, {}),
        (CheckedFair, {"weights": {"client-1": 3, "client-2": 0.1}}),
        (CheckedWFQ, {"input_weight": 0.0}),
        (CheckedWFQ, {"boost": 50.0, "weights": {"client-3": 7}}),
    ],
)
def test_the_smallest_of_all_who_wait_is_chosen(policy, arguments, mode) -> None:
    """Under preemption, with clients that come and go, and with those that keep requests here."""
    chosen.clear()
    scenario = check_scenario(
        {
            "model": "tiny-test",
            "engine": {
                "scheduling_policy": {"policy": f"{__name__}:{policy.__name__}", **arguments},
                "max_num_seqs": 16,
                "num_gpu_blocks_override": 60,
                "max_model_len": 512,
                "preemption_mode": mode,
            },
            "cost": {"kind": "linear", "base": 0.01, "per_token": 1e-4},
            "workload": {
                "num_prompts": 300,
                "request_rate": 80,
                "clients": 40,
                "input_len": 60,
                "output_len": 30,
                "range_ratio": 0.9,
            },
        },
        SourceMap("scenario", {}),
    )
    result = run(scenario)
    assert len(chosen) > 300
    assert result.summary()["headway"]["preemptions"] > 5
