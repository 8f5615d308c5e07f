"""A fleet whose images are encoded by replicas of their own, before their requests go to others.

As vLLM does it behind its proxy (disagg_epd_proxy.py): each image of a request is a request of its
own to an encoder (`ec_role: ec_producer`), of the image's tokens alone; once all are encoded the
request itself goes to a consumer, whose scheduler loads the outputs in place of encoding. What has
no images goes to a consumer at once.

An output leaves over its encoder's link, first encoded, first sent, and is then where all replicas
find it, as what ECExampleConnector has stored: a consumer loads it, and no encoder encodes it
again. An output that is on its way is not sent twice. An encoder's scheduler is vLLM's; its steps
take what they encode, no language model runs, and there are no KV blocks to run out of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nextafter

import simpy

from simulator.cluster.fleet import Sessions
from simulator.cluster.kv_links import Handoff, Link, PairedFleet
from simulator.cluster.routers import Router, Target
from simulator.core.alarm import Alarm
from simulator.core.executor import Executor
from simulator.core.log import REJECTED, UNFINISHED, pack_encoding
from simulator.core.request import Item, Media, Request, items_of
from simulator.schedulers.interface import SchedulerInterface


@dataclass(slots=True, eq=False)
class Encoding:
    """A request whose images are being encoded, or sent; times in s."""

    request: Request
    begin: float  # when it came
    encoding: int  # images that no encoder is done with
    missing: int  # images whose outputs are not there
    encoded: float = -1.0  # when the last was encoded


class EncoderFleet(PairedFleet):
    """Encoders and their consumers, behind a router each.

    `token_seconds` says, for each group of encoders, how long its link is busy with an encoder
    token; `latency` is the s that the last byte then takes. `encodings` has a row of log.ENCODING
    for each request that came to a consumer with outputs.
    """

    def __init__(
        self,
        env: simpy.Environment,
        router: Router,
        sessions: Sessions | None,
        *,
        to_encoders: Router,
        token_seconds: Mapping[str, float],
        latency: float = 0.0,
    ) -> None:
        # To the pair, who decodes are the producers: the router of requests is theirs.
        super().__init__(env, router, sessions, to_consumers=to_encoders, latency=latency)
        self.encodings = bytearray()
        self._token_seconds = token_seconds
        self._stored: set[Media] = set()
        self._coming: dict[Media, list[Encoding]] = {}  # whose outputs are on their way
        self._jobs: dict[int, Encoding] = {}  # by the job's id
        self._encodings: dict[int, Encoding] = {}  # by the request's id
        self._last_job = 0

    def add(
        self, group: str, scheduler: SchedulerInterface, executor: Executor, *, leap: bool = True
    ) -> Target:
        target = super().add(group, scheduler, executor, leap=leap)
        from simulator.features.images.images import encoder_of

        encoder = encoder_of(scheduler)
        encoder.stored = self._stored
        if group in self._token_seconds:
            of_link = self._token_seconds[group], self._latency, self._arrived
            self.links[target.index] = Link(self.env, *of_link)
            self.routers.consumers.add(target.index)
            encoder.alone = True
            self._kinds.setdefault(group, target.index)
        return target

    def _submit(self, request: Request) -> None:
        """Have a request's images encoded; send one without to a consumer."""
        items = items_of(request.segments)
        if self.has_no_replica:
            self._hold(request)
        elif not items:
            super()._submit(request)
        else:
            self._encode(request, items)

    def _encode(self, request: Request, items: Sequence[Item]) -> None:
        jobs = [self._job(request, item) for item in items]
        schedulers = [self.cores[index].scheduler for index in self._kinds.values()]
        if not all(scheduler.fits(job) for job in jobs for scheduler in schedulers):
            target = self.router.choose(request, self._session(request))
            self._assign(request, target)
            self.cores[target.index].record(request, REJECTED)
            return
        encoding = Encoding(request, self.env.now, len(jobs), len(jobs))
        self._encodings[request.id] = encoding
        self._at[request.id] = request, None
        for job in jobs:
            self._jobs[job.id] = encoding
            self._stamp_arrival(job)
            target = self.routers.to_consumers.choose(job, self._session(request))
            self._assign(job, target)
            self.engines[target.index].submit(job)

    def _job(self, request: Request, item: Item) -> Request:
        """Return what an encoder gets for an image; ids below 0 are no client's."""
        self._last_job -= 1
        size = item.end - item.start
        return Request(
            self._last_job,
            self.env.now,
            size,
            1,
            client=request.client,
            priority=request.priority,
            segments=((item.media, size),),
        )

    def _notify(self, target: Target, request: Request) -> None:
        """Send the output of what is encoded; all else goes to the client."""
        encoding = self._jobs.pop(request.id, None)
        if encoding is None:
            super()._notify(target, request)
            return
        encoding.encoding -= 1
        encoding.encoded = self.env.now
        ((media, size),) = request.segments or ()
        assert isinstance(media, Media)
        if media in self._stored:
            self._found(encoding)
        elif media in self._coming:
            self._coming[media].append(encoding)
        else:
            self._coming[media] = [encoding]
            self.links[target.index].put(Handoff(request, request, target, blocks=size))

    def _arrived(self, handoff: Handoff) -> None:
        ((media, _),) = handoff.job.segments or ()
        assert isinstance(media, Media)
        self._stored.add(media)
        for encoding in self._coming.pop(media):
            self._found(encoding)

    def _found(self, encoding: Encoding) -> None:
        """Send a request on whose outputs are all there.

        A moment later: at an instant that is under way other replicas' steps may have begun, and
        which have may depend on leaps.
        """
        encoding.missing -= 1
        if not encoding.missing:
            Alarm(self.env, partial(self._send_on, encoding)).set(nextafter(self.env.now, inf))

    def _send_on(self, encoding: Encoding, _: simpy.Event) -> None:
        request = encoding.request
        if self._encodings.get(request.id) is not encoding:
            return  # its client has let go of it
        del self._encodings[request.id]
        request.arrival = now = self.env.now
        self.encodings += pack_encoding(request.id, encoding.begin, encoding.encoded, now)
        super()._submit(request)

    def cancel(self, id: int) -> Request:
        """Drop a request; its images are encoded all the same."""
        self._encodings.pop(id, None)
        return super().cancel(id)

    def abandon(self) -> None:
        super().abandon()
        first = next(core for number, core in enumerate(self.cores) if number not in self.links)
        for encoding in self._encodings.values():
            first.record(encoding.request, UNFINISHED)

    def forget_jobs(self) -> None:
        """Leave the rows of jobs, which are nobody's requests, out of the encoders' logs."""
        for number in self.links:
            log = self.cores[number].log
            log.request_rows.clear()
            log.run_rows.clear()
