"""What a run without tables sends to replicas that know nothing of each other."""

from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from simulator.core.request import Request
from simulator.engine.client import Chunk, ChunkSender, RequestReader
from simulator.engine.drive import no_garbage_collection
from simulator.scenario.engine_spec import EngineSpec
from simulator.simulation.independent import (
    REQUESTS_PER_TURN,
    Front,
    ReplicaGroup,
    ReplicaRequests,
    check_done,
    pod_members,
)
from simulator.simulation.setup import Progress
from simulator.workload.workload import Workload


class PodsClient(ChunkSender):
    """Feeds a workload to some pods of a fleet, chunk by chunk, and lets each go on by itself."""

    def __init__(
        self,
        group: ReplicaGroup,
        specs: Mapping[str, EngineSpec],
        chunks: Iterator[Workload],
        total: int,
        size: int,
    ) -> None:
        super().__init__(total, size)
        self.replicas = group.replicas(specs)
        self._pods, self._chunks, self._now = group.pods, chunks, 0.0
        pods = len(pod_members(group.scenario))
        self._front = Front(group.scenario.fleet.make_front(), pods)
        self._apart = len(group.pods) < pods  # the others are fed elsewhere
        for replica in self.replicas:
            replica.engine.on_finish = self._finished

    def _finished(self, request: Request) -> None:
        self.done += 1
        self.sent.chunks[request.id // self.sent.size].left -= 1

    def now(self) -> float:
        return self._now

    def drive(self, look: Progress) -> bool:
        """Go on to the end, telling `look` now and then; say whether it was broken off."""
        fed = 0
        try:
            with no_garbage_collection():
                for work in self._chunks:
                    fed += self._play(work, look)
                for replica in self.replicas:
                    replica.advance(packs=False)
        except KeyboardInterrupt:
            return True
        check_done(self.done, fed)
        return False

    def _play(self, work: Workload, look: Progress) -> int:
        """Let each replica go on for some requests of a chunk in turn; return how many it has."""
        self._number += 1
        parts = self._front.route(work, self._pods)
        self._take_in(work, parts)
        fed = self._chunk.left
        for replica, part in zip(self.replicas, parts, strict=True):
            replica.feed(part)
        times = np.sort(np.concatenate([part.times for part in parts]))
        turn = REQUESTS_PER_TURN * len(parts)
        for until in np.unique([*times[turn::turn], *times[-1:]]).tolist():
            for replica in self.replicas:
                replica.advance(until, packs=False)
            self._now = until
            look(until, self.done, self.sent.total)
        return fed

    def _take_in(self, work: Workload, parts: Sequence[ReplicaRequests]) -> None:
        """Keep what is sent from here of a chunk, to be measured when it has ended."""
        first, rows = self._number * self.sent.size, None
        if self._apart:
            rows = np.sort(np.concatenate([part.ids for part in parts])) - first
            work = work.part(rows)
        reader, sent = RequestReader(work), array("d", work.arrival)
        left, times = len(work), work.arrival
        self._chunk = Chunk(work, first, reader, sent, left=left, times=times, rows=rows)
        self.sent.chunks[self._number] = self._chunk
