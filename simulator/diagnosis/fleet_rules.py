"""What stands out in a fleet: failures, an autoscaler that is late, and what routers do.

What the first two explain of the time that requests lose is taken off the weight of other findings:
a queue behind a failed replica is no lack of seats.
"""

from math import ceil
from typing import NamedTuple

import numpy as np

from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.autoscaler_waits import (
    COOLDOWN,
    INTERVAL,
    STARTUP,
    TARGET,
    AutoscalerWaits,
    autoscaler_waits,
    moments,
    waiting_at,
)
from simulator.diagnosis.evidence import Evidence, known_share
from simulator.diagnosis.finding import Advice, Finding, turn
from simulator.results.request_table import Flags

DELAYED = 0.05  # share of the requests' time that failures, or an autoscaler's delays, must take
WAITING = 0.05  # share of the requests' time that they wait at a replica while another is free
KNOWN = 0.1  # share of the prompt tokens that prefix caches miss and could know
REUSE = 0.02  # share of the requests' time that goes to computing these again
MOVED = 0.05  # share of the requests' time that KV caches must be on their way
TOLD = 3  # outages that a finding names
BLIND_ROUTERS = ("round_robin", "random", "session_affinity", "prefix_aware")
"""Routers that look at no replica's queue, or not first."""
STICKY_ROUTERS = ("session_affinity", "prefix_aware")
"""Routers that send prompts that begin alike to one replica."""
SETTLED = 1  # requests that wait at least before a queue counts as one


class Outage(NamedTuple):
    """One failure of one replica."""

    replica: int  # a server, by its number
    start: float  # s
    end: float | None  # s; None: it did not come back


class Outages(NamedTuple):
    """All failures, and what they cost the requests.

    A request is affected if it lost its replica, or was sent between a failure and the moment at
    which as few waited as before it.
    """

    each: list[Outage]
    most_down: int  # replicas at once
    mean_affected: float  # s, e2el
    mean_others: float  # s
    excess: float  # s by which all affected together take longer than as many others


def find_outages(run: Evidence) -> Outages | None:
    """Find what failures cost; None where there are none, or none is unaffected."""
    cluster, table = run.record.cluster, run.table
    if cluster is None or not cluster.counters.get("failures"):
        return None
    each, open_ones = [], {}
    for time, replica, state in cluster.changes:
        if state == "down":
            open_ones[replica] = time
        elif replica in open_ones:
            each.append(Outage(replica, open_ones.pop(replica), time))
    each += [Outage(replica, start, None) for replica, start in open_ones.items()]
    each.sort(key=lambda one: one.start)
    times = moments(run)
    level = waiting_at(run, times)
    disturbed = np.zeros(len(times), bool)
    down = np.zeros(len(times), np.int64)
    for one in each:
        begin, end = np.searchsorted(times, [one.start, one.end or times[-1]])
        before = max(int(level[max(begin - 1, 0)]), SETTLED)
        calm = np.flatnonzero(level[end:] <= before)
        disturbed[begin : end + int(calm[0]) if len(calm) else None] = True
        down[begin : max(end, begin + 1)] += 1
    place = np.searchsorted(times, table.sent[run.done], "right") - 1
    again = table.entered[run.done] > table.sent[run.done]
    affected: Flags = disturbed[place] | again
    e2el = table.e2el[run.done]
    if not affected.any() or affected.all():
        return None
    inside, outside = float(e2el[affected].mean()), float(e2el[~affected].mean())
    excess = max(inside - outside, 0.0) * int(affected.sum())
    return Outages(each, int(down.max(initial=1)), inside, outside, excess)


def failures(run: AdvisedEvidence) -> Finding | None:
    """Requests take longer because replicas are away."""
    outages = find_outages(run)
    if outages is None or outages.excess < DELAYED * run.total:
        return None
    share = outages.excess / run.total
    lost = run.gauges["cluster"]["tries_lost_in_failures"]
    named = [
        f"replica {one.replica} from {one.start:,.0f} s "
        + ("to the end" if one.end is None else f"to {one.end:,.0f} s")
        for one in outages.each[:TOLD]
    ]
    more = [f"{len(outages.each) - TOLD:,} more"] if len(outages.each) > TOLD else []
    return Finding(
        share,
        f"Replicas fail and the rest are slower under the load: {', '.join([*named, *more])}. "
        f"Requests sent from a failure until its queue is gone take {outages.mean_affected:.3g} s, "
        f"others {outages.mean_others:.3g} s; {lost:,} lost their replica and restarted. That is "
        f"{share:.0%} of the requests' time.",
        "mean_e2el_ms",
        _spare(run, outages.most_down),
        {
            "most_replicas_down": outages.most_down,
            "share_of_e2el": share,
            "mean_e2el_affected_s": outages.mean_affected,
            "mean_e2el_others_s": outages.mean_others,
        },
    )


