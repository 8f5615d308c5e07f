"""The engine behind the simulator's seam: steps of the Scheduler, carried out and timed."""

import time
from dataclasses import replace

from gpu_backend.engine import Engine, Measured
from simulator.core.request import Request, Step
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.errors import HeadwayError

SPARE_ROWS = 64  # rows that may belong to requests that are over


class TorchExecutor:
    """Carries out the steps of one scheduler on an engine.

    It has no `leap`, so a replica runs every step by itself. `last` is what the step just
    executed took. Raises HeadwayError where scheduler and engine do not fit together.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        blocks = scheduler.blocks
        positions = engine.spec.max_position_embeddings
        wrong = []
        if scheduler.overlaps:
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
        self.decoding: list[Request] = []  # in the last step, where that was of decodes alone
        engine.reserve_host(scheduler.swap_space.free)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self.engine.device.type

    def execute(self, step: Step) -> float:
        """Carry out a step; give its seconds: on CPU those of CPU time, on CUDA of the wall."""
        done = self.measure(step)
        return done.busy_s if self.device == "cpu" else done.wall_s

    def measure(self, step: Step) -> Measured:
        """Carry out a step, its swaps first, and tell how long each part took."""
        engine = self.engine
        out = back = 0.0
        for swap in step.outgoing or ():
            out += engine.swap_out(swap.request, swap.blocks or [])
        for swap in step.incoming or ():
            back += engine.swap_in(swap.request, swap.blocks or [], swap.first)
        begun = time.thread_time()
        chunks = None if self._continues(step) else self.scheduler.running.listed(step)
        listing = time.thread_time() - begun
        done = engine.execute(chunks)
        self.last = replace(
            done,
            host_s=done.host_s + listing,
            wall_s=done.wall_s + listing + out + back,
            listing_s=listing,
            swap_out_s=out,
            swap_in_s=back,
            unique_ctx=self.scheduler.stored(step),
        )
        self._retire()
        return self.last

    def _continues(self, step: Step) -> bool:
        """Tell whether just those who decoded in the step before, all who run, decode on."""
        everybody = step.decodes - step.ghosts == self.scheduler.decodes.count
        alone = not (step.prefills or step.singles or step.incoming or step.ghosts)
        running = list(self.scheduler.running)
        before, self.decoding = self.decoding, []
        if alone and everybody and step.decodes == len(running):
            self.decoding = running
        return bool(self.decoding) and self.decoding == before

    def _retire(self) -> None:
        """Give up the rows of requests that are over, once they are many."""
        running, states = self.scheduler.running, self.engine.states
        if len(states) > 2 * (len(running) + len(self.scheduler.waiting)) + SPARE_ROWS:
            for request in states.requests:
                if request.finish >= 0 and request not in running:
                    self.engine.retire(request.id)
