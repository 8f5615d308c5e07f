"""Headway's policies in the real vLLM: `--scheduler-cls headway.vllm.HeadwayScheduler`.

    HEADWAY_POLICY='{"policy": "sjf", "by": "hint", "ageing": 20}' \\
        vllm serve MODEL --scheduler-cls headway.vllm.HeadwayScheduler
    HEADWAY_STEPS=steps.jsonl vllm serve MODEL --scheduler-cls headway.vllm.RecordedScheduler

Nothing of vLLM is imported before one of its classes is asked for, and a record needs none of the
packages that a policy needs. It may import `simulator`, which finds `assemble_installed.py` by an
entry point and knows nothing else of it. Start with `scheduler.py`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a scheduler class; HeadwayError where there is no vLLM that it fits."""
    if name == "RecordedScheduler":
        from headway.vllm.recorded import RecordedScheduler

        return RecordedScheduler
    if not name.startswith("_"):
        from headway.vllm.policy import CLASSES

        if name in CLASSES:
            from headway.vllm.scheduler import scheduler_class

            return scheduler_class(name)
    raise AttributeError(f"module 'headway.vllm' has no attribute {name!r}")
