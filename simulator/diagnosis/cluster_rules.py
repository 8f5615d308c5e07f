"""What stands out in a cluster: requests that were given up or tried again, slow links."""

from simulator.diagnosis.facts import Facts, Finding
from simulator.results.request_table import RETRY

MOVED = 0.05  # share of the requests' time that KV caches must be on their way
GIVEN_UP = 0.01  # share of the requests
TRIED = 0.05  # share of the requests' time that goes to tries before the last


CAUSES = {
    "refused_tries": ("refused at the door", "cluster.admission, or more replicas"),
    "timed_out_tries": ("timed out", "more replicas, or cluster.client's timeouts"),
    "tries_lost_in_failures": ("lost with a replica", "cluster.failures, or more replicas"),
}
"""Why tries come to nothing, in words, and the knob."""


def tries(facts: Facts) -> Finding | None:
    """Requests are given up by their clients, or it takes several tries to serve them."""
    cluster = facts.gauges.get("cluster", {})
    total = len(facts.table.sent)
    gone = cluster.get("shed", 0) + cluster.get("timed_out", 0)
    lost, share = gone / total, facts.time.get(RETRY, 0.0) / facts.whole
    if lost < GIVEN_UP and share < TRIED:
        return None
    counts = {name: cluster[name] for name in CAUSES}
    what = ", ".join(
        f"{counts[name]:,} {word}" for name, (word, _) in CAUSES.items() if counts[name]
    )
    text = f"{gone:,} of {total:,} requests were given up ({lost:.1%}). " if gone else ""
    text += f"Tries that came to nothing, {what}, are {share:.0%} of the time of those served."
    return Finding(
        "tries",
        max(lost, share),
        text,
        CAUSES[max(counts, key=lambda name: counts[name])][1],
        {"given_up": gone, "share_of_requests": lost, "share_of_e2el": share, **counts},
    )


def kv_transfer(facts: Facts) -> Finding | None:
    """KV caches are long on their way from the replicas that prefill."""
    share = facts.time.get("transfer_time", 0.0) / facts.whole
    if share < MOVED:
        return None
    links = facts.gauges["cluster"]["kv_transfer"]
    behind = links["mean_link_wait_ms"] / links["mean_transfer_time_ms"]
    return Finding(
        "kv_transfer",
        share,
        f"KV caches are {links['mean_transfer_time_ms'] / 1e3:.3g} s on their way to the replicas "
        f"that decode, {share:.0%} of the requests' time; {behind:.0%} of that behind others "
        f"(busy {links['link_utilization']:.0%}).",
        "cluster.kv_transfer.bandwidth, or more replicas that prefill",
        {
            "share_of_e2el": share,
            "mean_transfer_time_ms": links["mean_transfer_time_ms"],
            "mean_link_wait_ms": links["mean_link_wait_ms"],
            "link_utilization": links["link_utilization"],
        },
    )
