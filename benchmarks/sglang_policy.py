"""What a policy of Headway's costs SGLang's scheduler: milliseconds of a pass in headway_sglang.

    python benchmarks/sglang_policy.py [POLICY ...] [--waiting 1000] [--running 256] [--passes 200]

It needs neither SGLang nor a GPU: the plug-in's three hooks are called as SGLang calls them, on
requests that have what they read. As many wait and run all the time: in each pass two are
admitted, and two come. The exit code is 1 where the median is 0.2 ms or more.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

from headway_sglang.plugin import Ordering
from headway_sglang.policy import make_order
from simulator.scenario.policy_table import POLICY_VARIABLE

MOST = 0.2  # ms
ADMITTED = 2  # requests in a pass
WARM_UP = 50  # passes
POLICIES = ("sjf", "boost", "hrrn", "fair", "wfq", "drr")
GOES_ON, DECODES = SimpleNamespace(name="CONTINUE"), SimpleNamespace(is_extend=lambda: False)


class Queued:
    """What the plug-in reads of a request of SGLang's."""

    output_ids: tuple[int, ...] = ()
    retraction_count = 0
    priority = extra_key = cache_salt = None

    def __init__(self, number: int, rng: Random) -> None:
        self.origin_input_ids = range(rng.randint(10, 2000))
        self.time_stats = SimpleNamespace(wait_queue_entry_time=number / 100)
        custom = {"client": f"client-{rng.randrange(20)}", "hint": rng.randint(1, 500)}
        self.sampling_params = SimpleNamespace(max_new_tokens=500, custom_params=custom)


def measure(policy: str, waiting: int, running: int, passes: int) -> float:
    """Return the median seconds of a pass."""
    os.environ[POLICY_VARIABLE] = f'{{"policy": "{policy}"}}'
    ordering, rng = Ordering(make_order()), Random(policy)
    queue = [Queued(number, rng) for number in range(waiting + running)]
    batch: list[Queued] = []
    seconds = [0.0]

    def timed(call: Callable[..., Any], *arguments: Any) -> None:
        start = time.perf_counter()
        call(*arguments)
        seconds[-1] += time.perf_counter() - start

    for number in range(WARM_UP + passes):
        seconds.append(0.0)
        timed(ordering.calc_priority, lambda *_: None, None, queue, None)
        admitted: list[Queued] = []
        for request in queue:
            admitted.append(request)
            timed(ordering.tried, GOES_ON, SimpleNamespace(can_run_list=admitted), request)
            if len(admitted) >= (ADMITTED if number else running):
                break
        gone = set(admitted)
        queue = [request for request in queue if request not in gone]
        batch = [*batch, *admitted][-running:]
        timed(
            ordering.run_batch,
            None,
            SimpleNamespace(reqs=batch, forward_mode=DECODES, chunked_req=None),
        )
        queue += [Queued(waiting + number, rng) for _ in range(waiting - len(queue))]
    return median(seconds[-passes:])


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", default=POLICIES, help=f"some of {POLICIES}")
    parser.add_argument("--waiting", type=int, default=1000, help="requests (1000)")
    parser.add_argument("--running", type=int, default=256, help="requests (256)")
    parser.add_argument("--passes", type=int, default=200, help="timed (200)")
    options = parser.parse_args(arguments)
    slow = False
    for name in options.policies:
        spent = 1e3 * measure(name, options.waiting, options.running, options.passes)
        slow |= spent >= MOST
        print(f"{name:8} {spent:.3f} ms")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
