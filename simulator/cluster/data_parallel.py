"""A data-parallel server: several engine cores behind one door, as `vllm serve -dp N` runs them.

Each rank has a scheduler and a KV cache of its own. To the fleet and its router it is one target.
"""

from collections.abc import Callable, Sequence

import simpy

from simulator.cluster.load_balancer import INTERVAL, Balancer
from simulator.cluster.members import Member
from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.schedulers.vllm.scheduler import Scheduler


class Ranks:
    """Engine cores that go their own ways: a dense model's.

    `on_finish(request)` is called as that of a replica is.
    """

    def __init__(
        self, env: simpy.Environment, members: Sequence[Member], balancer: Balancer
    ) -> None:
        self.env = env
        self.members = members
        self.on_finish: Callable[[Request], None] | None = None
        self._balancer = balancer
        self._alarm = Alarm(env, self._publish)
        self._publishes = False
        for member in members:
            member.on_finish = self._end

    def submit(self, request: Request) -> None:
        """Give a request to the rank that the balancer chooses."""
        if not self._publishes:
            self._publishes = True
            self._alarm.set(self.env.now + INTERVAL)
        self.members[self._balancer.send(request.id)].submit(request)

    def cancel(self, request: Request) -> None:
        """Let a request go at the end of the step in flight."""
        self.members[self._balancer.left(request.id)].cancel(request)

    def crash(self, *schedulers: Scheduler) -> list[Request]:
        """Lose all ranks and their requests, which are returned; go on with other engines."""
        lost = []
        for member, scheduler in zip(self.members, schedulers, strict=True):
            lost += member.crash(scheduler)
        self._balancer.reset()
        return lost

    def _end(self, request: Request) -> None:
        self._balancer.left(request.id)
        if self.on_finish is not None:
            self.on_finish(request)

    def _publish(self, _: simpy.Event) -> None:
        """Tell the front ends what the ranks have to do; a request on its way counts as waiting."""
        now = self.env.now
        self._balancer.publish(
            [
                (member.queued, len(member.scheduler.running), member.blocks_used(now) / usable)
                for member in self.members
                for usable in (member.scheduler.blocks.usable,)
            ]
        )
        self._publishes = self._balancer.busy
        if self._publishes:
            self._alarm.set(now + INTERVAL)

    @property
    def queued(self) -> int:
        """Requests that wait, at all ranks."""
        return sum(member.queued for member in self.members)

    @property
    def used(self) -> int:
        """KV blocks in use at all ranks, between two steps."""
        return sum(member.used for member in self.members)

    def blocks_used(self, now: float) -> int:
        """Count the KV blocks in use before anything happens at `now`, also within a leap."""
        return sum(member.blocks_used(now) for member in self.members)
