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
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import simpy

from simulator.cluster.load_balancer import INTERVAL, Balancer
from simulator.core.alarm import Alarm
from simulator.core.request import Request
from simulator.costs.data_parallel import JointStep
from simulator.engine.core import EngineCore, ScheduledStep
from simulator.engine.loop import EngineLoop, InFlight, Timer
from simulator.schedulers.vllm.scheduler import Scheduler

JointlyScheduled = dict[EngineCore, ScheduledStep]
"""The steps of a joint step, by rank; who is missing runs a dummy batch."""


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

    def begin(self, now: float, start: float) -> InFlight | None:
        """Let all ranks schedule their next steps, now; None: none has anything to do."""
        cores = self.cores
        found = ((core, core.schedule(now)) for core in cores)
        scheduled = {core: step for core, step in found if step is not None}
        if not scheduled:
            return None
        repeats = min(core.repeats(scheduled.get(core)) for core in cores)
        steps = [step for step, _ in scheduled.values()]
        tokens = [scheduled[core][0].tokens if core in scheduled else 0 for core in cores]
        seconds = self._joint.seconds(cores[0].executor, steps, tokens, repeats)
        return scheduled, now, start, list(accumulate(seconds, initial=start))[1:]

    def commit(
        self, scheduled: JointlyScheduled, decided: float, start: float, ends: Sequence[float]
    ) -> None:
        """Take in the outcome of a joint step and its repeats, which ended at `ends`, s."""
        for core, step in scheduled.items():
            core.commit(step, decided, start, ends)

    def repeat(self, scheduled: JointlyScheduled, times: int) -> None:
        """Let the joint step just scheduled be scheduled so many times more."""
        for core in scheduled:
            core.scheduler.repeat(times)

    def computes(self, core: EngineCore) -> bool:
        """Say whether a rank has work in the last joint step in flight."""
        return bool(self.batch_queue) and core in self.batch_queue[-1][0]


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
        """Give a request to the rank that the balancer chooses."""
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

    def crash(self, *schedulers: Scheduler) -> list[Request]:
        """Lose all ranks and their requests, which are returned; go on with other schedulers."""
        new, lost = iter(schedulers), []
        for loop in self.loops:
            lost += loop.crash(*islice(new, len(loop.cores)))
        self._balancer.reset()
        return lost

    def _end(self, request: Request) -> None:
        self._balancer.left(request.id)
        if self.on_finish is not None:
            self.on_finish(request)

    def _publish(self, _: simpy.Event) -> None:
        """Tell the front ends what the ranks have to do; a request on its way counts as waiting."""
        self._balancer.publish(
            [
                (
                    core.queued,
                    len(core.scheduler.running),
                    core.blocks_used / core.scheduler.blocks.usable,
                )
                for core in self.cores
            ]
        )
        self._publishes = self._balancer.busy
        if self._publishes:
            self._alarm.set(self.env.now + INTERVAL)

    @property
    def queued(self) -> int:
        """Requests that wait, at all ranks."""
        return sum(core.queued for core in self.cores)

    @property
    def used(self) -> int:
        """KV blocks in use at all ranks, between two steps."""
        return sum(core.used for core in self.cores)

    @property
    def blocks_used(self) -> int:
        """KV blocks in use before anything happens at this instant, also within a leap."""
        return sum(core.blocks_used for core in self.cores)
