"""Images and clips: what encoding them takes, and who waits for the encoder."""

from math import ceil

from simulator.diagnosis.advice import AdvisedEvidence
from simulator.diagnosis.finding import Finding, turn

SHARE = 0.05  # of the busy time, or of the requests' time
KEYS = ("max_num_encoder_input_tokens", "encoder_cache_size")
MORE = 4  # times as much as there is
FULL, EMPTY = 0.5, 0.05  # of the time that encoders are paid for
WAITING = 2  # times as long at the encoders as these compute: most is a queue


def encoder(run: AdvisedEvidence) -> Finding | None:
    """Encoding takes long, or requests compute less for want of encoder budget or cache."""
    config, cluster = run.engine.multimodal_config, run.record.cluster
    if cluster is not None and cluster.encodings is not None:
        return _apart(run)
    if config is None or "encoded_items" not in run.gauges:
        return None
    gauges, items = run.gauges, run.gauges["encoded_items"]
    busy = gauges["gpu_busy_fraction"] * run.summary["duration"] * gauges["replicas"]
    encoding = gauges["encoding_time"] / busy if busy else 0.0
    waited = gauges["encoder_waiting_time"] / run.total
    if max(waited, encoding) < SHARE:
        return None
    advice, waits = [], ""
    if waited >= SHARE:
        tokens = max(run.engine.max_num_batched_tokens, run.advisor.spec.model.largest_image)
        sizes = {key: getattr(config, key) or tokens for key in KEYS}
        first, second = sorted(KEYS, key=lambda key: sizes[key])
        keys = {one: run.advisor.key(f"multimodal_config.{one}") for one in KEYS}
        also = {keys[second]: max(sizes[second], MORE * sizes[first])}
        advice.append(turn(keys[first], sizes[first], MORE * sizes[first], also))
        waits = f"; requests wait {waited:.0%} of their time for the encoder's budget or cache"
    return Finding(
        max(waited, encoding),
        f"Encoding {items:,} images or clips takes {encoding:.0%} of the busy time{waits}.",
        "p99_ttft_ms",
        [*advice, *run.advisor.replicas()],
        {"share_of_e2el": waited, "encoding_share": encoding, "encoded_items": items},
    )


def _apart(run: AdvisedEvidence) -> Finding | None:
    """Requests wait for the encoders, which are busy, or these have next to nothing to do."""
    cluster = run.record.scenario.servers
    groups = run.gauges["cluster"]["groups"]
    name = max(cluster.encoders, key=lambda one: groups[one]["gpu_busy_fraction"])
    busy, now = groups[name]["gpu_busy_fraction"], groups[name]["replicas"]
    share, key = run.share("encoder_time"), f"cluster.groups.{name}.replicas"
    evidence = {"share_of_e2el": share, "encoders_busy": busy}
    encoding = busy * now * run.summary["duration"]
    if share >= SHARE and (busy >= FULL or share * run.total >= WAITING * encoding):
        return Finding(
            share,
            f"Images are at the encoders for {share:.0%} of the requests' time; these are busy "
            f"{busy:.0%}.",
            "p99_ttft_ms",
            [turn(key, now, now + max(1, ceil(now * (busy / FULL - 1))))],
            evidence,
        )
    if busy >= EMPTY:
        return None
    fewer = max(1, ceil(now * busy / FULL))
    return Finding(
        1 - busy / EMPTY,
        f"Encoders apart save next to nothing: they are busy {busy:.0%} of the time.",
        "gpu_hours",
        [turn(key, now, fewer)] if fewer < now else [],
        evidence,
    )
