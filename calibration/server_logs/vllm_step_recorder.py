# mypy: ignore-errors
"""A scheduler plug-in for vLLM that writes down every step of a server.

Copy this file to where it runs, and start it so:

    HEADWAY_STEPS=steps.csv PYTHONPATH=. vllm serve MODEL \
        --scheduler-cls vllm_step_recorder.RecordedAsyncScheduler

(`RecordedScheduler` with `--no-async-scheduling`), then `headway calibrate --from-steps steps.csv
--scenario SCENARIO`. It decides nothing and imports vLLM alone; written for vLLM 0.33. A line is a
step: sequences that decode, the KV entries that they read, pieces of prompts as `cached+new`, and
the seconds from when the step was scheduled, or the step before it was over, to its tokens. With
data parallelism each engine writes to a file of its own.
"""

import os
import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Recorder:
    """Goes before a scheduler of vLLM's and sees what it schedules and when the tokens are back."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        path = os.environ.get("HEADWAY_STEPS", "headway-steps.csv")
        rank = self.vllm_config.parallel_config.data_parallel_rank
        root, kind = os.path.splitext(path)
        self._steps_file = open(f"{root}-{rank}{kind}" if rank else path, "w", buffering=1)  # noqa: SIM115
        self._steps_file.write("decodes,context,chunks,duration_s\n")
        self._steps_in_flight = {}  # by the number of what was scheduled: its line, its start
        self._steps_end = 0.0  # when the last tokens came back

    def schedule(self, *given, **named):
        start = time.perf_counter()
        output = super().schedule(*given, **named)
        decodes = context = 0
        chunks = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            cached = request.num_computed_tokens - count  # which counts what is scheduled now
            if cached >= request.num_prompt_tokens:
                decodes, context = decodes + 1, context + cached + count
            else:
                chunks.append(f"{cached}+{count}")
        if output.num_scheduled_tokens:
            line = f"{decodes},{context},{' '.join(chunks)}"
            self._steps_in_flight[id(output)] = line, start
        return output

    def update_from_output(self, scheduler_output, *given, **named):
        end = time.perf_counter()
        line, start = self._steps_in_flight.pop(id(scheduler_output), (None, 0.0))
        if line is not None:
            self._steps_file.write(f"{line},{end - max(start, self._steps_end):.7f}\n")
            self._steps_end = end
        return super().update_from_output(scheduler_output, *given, **named)


class RecordedScheduler(_Recorder, Scheduler):
    """vLLM's scheduler, and the file."""


class RecordedAsyncScheduler(_Recorder, AsyncScheduler):
    """The one that schedules ahead, and the file."""
