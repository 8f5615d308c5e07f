"""Images and clips: what encoding them takes, and who waits for the encoder."""

from simulator.diagnosis.advice import AdvisedEvidence, Finding, turn

SHARE = 0.05  # of the busy time, or of the requests' time
KEYS = ("max_num_encoder_input_tokens", "encoder_cache_size")
MORE = 4  # times as much as there is


def encoder(run: AdvisedEvidence) -> Finding | None:
    """Encoding takes long, or requests compute less for want of encoder budget or cache."""
    config = run.engine.multimodal_config
    if config is None or "encoded_items" not in run.gauges:
        return None
    gauges, items = run.gauges, run.gauges["encoded_items"]
    busy = gauges["gpu_busy_fraction"] * run.summary["duration"] * gauges["replicas"]
    encoding = gauges["encoding_time"] / busy if busy else 0.0
    waited = gauges["encoder_waiting_time"] / run.total
    if max(waited, encoding) < SHARE:
        return None
    advice = []
    if waited >= SHARE:
        tokens = max(run.engine.max_num_batched_tokens, run.advisor.spec.model.largest_image)
        sizes = {key: getattr(config, key) or tokens for key in KEYS}
        first, second = sorted(KEYS, key=lambda key: sizes[key])
        also = {f"engine.multimodal_config.{second}": max(sizes[second], MORE * sizes[first])}
        key = f"engine.multimodal_config.{first}"
        advice.append(turn(key, sizes[first], MORE * sizes[first], also))
    return Finding(
        max(waited, encoding),
        f"Encoding {items:,} images or clips takes {encoding:.0%} of the busy time; for "
        f"{waited:.0%} of their time requests compute less, or wait, for want of encoder budget or "
        "cache.",
        "p99_ttft_ms",
        [*advice, *run.advisor.replicas()],
        {"share_of_e2el": waited, "encoding_share": encoding, "encoded_items": items},
    )
