"""How many tokens those who decode may still say, without asking each of them."""

from collections.abc import Callable
from heapq import heappop, heappush

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request


class Unsaid(DecodeSet):
    """A decode set that adds up what its members may still say, at most `most` tokens of each.

    `allowed(request)` is the most that a request may say in all. What a member has left falls by
    one a tick, once it is `most` or less: so those who are near their end are a sum and a count,
    and of the others a heap tells who comes near next.
    """

    def __init__(
        self, block_size: int, by_phase: bool, allowed: Callable[[Request], int], most: int
    ) -> None:
        super().__init__(block_size, by_phase)
        self._allowed, self._most = allowed, most
        self._all_said: dict[Request, int] = {}  # the tick at which a member has said all it may
        self._far: list[tuple[int, int, Request]] = []  # (end, seat, request), a heap
        self._near: dict[Request, None] = {}
        self._sum = 0  # of the ends of those near

    def join(self, request: Request, ticks: int) -> None:
        super().join(request, ticks)
        end = self._all_said[request] = self.tick + self._allowed(request) - request.generated
        heappush(self._far, (end, request.admission, request))

    def leave(self, request: Request) -> int:
        end = self._all_said.pop(request)
        if request in self._near:
            del self._near[request]
            self._sum -= end
        return super().leave(request)

    def unsaid(self) -> int:
        """Add up the tokens that the members may still say."""
        far, near = self._far, self._near
        while far and far[0][0] - self.tick <= self._most:
            end, _, request = heappop(far)
            if self._all_said.get(request) == end and request not in near:  # else it has left since
                near[request] = None
                self._sum += end
        return self._sum - len(near) * self.tick + (self.count - len(near)) * self._most
