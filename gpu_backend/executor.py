"""The engine behind the simulator's seam: steps of the Scheduler, carried out and timed."""

import time

from gpu_backend.engine import Engine, Measured
from simulator.core.executor import Timing
from simulator.core.request import Step
from simulator.schedulers.interface import SchedulerInterface
from simulator.util.errors import HeadwayError

SPARE_ROWS = 64  # rows that may belong to requests that are over
NOBODY = (-1, 0)


class TorchExecutor:
    """Carries out the steps of one scheduler on an engine.

    It has no `leap`, so a replica runs every step by itself. `last` is what the step just
    executed took. Raises HeadwayError where scheduler and engine do not fit together.
    """

    def __init__(self, engine: Engine, scheduler: SchedulerInterface) -> None:
        blocks = scheduler.blocks
        positions = engine.spec.max_position_embeddings
        wrong = []
        if scheduler.traits.overlaps:
            wrong.append(
                "engine.async_scheduling: the engine ends a step before the next; set false, "
                "or engine.name to textbook"
            )
        if not blocks.names_blocks:
            wrong.append("engine.allocation: a live run needs paged allocation and named blocks")
        if blocks.block_size != engine.block_size:
            wrong.append(f"engine.block_size: {blocks.block_size}, not {engine.block_size}")
        if blocks.usable >= engine.num_blocks:
            wrong.append(
                f"engine.num_gpu_blocks_override: {blocks.usable + 1} blocks, but the engine has "
                f"{engine.num_blocks}"
            )
        if scheduler.max_model_len > positions:
            wrong.append(
                f"engine.max_model_len: {scheduler.max_model_len} is more than the {positions} "
                f"positions of {engine.spec.name}"
            )
        if wrong:
            raise HeadwayError(wrong)
        self.engine = engine
        self.scheduler = scheduler
        self.last = Measured(0.0, 0.0, 0.0)
        self.decoding = NOBODY
        """Admissions so far and who runs, where the last step was of decodes alone."""
        engine.reserve_host(scheduler.swap_space.free)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.engine.device.type

    def execute(self, step: Step) -> Timing:
        """Carry out a step; give its seconds: on CPU those of CPU time, on CUDA of the wall."""
        done = self.measure(step)
        return Timing(done.busy_s if self.device == "cpu" else done.wall_s)

    def measure(self, step: Step) -> Measured:
        """Carry out a step, its swaps first, and tell how long each part took."""
        engine = self.engine
        out = back = 0.0
        for swap in step.outgoing or ():
            out += engine.swap_out(swap.request, swap.blocks or [])
        for swap in step.incoming or ():
            back += engine.swap_in(swap.request, swap.blocks or [], swap.first)
        begun = time.thread_time()
        if self._continues(step):
            listing = time.thread_time() - begun
            done = engine.execute(None)
        else:
            running = self.scheduler.running
            chunks = [*step.prefills, *(step.singles or ())]
            decoding = running.members() if step.decodes else []
            listing = time.thread_time() - begun
            done = engine.execute(chunks, decoding)
        over = time.thread_time()
        done.swap_out_s, done.swap_in_s = out, back
        done.unique_ctx = self.scheduler.stored(step)
        self._retire()
        done.listing_s = listing + time.thread_time() - over
        done.host_s += done.listing_s
        done.wall_s += done.listing_s + out + back
        self.last = done
        return done

    def _continues(self, step: Step) -> bool:
        """Return whether just those who decoded in the step before, all who run, decode on.

        They do where as many run as before and nobody was admitted since: nobody is looked at.
        """
        running = self.scheduler.running
        before, self.decoding = self.decoding, NOBODY
        alone = not (step.prefills or step.singles or step.incoming or step.ghosts)
        if alone and step.decodes == self.scheduler.decodes.count == len(running):
            self.decoding = running.admissions, len(running)
        return self.decoding is not NOBODY and self.decoding == before

    def _retire(self) -> None:
        """Free the rows of requests that are over, once they are many."""
        running, states = self.scheduler.running, self.engine.states
        if len(states) > 2 * (len(running) + len(self.scheduler.waiting)) + SPARE_ROWS:
            for request in states.requests:
                if request.finish >= 0 and request not in running:
                    self.engine.retire(request.id)
