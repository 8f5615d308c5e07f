"""What stands out where prompts begin alike: there is no prefix cache, or it forgets too soon."""

from math import ceil

from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.evidence import known_share
from simulator.diagnosis.finding import Finding, turn
from simulator.diagnosis.fleet_rules import KNOWN, REUSE, STICKY_ROUTERS
from simulator.models.gpus import GIB

SELECTIVE = "write_through_selective"


def prefix_reuse(run: AdvisedEvidence) -> Finding | None:
    """Prompts begin alike, and each is computed anew."""
    if run.engine.enable_prefix_caching:
        return None
    known = known_share(run.record.workload, run.engine.block_size)
    share = known * run.share("queue_time", "prefill_time", "decode_slowed_time")
    if known < KNOWN or share < REUSE:
        return None
    return Finding(
        share,
        f"{known:.0%} of the prompt tokens repeat the beginning of an earlier prompt and are "
        "computed again: there is no prefix cache.",
        "mean_ttft_ms",
        run.advisor.prefix_caching(),
        {"share_of_prompt_tokens": known, "share_of_e2el": share},
    )


def forgotten_prefixes(run: AdvisedEvidence) -> Finding | None:
    """Prompts begin alike, and the prefix cache has evicted what they have in common."""
    engine, scenario = run.engine, run.record.scenario
    hits = run.gauges["prefix_cache_hit_rate"]
    if not engine.enable_prefix_caching or hits is None:
        return None
    behind = run.gauges["external_prefix_cache_hit_rate"] or 0.0
    found = float(hits) + (1.0 - float(hits)) * float(behind)
    known = known_share(run.record.workload, engine.block_size)
    if scenario.cluster is not None and scenario.cluster.router_name not in STICKY_ROUTERS:
        return None  # scattered_prefixes tells of them
    share = (known - found) * run.share("queue_time", "prefill_time", "decode_slowed_time")
    if known - found < KNOWN or share < REUSE:
        return None
    now = engine.kv_offloading_size
    size = run.advisor.spec.num_gpu_blocks * run.advisor.spec.block_bytes
    to = 4 * now if now else ceil(4 * size * engine.tensor_parallel_size / GIB)
    advice = [turn(run.advisor.key("kv_offloading_size"), now, to)]
    if now and engine.hicache_write_policy == SELECTIVE:
        key = run.advisor.key("hicache_write_policy")
        advice.insert(0, turn(key, SELECTIVE, "write_through"))
    return Finding(
        share,
        f"{known:.0%} of the prompt tokens repeat the beginning of an earlier prompt, and "
        f"{found:.0%} are found: the others have been evicted.",
        "mean_ttft_ms",
        advice,
        {"share_of_prompt_tokens": known, "found": found, "share_of_e2el": share},
    )
