"""A data-parallel server: several engine cores behind one address, as `vllm serve -dp N` runs them.

Each rank has a scheduler and a KV cache of its own. To the fleet and its router it is one target.

Ranks of a dense model go their own ways. Those of a model with experts step together: the experts
of a layer are spread over the GPUs of all ranks, so every forward pass of one needs all others. A
step of the server takes as long as its slowest rank, and ranks without work run a dummy batch
meanwhile (`DPEngineCoreProc.run_busy_loop`, vLLM 0.33). A dummy batch of one token is never the
slowest. vLLM goes on with dummy batches for up to 32 steps after the last request, to agree that
there is none; here the server rests at once. With asynchronous scheduling each rank decides its
next batch when the joint step before it begins; where it has nothing to compute then, it has a
dummy batch in that step.

With `prefill_schedule_interval` ranks in lock-step carry prefill in the same joint steps, of which
the number divides by it. The number counts dummy batches, and begins anew where the server rests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf
from random import Random

import simpy

from simulator.core.alarm import Alarm
from simulator.core.log import REJECTED
from simulator.core.request import Request
from simulator.costs.cost_model import JointStep
from simulator.engine.core import EngineCore, ExecutedStep, InFlight, SchedulerStats
from simulator.engine.loop import EngineLoop, Timer
from simulator.schedulers.interface import SchedulerInterface

JointlyScheduled = dict[EngineCore, ExecutedStep]
"""The steps of a joint step, by rank; who is missing runs a dummy batch."""
BALANCES_SINCE = (0, 27)
"""vLLM's version from which on it balances as `Balancer`, to its month: August 2026."""
INTERVAL = 0.1
"""s between two publications of the counts, while there are requests (vLLM's coordinator)."""

Counts = tuple[int, int, float]
"""Of a rank: requests waiting, requests running, share of the KV cache in use."""


@dataclass(slots=True)
class FrontEnd:
    """One API server, and what it knows."""

    start: int  # where its next look begins
    inflight: list[int]  # its own requests at each rank
    published: list[Counts]  # as published last
    since: list[int]  # counted as waiting since then, by rank

    def choose(self, front_ends: int) -> int:
        """Choose a rank for a request, and count it there."""
        count = len(self.published)
        chosen, least = 0, inf
        for step in range(count):
            rank = (self.start + step) % count
            waiting, running, usage = self.published[rank]
            waiting += self.since[rank]
            score: float = max(front_ends * self.inflight[rank], waiting + running)
            if waiting and usage > 0.5:
                score += waiting * 6.0 * (usage - 0.5)
            if score < least:
                chosen, least = rank, score
        self.since[chosen] += front_ends
        self.inflight[chosen] += 1
        self.start = (self.start + 1) % count
        return chosen