def _spare(run: AdvisedEvidence, count: int) -> list[Advice]:
    """Advise as many replicas to spare as are down at once, and quicker repairs."""
    cluster = run.record.scenario.servers
    offers = []
    group = run.advisor.group
    if (scaling := cluster.scalers.get(group)) is not None:
        to = min(scaling.min_replicas + count, scaling.max_replicas)
        if to > scaling.min_replicas:
            key = f"{cluster.scaler_key(group)}.min_replicas"
            offers.append(turn(key, scaling.min_replicas, to))
    else:
        key, now = cluster.replicas_of(group)
        offers.append(turn(key, now, cluster.in_pods(now + count)))
    if cluster.failures is not None and cluster.failures.mtbf is not None:
        mttr = cluster.failures.mttr
        offers.append(turn("cluster.failures.mttr", mttr, mttr / 4))
    return offers


def autoscaling(run: AdvisedEvidence) -> Finding | None:
    """Requests wait because the autoscaler orders too late, or what it ordered starts late."""
    waits = autoscaler_waits(run)
    if waits is None:
        return None
    cause = max(waits.seconds, key=waits.seconds.__getitem__)
    share = sum(waits.seconds.values()) / run.total
    if share < DELAYED:
        return None
    cluster = run.record.scenario.servers
    block = cluster.scalers[waits.group]
    whole = sum(waits.seconds.values())
    target = f"target {block.target:g} of {block.metric} calls for no more replicas"
    why = {
        STARTUP: f"replicas start (startup_delay {block.startup_delay:g} s)",
        COOLDOWN: f"replicas start that were taken away {waits.gap:.3g} s before "
        f"(cooldown {block.cooldown:g} s, startup_delay {block.startup_delay:g} s)",
        INTERVAL: f"the autoscaler waits for its next look (interval {block.interval:g} s)",
        TARGET: target,
    }
    parts = [
        f"{seconds / whole:.0%} while {why[name]}"
        for name, seconds in sorted(waits.seconds.items(), key=lambda pair: -pair[1])
        if seconds >= 0.05 * whole
    ]
    return Finding(
        share,
        f"The autoscaler is late: requests wait for replicas that it could have had, {share:.0%} "
        f"of their time; {', '.join(parts)}.",
        "mean_ttft_ms",
        _scale_sooner(run, cause, waits),
        {
            "cause": cause,
            "share_of_e2el": share,
            **{f"share_{name}": seconds / whole for name, seconds in waits.seconds.items()},
        },
    )


def _scale_sooner(run: AdvisedEvidence, cause: str, waits: AutoscalerWaits) -> list[Advice]:
    """Advise the delay or threshold that is to blame, then more replicas from the start on."""
    cluster = run.record.scenario.servers
    key, block = cluster.scaler_key(waits.group), cluster.scalers[waits.group]
    gap, most_up = waits.gap, waits.most_up
    to = {
        STARTUP: block.startup_delay / 4,
        COOLDOWN: float(ceil(2 * (block.cooldown + gap))),
        INTERVAL: max(block.interval / 4, min(block.interval, 1.0)),
        TARGET: block.target / 2,
    }
    if block.metric == "slo_attainment":
        to[TARGET] = (1 + block.target) / 2
    offers = [turn(f"{key}.{cause}", getattr(block, cause), to[cause])]
    offers = [one for one in offers if one.to != one.value]
    if most_up > block.min_replicas:
        offers.append(turn(f"{key}.min_replicas", block.min_replicas, most_up))
    if cause != TARGET:
        offers.append(turn(f"{key}.{TARGET}", block.target, to[TARGET]))
    return offers


def routing(run: AdvisedEvidence) -> Finding | None:
    """Requests wait at one replica while another is free."""
    share, router = run.misrouted * run.share("queue_time"), reroute(run)
    if share < WAITING or not router:
        return None
    waited = np.array(run.waited)
    worst, part = int(waited.argmax()), float(waited.max() / (waited.sum() or 1.0))
    name = router[0].value
    if name == "session_affinity":
        text = (
            f"Session affinity pins a backlog to replica {worst}: {part:.0%} of all waiting is "
            f"there. {run.misrouted:.0%} of all waiting is at one replica while another is free"
        )
    else:
        text = (
            f"Requests wait at one replica while another is free (router {name}; replica {worst} "
            f"has {part:.0%} of all waiting): that is {run.misrouted:.0%} of all waiting"
        )
    return Finding(
        share,
        f"{text}, {share:.0%} of the requests' time.",
        "p99_ttft_ms",
        [*router, *run.advisor.replicas()],
        {
            "replica": worst,
            "replica_share_of_waiting": part,
            "share_of_waiting": run.misrouted,
            "share_of_e2el": share,
        },
    )


