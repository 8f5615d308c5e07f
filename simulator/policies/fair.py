"""Fair policies: a queue for each client (`client_queues.py`), and whose turn it is."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from simulator.core.request import Request
from simulator.policies.client_queues import MOST, Account, ClientQueues
from simulator.util.from_mapping import refuse

if TYPE_CHECKING:
    from simulator.schedulers.vllm.batch import Batch

ROUNDING = 1e-15  # of a client's books, relative


class Fair(ClientQueues):
    """Virtual Token Counter: the client that has received the least goes first.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, and the
    weights of its section 4.3: a counter per client holds its service divided by its weight. When
    a client comes to wait that had no request waiting, its counter is lifted to the smallest of
    those who wait, or where nobody waits to that of the last who did, so that nobody saves up
    credit. Equal counters go by arrival. What waits is looked at before each step; the paper has
    no preemption.
    """

    def queue(self, batch: "Batch") -> "ClientQueues":
        self.last: Account | None = None  # the last to leave the queue
        return super().queue(batch)

    def counter(self, account: Account) -> float:
        """Give a client's virtual token counter."""
        return account.level + self.service(account) / account.weight

    def _enter(self, account: Account) -> None:
        own = self.counter(account)
        if self.active:
            floor = min(map(self.counter, self.active))
        elif self.last is not None:
            floor = self.counter(self.last)
        else:
            return
        if floor > own:
            account.level += floor - own

    def _pick(self) -> Account:
        return min(self.active, key=lambda a: (self.counter(a), a.waiting[0].arrival))

    def _leave(self, account: Account) -> None:
        super()._leave(account)
        self.last = account


class WFQ(ClientQueues):
    """Weighted fair queueing by virtual finish times, self-clocked.

    Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994: a
    request's finish is its client's virtual time plus its cost divided by the client's weight, the
    smallest finish goes first, and a client that comes to wait starts no earlier than the finish
    that was served last. The cost that is known is that of the prompt; what the answer costs is
    added to the client's virtual time as it comes. For each second that a request waits its
    finish is `boost` tokens sooner, so that no weight starves anybody; 0 is the textbook.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        boost: float = 0.0,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        super().__init__(weights=weights, input_weight=input_weight, output_weight=output_weight)
        refuse((not 0 <= boost <= MOST, f"boost: must be from 0 to {MOST:g}, not {boost}"))
        self.boost = boost

    def queue(self, batch: "Batch") -> "ClientQueues":
        self.virtual = 0.0  # the finish served last
        return super().queue(batch)

    def finish(self, account: Account) -> float:
        """Give the virtual finish time of a client's first request."""
        spent = self.service(account) + self._cost(account.waiting[0])
        return account.level + spent / account.weight

    def _enter(self, account: Account) -> None:
        start = account.level + self.service(account) / account.weight
        if self.virtual > start:
            account.level += self.virtual - start

    def _pick(self) -> Account:
        # All boosts grow alike, so the order of two who wait does not change with time.
        return min(
            self.active,
            key=lambda a: (
                self.finish(a) + self.boost * a.waiting[0].arrival,
                a.waiting[0].arrival,
            ),
        )

    def _admit(self, account: Account, request: Request) -> None:
        spent = self.service(account) + self._cost(request)
        self.virtual = max(self.virtual, account.level + spent / account.weight)


class DRR(ClientQueues):
    """Deficit round robin: in each round every client is granted `quantum` tokens.

    Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995: a
    client is served while its deficit, what it was granted and has not spent, pays for its next
    request; a client with nothing left to send loses what remains. The length of an answer is not
    known beforehand: it is charged as it comes, and may leave a debt, which the rounds pay off
    whether the client waits or not. A grant is `quantum` times the client's weight. Where nobody
    can pay, rounds pass until somebody can.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        quantum: int = 512,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        super().__init__(weights=weights, input_weight=input_weight, output_weight=output_weight)
        refuse((not 1 <= quantum <= MOST, f"quantum: must be from 1 to {MOST:g}, not {quantum}"))
        self.quantum = quantum

    def queue(self, batch: "Batch") -> "ClientQueues":
        self.round = 1
        self.turn = 0  # index into `active`
        return super().queue(batch)

    def deficit(self, account: Account) -> float:
        """Give what a client may still spend, in weighted tokens."""
        return account.level - self.service(account)

    def _grant(self, account: Account, upto: int) -> None:
        if upto > account.round:
            account.level += (upto - account.round) * self.quantum * account.weight
            account.round = upto

    def _enter(self, account: Account) -> None:
        self._grant(account, self.round - 1)
        account.level = min(account.level, self.service(account))

    def _pick(self) -> Account:
        while True:
            while self.turn < len(self.active):
                account = self.active[self.turn]
                self._grant(account, self.round)
                if self._lacks(account) <= 0:
                    return account
                self.turn += 1
            self.turn = 0
            self.round += max(1, min(map(self._rounds, self.active)))

    def _lacks(self, account: Account) -> float:
        """Give the weighted tokens that a client's next request costs more than it may spend.

        What is less than the rounding of the books is nothing: no number of rounds would pay it.
        """
        lacks = self._cost(account.waiting[0]) - self.deficit(account)
        return lacks if lacks > ROUNDING * abs(account.level) else 0.0

    def _rounds(self, account: Account) -> int:
        """Count the rounds until a client can pay for its next request."""
        return ceil(self._lacks(account) / (self.quantum * account.weight))

    def _leave(self, account: Account) -> None:
        place = self.active.index(account)
        del self.active[place]
        self.turn -= place < self.turn
        account.level = min(account.level, self.service(account))
