"""What stands out where models share GPUs: requests wait for theirs to wake up."""

from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.finding import Finding, turn
from simulator.diagnosis.fleet_rules import DELAYED, woken_for


def wake_ups(run: AdvisedEvidence) -> Finding | None:
    """Requests wait for a model that sleeps: for its GPUs, or until it is awake."""
    cluster, share = run.record.scenario.cluster, woken_for(run) / run.total
    if cluster is None or cluster.sleep_mode is None or share < DELAYED:
        return None
    told, mode = run.gauges["cluster"]["sleep_mode"], cluster.sleep_mode
    switching = told["share_switching"]
    more = turn("cluster.sleep_mode.replicas", mode.replicas, mode.replicas + 1)
    offers = [more]
    if mode.level == 2 and switching >= 0.5:
        offers = [turn("cluster.sleep_mode.level", 2, 1), more]
    elif mode.max_wait and switching < 0.5:
        offers = [more, turn("cluster.sleep_mode.max_wait", mode.max_wait, mode.max_wait / 2)]
    return Finding(
        share,
        f"{told['share_of_ttft']:.0%} of TTFT is waiting for a wake-up: "
        f"{told['requests_that_waited']:,} requests came while their model slept, and waited "
        f"{told['mean_wait_ms'] / 1e3:.3g} s on average, {switching:.0%} of it while models fell "
        f"asleep and woke up, the rest for GPUs ({run.gauges['cluster']['switches']:,} switches).",
        "mean_ttft_ms",
        offers,
        {"share_of_e2el": share},
    )
