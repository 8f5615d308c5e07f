"""Time fleets: whether a request costs the same in any of them; a million on 64 replicas.

    python benchmarks/fleet.py [--big] [--routers round_robin,least_outstanding] [--rounds 3]

Without `--big` fleets of 1 to 1,000 replicas, 4 requests/s for each of them: user CPU of the
simulation alone (no files), best of the rounds. `all` is that of 200,000 requests, set-up included,
by request; `more` is what 100,000 requests more cost, which set-up is no part of. Each is one
process. Trust the ratios, which are to 8 replicas: machines differ. `--big` adds the whole command
`headway run` for a million requests on 64 replicas, files and all, and with `--no-tables`.
"""

import argparse
import os
import warnings

from measure import DEMO, headway_run, python

SIZES = (1, 8, 64, 1000)
REQUESTS = 200_000


def options(replicas: int, requests: int, router: str) -> list[str]:
    """Return the overrides of the demo scenario for a fleet under the same load per replica."""
    return [
        f"cluster.replicas={replicas}",
        f"cluster.router={router}",
        f"workload.num_prompts={requests}",
        f"workload.request_rate={4 * replicas}",
    ]


def measure(replicas: int, router: str) -> tuple[float, float]:
    """Simulate in this process; return user CPU per request, of all and of more, in us."""
    from simulator import load_scenario, run

    warnings.simplefilter("ignore")
    seconds = []
    for requests in (REQUESTS // 2, REQUESTS):
        before = os.times().user
        run(load_scenario(DEMO, options(replicas, requests, router)))
        seconds.append(os.times().user - before)
    half, whole = (value / REQUESTS * 1e6 for value in seconds)
    return whole, 2 * (whole - half)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--routers", default="round_robin,least_outstanding")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.one:
        print(*measure(args.one, args.routers))
        return
    for router in args.routers.split(","):
        show(router, args.rounds)
    if args.big:
        for more in ([], ["--no-tables"]):
            fleet = options(64, 1_000_000, "least_outstanding")
            used = headway_run(DEMO, fleet, *more, "--quiet")
            what = " ".join(["1,000,000 requests on 64 replicas", *more])
            print(f"{what}: {used.user:.1f} s user CPU, {used.memory:,.0f} MB")


def show(router: str, rounds: int) -> None:
    """Measure and print one router."""
    costs: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for _ in range(rounds):  # in turn, so that what disturbs one disturbs all
        for size in SIZES:
            child = python([__file__, "--one", str(size), "--routers", router])
            whole, more = map(float, child.text.split())
            costs[size].append((whole, more))
    best = {size: [min(column) for column in zip(*costs[size], strict=True)] for size in SIZES}
    print(f"{router}\n{'replicas':>8}  {'us, all':>8}  {'ratio':>5}  {'us, more':>8}  {'ratio':>5}")
    for size in SIZES:
        (whole, more), (all8, more8) = best[size], best[8]
        print(
            f"{size:>8}  {whole:>8.1f}  {whole / all8:>5.2f}  {more:>8.1f}  {more / more8:>5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
