"""Headway's policies in the real vLLM: `--scheduler-cls headway_vllm.HeadwayScheduler`.

    HEADWAY_POLICY='{"policy": "sjf", "by": "hint", "ageing": 20}' \\
        vllm serve MODEL --scheduler-cls headway_vllm.HeadwayScheduler

Nothing of vLLM is imported before one of its classes is asked for. It may import `simulator`, which
does not know it. Start with `scheduler.py`.
"""

from typing import Any

from headway_vllm.policy import CLASSES


def __getattr__(name: str) -> Any:
    """Return a scheduler class; HeadwayError where there is no vLLM that it fits."""
    if name not in CLASSES:
        raise AttributeError(f"module 'headway_vllm' has no attribute {name!r}")
    from headway_vllm.scheduler import scheduler_class

    return scheduler_class(name)
