"""Hypothesis strategies for what may befall a fleet."""

from collections.abc import Sequence

from hypothesis import strategies as st

from simulator.cluster.config import AutoscalingConfig, FailuresConfig, OutageConfig

STARTS = (0.0, 0.5, 0.75, 1.0, 1.5, 2.5)


def failing(
    replicas: st.SearchStrategy[int], mtbf: Sequence[float | None]
) -> st.SearchStrategy[FailuresConfig]:
    """Failures by chance, after one of these mean times, and up to three that are listed."""
    outage = st.builds(
        OutageConfig,
        replica=replicas,
        start=st.sampled_from(STARTS),
        duration=st.sampled_from([0.5, 1.3]),
    )
    return st.builds(
        FailuresConfig,
        mtbf=st.sampled_from(mtbf),
        mttr=st.just(2.0),
        outages=st.lists(outage, max_size=3),
    )


scaling = st.builds(
    AutoscalingConfig,
    metric=st.sampled_from(["queue_depth", "kv_usage"]),
    target=st.just(0.3),
    max_replicas=st.just(3),
    interval=st.just(0.7),
    cooldown=st.sampled_from([0.0, 2.0]),
    startup_delay=st.sampled_from([0.0, 0.9]),
)