class Balancer:
    """vLLM's internal load balancer: which engine core of a data-parallel server gets a request.

    As `DPLBAsyncMPClient.get_core_engine_for_request` in vLLM 0.33 (since pull request 49204, July
    2026; before it the score was waiting x 4 + running). Each front end (API server) counts exactly
    what it has in flight at each rank; of the others' requests it knows what the coordinator
    published last, up to `INTERVAL` ago, and what it has sent itself since. It takes the rank with
    the smallest

        max(front ends x in flight, waiting + running) + 6 waiting max(0, share of KV in use - 0.5)

    and of equals the first from a place that goes on by one with every request.

    Which of the `front_ends` a request comes to is drawn evenly from `random`, as the kernel deals
    connections out to processes that listen at one port.
    """

    def __init__(self, ranks: int, front_ends: int, random: Random) -> None:
        self._ranks = ranks
        self._count = front_ends
        self._random = random
        self._sent: dict[int, tuple[FrontEnd, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew, without requests."""
        none: Counts = (0, 0, 0.0)
        zeros = [0] * self._ranks
        self._fronts = [
            FrontEnd(self._ranks * k // self._count, [*zeros], [none] * self._ranks, [*zeros])
            for k in range(self._count)
        ]
        self._sent.clear()

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._sent)

    def send(self, id: int) -> int:
        """Choose the rank that a request goes to."""
        front = self._fronts[int(self._random.random() * self._count) if self._count > 1 else 0]
        rank = front.choose(self._count)
        self._sent[id] = front, rank
        return rank

    def left(self, id: int) -> int:
        """Take note that a request is no longer in flight; give the rank where it was."""
        front, rank = self._sent.pop(id)
        front.inflight[rank] -= 1
        return rank

    def publish(self, counts: Sequence[Counts]) -> None:
        """Tell all front ends how many wait and run at each rank, and how full it is."""
        for front in self._fronts:
            front.published = [*counts]
            front.since = [0] * self._ranks


class Rank(EngineCore):
    """An engine core beside others. A class of its own, as a live engine listens to each object."""


class LockStepLoop(EngineLoop):
    """Lets ranks step together; `joint` makes a step of all out of what each does for itself."""

    def __init__(
        self,
        env: simpy.Environment,
        cores: Sequence[EngineCore],
        joint: JointStep,
        timer: Callable[[EngineLoop], Timer],
    ) -> None:
        super().__init__(env, cores, timer=timer)
        self._joint = joint
        self.step_counter = 0  # joint steps since a request came to ranks that all rested

    def begin(self, now: float, start: float) -> InFlight | None:
        """Let all ranks schedule their next steps, now; None: none has anything to do."""
        cores = self.cores
        for core in cores:
            interval = getattr(core.scheduler, "prefill_interval", None)  # vLLM's
            if interval is not None and len(cores) > 1:
                interval.joint_steps = self.step_counter
        found = ((core, core.schedule(now)) for core in cores)
        scheduled = {core: step for core, step in found if step is not None}
        present = scheduled or any(max(core.stats()[:2]) for core in cores)
        self.step_counter = self.step_counter + 1 if present else 0
        if not scheduled:
            return None
        repeats = min(core.repeats(scheduled.get(core)) for core in cores)
        steps = [step for step, _ in scheduled.values()]
        tokens = [scheduled[core][0].tokens if core in scheduled else 0 for core in cores]
        seconds, timings = self._joint.execute(cores[0].executor, steps, tokens, repeats)
        ends = list(accumulate(seconds, initial=start))[1:]
        own = zip(scheduled.items(), timings, strict=True)
        return InFlight({core: (*step, timing) for (core, step), timing in own}, now, start, ends)

    def commit(
        self, scheduled: JointlyScheduled, decided: float, start: float, ends: list[float]
    ) -> None:
        """Take in the outcome of a joint step and its repeats, which ended at `ends`, s."""
        for core, step in scheduled.items():
            core.commit(step, decided, start, ends)
        if self.batch_queue_size == 1:
            self.step_counter += len(ends) - 1

    def repeat(self, scheduled: JointlyScheduled, times: int) -> None:
        """Let the joint step just scheduled be scheduled so many times more."""
        for core in scheduled:
            core.scheduler.repeat(times)
        self.step_counter += times

    def crash(self, *schedulers: SchedulerInterface) -> list[Request]:
        lost = super().crash(*schedulers)
        self.step_counter = 0
        return lost

    def computes(self, core: EngineCore) -> bool:
        """Say whether a rank has work in the last joint step in flight."""
        return bool(self.batch_queue) and core in self.batch_queue[-1].scheduled


class DataParallelServer:
    """Ranks behind a balancer, on one loop where they go in lock-step, else on one each.

    `on_finish(request)` is called as that of a replica is.
    """

    def __init__(
        self, env: simpy.Environment, loops: Sequence[EngineLoop], balancer: Balancer
    ) -> None:
        self.env = env
        self.loops = loops
        self.cores = [core for loop in loops for core in loop.cores]
        self.on_finish: Callable[[Request], None] | None = None
        self._balancer = balancer
        self._alarm = Alarm(env, self._publish)
        self._publishes = False
        for core in self.cores:
            core.on_finish = self._end

    def submit(self, request: Request) -> None:
        """Send a request to the rank that the balancer chooses."""
        first = self.cores[0]
        if first.door is not None:
            self.catch_up()
        if first.keeps_out(request):  # before a rank is chosen
            first.log.record(request, REJECTED, 0, -1.0)
            self._tell(request)
            return
        if not self._publishes:
            self._publishes = True
            self._alarm.set(self.env.now + INTERVAL)
        self.cores[self._balancer.send(request.id)].submit(request)

    def cancel(self, request: Request) -> None:
        """Let a request go at the end of the step in flight."""
        self.cores[self._balancer.left(request.id)].cancel(request)

    def catch_up(self) -> None:
        """Take in steps that ended before now."""
        for loop in self.loops:
            loop.catch_up()

    def crash(self, *schedulers: SchedulerInterface) -> list[Request]:
        """Lose all ranks and their requests, which are returned; go on with other schedulers."""
        new, lost = iter(schedulers), []
        for loop in self.loops:
            lost += loop.crash(*islice(new, len(loop.cores)))
        self._balancer.reset()
        return lost

    def _end(self, request: Request) -> None:
        self._balancer.left(request.id)
        self._tell(request)

    def _tell(self, request: Request) -> None:
        if self.on_finish is not None:
            self.on_finish(request)

    def _publish(self, _: simpy.Event) -> None:
        """Tell the front ends what the ranks have to do; a request on its way counts as waiting."""
        counts = []
        for core in self.cores:
            stats, usable = core.stats(), core.scheduler.blocks.usable
            counts.append((stats.waiting, stats.running, stats.blocks_used / usable))
        self._balancer.publish(counts)
        self._publishes = self._balancer.busy
        if self._publishes:
            self._alarm.set(self.env.now + INTERVAL)

    def stats(self) -> SchedulerStats:
        """Add up what the ranks have; see `EngineCore.stats`."""
        return SchedulerStats(*map(sum, zip(*(core.stats() for core in self.cores), strict=True)))
