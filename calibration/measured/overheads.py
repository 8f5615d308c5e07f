"""What an engine adds to its kernels, by its version: one model for all runs of a version.

The figures were fitted to the runs that docs/accuracy.md names, a few per version and none per
run. Physics: the GPU waits for the host between steps (more, the more sequences there are), unless
the host works ahead; then no step is faster than the host. A step with prompts runs without the
CUDA graph of a whole decode step, so that its layers are launched one after the other.
"""

from dataclasses import dataclass

from calibration.measured.engine import schedules_asynchronously, version
from calibration.measured.runs import Run
from simulator.workload import Frontend


@dataclass(frozen=True)
class Overhead:
    """Seconds outside of the kernels."""

    step: float  # the GPU waits for these in every step
    per_sequence: float = 0.0  # and for these, for each sequence in it
    host: float = 0.0  # no step is shorter than the host's work on it
    host_per_sequence: float = 0.0


SYNC = Overhead(step=0.75e-3, per_sequence=20e-6)
"""vLLM V1 that schedules a step when the one before has ended, the default up to 0.13."""
FIRST_ASYNC = Overhead(step=0.5e-3, host=5.5e-3, host_per_sequence=70e-6)
"""--async-scheduling before 0.14."""
ASYNC = Overhead(step=1.0e-3, per_sequence=10e-6)
"""From 0.14 on, where it is the default."""

LAYER_LAUNCH = 30e-6
"""Seconds per layer that a step with prompts takes longer: Llama-2-7B on H100 (vLLM 0.11) needs
7.4 ms for a prompt of 7 tokens, 6.3 ms for a decode."""
FLASHINFER_LAUNCH = 350e-6
"""The same on B200, whose attention is FlashInfer: by the server's polls every prompt that starts
costs vLLM 0.15 23 to 35 ms of an 80-layer model, beside its tokens."""

SPLIT_SINCE = (0, 14)
KEY_SECONDS = 16.4e-9
"""Per layer and key of the longest sequence, on B200 with vLLM 0.15: 1.31 ms of a step for every
1,000 tokens, by the polls of a server with 64 conversations."""
THREAD_BLOCKS = 4  # per multiprocessor, among which decode attention splits its sequences
MULTIPROCESSORS = 148  # of a B200

SERVER = Frontend(latency=1.8e-3)
"""From the stamp of arrival in the server to the scheduler, and from a token to its stamp: vLLM
0.11's spans, TTFT less queue and prefill, where no step is in the way."""
CLIENT = Frontend(latency=6e-3, per_request=2e-3, per_token=2e-6)
"""The same from a client's point of view: HTTP, and the tokenizer of one API server."""


def overhead(run: Run) -> Overhead:
    """Give the overhead of a run's engine."""
    if not schedules_asynchronously(run):
        return SYNC
    return ASYNC if version(run.word("engine_version")) >= SPLIT_SINCE else FIRST_ASYNC


def frontend(run: Run) -> Frontend:
    """Give what a run's requests pass before the scheduler, by who took the times."""
    return CLIENT if run.word("clock").lower().startswith("client") else SERVER
