"""Host memory for the KV blocks of preempted requests: what leaves a step, what comes back."""

from simulator.request import Request, Step, Swap


class HostMemory:
    """Room for so many KV blocks. Whether blocks have names or not, their numbers decide."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = num_blocks
        self._block_size = block_size
        self.leaving: list[Swap] = []  # of the step being decided

    def save(self, request: Request, tokens: int) -> None:
        """Have the blocks with a request's first `tokens` copied to the host, if they fit there."""
        count = -(-tokens // self._block_size)
        if 0 < count <= self.free:
            self.free -= count
            request.swapped = tokens
            names = None if request.blocks is None else request.blocks[:count]
            self.leaving.append(Swap(request, count, 0, names))

    def send(self, step: Step) -> None:
        """Let a step carry out what has been saved."""
        step.outgoing, self.leaving = self.leaving, []

    def restore(self, step: Step, request: Request, hits: int) -> None:
        """Have a request's blocks copied back by `step`, but its first `hits`: those were found.

        The request has its new blocks already.
        """
        count = -(-request.swapped // self._block_size)
        request.swapped = 0
        self.free += count
        first = min(hits, count)
        names = None if request.blocks is None else request.blocks[first:count]
        if step.incoming is None:
            step.incoming = []
        step.incoming.append(Swap(request, count - first, first, names))
