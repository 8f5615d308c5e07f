"""The worker of a KV connector in a recorded case: it copies nothing, and keeps its time."""

from collections.abc import Hashable, Iterable
from typing import Any

from headway.conformance.case_model import StepTime


class Transfers:
    """The connector's worker: it copies nothing, and says when it would have done.

    One link each way, jobs in turn. A load begins when it is decided, a store at the end of its
    step. Each outcome of a step tells of what is done by then. Where blocks are handed on while
    they are being stored the worker waits for the store; here nobody does.
    """

    def __init__(self, times: StepTime) -> None:
        self._times = times
        self._free = {"load": 0, "store": 0}  # ns, when each link is
        self._jobs: dict[Hashable, tuple[int, str]] = {}  # ns, when each ends, and who waits for it

    def send(self, way: str, jobs: Iterable[tuple[Hashable, int, str]], now: int) -> None:
        """Begin jobs: the key of each, its blocks, and who waits for it."""
        for key, blocks, name in jobs:
            took = blocks * getattr(self._times, f"{way}_block_ns")
            self._free[way] = max(self._free[way], now) + took
            self._jobs[key] = self._free[way], name

    def report(self, now: int) -> Any:
        """Tell of the jobs that are done."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        done = [number for number, (end, _) in self._jobs.items() if end <= now]
        loaded = {self._jobs.pop(number)[1] for number in done} - {""}
        told = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1))
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=told)
