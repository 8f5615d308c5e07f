"""What the diagnosis says of encoders."""

from types import SimpleNamespace
from typing import Any

import pytest

from simulator.diagnosis.encoder import encoder


@pytest.mark.parametrize(
    ("waited", "end"),
    [
        (0.0, "takes 20% of the busy time."),
        (3.0, "; requests wait 30% of their time for the encoder's budget or cache."),
    ],
)
def test_waits_for_the_encoder_are_said_where_there_are_some(waited: float, end: str) -> None:
    sizes = SimpleNamespace(max_num_encoder_input_tokens=64, encoder_cache_size=64)
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(multimodal_config=sizes, max_num_batched_tokens=64),
        record=SimpleNamespace(cluster=None),
        gauges={
            "gpu_busy_fraction": 1.0,
            "replicas": 1,
            "encoded_items": 4,
            "encoding_time": 2.0,
            "encoder_waiting_time": waited,
        },
        summary={"duration": 10.0},
        total=10.0,
        advisor=SimpleNamespace(
            replicas=list,
            key=str,
            spec=SimpleNamespace(model=SimpleNamespace(largest_image=0)),
        ),
    )
    found = encoder(run)
    assert found is not None
    assert found.text.endswith(end)
