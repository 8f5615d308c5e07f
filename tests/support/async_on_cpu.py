"""vLLM's asynchronous scheduling on a CPU, where its platform turns it off.

The engine core alone has it. The workers stay synchronous: they have been started when the
scheduler is made, and compute one batch after the other either way.
"""

from typing import Any

from headway.vllm import RecordedScheduler


class AsynchronousScheduler(RecordedScheduler):  # type: ignore[misc, valid-type]
    """The recorded scheduler of an engine with two batches in flight."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **options)
