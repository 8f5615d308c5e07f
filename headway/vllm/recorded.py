"""vLLM's scheduler as it is, with a record of every step: `headway.vllm.RecordedScheduler`.

    HEADWAY_STEPS=steps.jsonl vllm serve MODEL --scheduler-cls headway.vllm.RecordedScheduler

It decides nothing. Headway's scheduler with a policy is one, too, and records where HEADWAY_STEPS
names a file. With data parallelism each engine writes to a file of its own. Beside vLLM it needs
none of the packages that Headway depends on: `pip install --no-deps`.
"""

import os
from pathlib import Path
from typing import Any

from headway.vllm.interface import check_vllm, has
from headway.vllm.steps import LiveVllm

RELEASE = check_vllm("headway.vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.request_queue import SchedulingPolicy  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

__all__ = ["RELEASE", "RecordedScheduler", "RequestStatus", "SchedulingPolicy"]

VARIABLE = "HEADWAY_STEPS"


class RecordedScheduler(AsyncScheduler):
    """vLLM's scheduler, asynchronous or not as `async_scheduling` says.

    It must be a subclass of the asynchronous one: vLLM turns that off for others.
    """

    steps_file: str | None = "headway-steps.jsonl"
    """Where HEADWAY_STEPS is not set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asynchronous = bool(self.scheduler_config.async_scheduling)
        path = os.environ.get(VARIABLE) or self.steps_file
        if path:
            rank = self.vllm_config.parallel_config.data_parallel_rank
            file = Path(path)
            LiveVllm(self, file.with_stem(f"{file.stem}-{rank}") if rank else file)

    def _update_after_schedule(self, output: Any) -> None:
        if self._asynchronous:
            super()._update_after_schedule(output)
        else:
            Scheduler._update_after_schedule(self, output)

    if not has(RELEASE, "one_update_with_output"):

        def _update_request_with_output(self, *args: Any, **options: Any) -> Any:
            if self._asynchronous:
                return super()._update_request_with_output(*args, **options)
            return Scheduler._update_request_with_output(self, *args, **options)