def reroute(run: AdvisedEvidence) -> list[Advice]:
    """Advise a router that looks at the replicas, where there is none."""
    cluster = run.record.scenario.cluster
    if cluster is None or cluster.router_name not in BLIND_ROUTERS:
        return []
    return [turn("cluster.router", cluster.router_name, "least_outstanding")]


def scattered_prefixes(run: AdvisedEvidence) -> Finding | None:
    """Prompts begin alike, but the router sends them to replicas that do not know them."""
    cluster = run.record.scenario.cluster
    if cluster is None or not run.engine.enable_prefix_caching:
        return None
    router = cluster.router_name
    if router in STICKY_ROUTERS or len(run.record.logs) < 2:
        return None
    if run.gauges["prefix_cache_hit_rate"] is None:
        return None
    hits = float(run.gauges["prefix_cache_hit_rate"])
    known = known_share(run.record.workload, run.engine.block_size)
    share = (known - hits) * run.share("queue_time", "prefill_time", "decode_slowed_time")
    if known - hits < KNOWN or share < REUSE:
        return None
    return Finding(
        share,
        f"{known:.0%} of the prompt tokens repeat the beginning of an earlier prompt, but the "
        f"replicas' prefix caches have {hits:.0%}: router {router} sends prompts that begin alike "
        "to different replicas.",
        "mean_ttft_ms",
        [turn("cluster.router", router, "prefix_aware")],
        {"share_of_prompt_tokens": known, "share_of_e2el": share},
    )


def explained(run: AdvisedEvidence) -> float:
    """Return the share of the time that requests lose which what happens to replicas explains."""
    outages, waits = find_outages(run), autoscaler_waits(run)
    seconds = max(
        0.0 if outages is None else outages.excess,
        0.0 if waits is None else sum(waits.seconds.values()),
    )
    if seconds < DELAYED * run.total:
        return 0.0
    lost = run.total - sum(run.time.get(name, 0.0) for name in ALONE)
    return min(seconds / lost, 1.0) if lost > 0 else 0.0


ALONE = ("prefill_time", "decode_alone_time", "delivery_time")
"""Parts of e2el that a request alone on its replica would have, too."""


def kv_transfer(run: AdvisedEvidence) -> Finding | None:
    """KV caches are long on their way from the replicas that prefill."""
    share = run.share("transfer_time")
    if share < MOVED:
        return None
    links = run.gauges["cluster"]["kv_transfer"]
    behind = links["mean_link_wait_ms"] / links["mean_transfer_time_ms"]
    given = run.record.scenario.servers.kv_transfer
    assert given is not None
    return Finding(
        share,
        f"The transfer of a KV cache to the replica that decodes takes "
        f"{links['mean_transfer_time_ms'] / 1e3:.3g} s, {share:.0%} of the requests' time; "
        f"{behind:.0%} of it is the wait for a link (busy {links['link_utilization']:.0%}).",
        "mean_transfer_time_ms",
        [turn("cluster.kv_transfer.bandwidth", given.bandwidth, 2 * given.bandwidth)],
        {"share_of_e2el": share},
    )


def pools(run: AdvisedEvidence) -> Finding | None:
    """Requests wait for one of two pools, and the other could give it replicas."""
    cluster = run.record.scenario.cluster
    if cluster is None or len(cluster.groups) != 2 or cluster.scalers:
        return None
    if run.record.transfers is None:
        return None
    shares = [run.share("queue_time"), run.share("decode_queue_time")]
    names, groups = [*cluster.groups], [*cluster.groups.values()]
    starved = "kv_producer" if shares[0] >= shares[1] else "kv_consumer"
    short = 0 if groups[0].kv_role == starved else 1
    now = [group.replicas for group in groups]
    spare, share = now[1 - short] - 1, max(shares)
    if share < WAITING or not spare:
        return None
    more = run.advisor.replicas()
    wanted = max((offer.to / offer.value for offer in more), default=2.0)
    moved = min(ceil(now[short] * (wanted - 1.0)), spare)
    to = now[short] + moved, now[1 - short] - moved
    if cluster.is_shared_out and cluster.kv_transfer is not None:
        x, y = to if starved == "kv_producer" else reversed(to)
        best = turn("cluster.kv_transfer.ratio", cluster.kv_transfer.ratio, f"{x}P{y}D")
    else:
        keys = [f"cluster.groups.{name}.replicas" for name in (names[short], names[1 - short])]
        best = turn(keys[0], now[short], to[0], {keys[1]: to[1]})
    return Finding(
        share,
        f"Requests wait for {names[short]}, {share:.0%} of their time, while {names[1 - short]} "
        f"has {spare + 1} replicas.",
        "mean_ttft_ms",
        [best, *more],
        {"short": names[short], "share_of_e2el": share, "moved": moved},
    )
