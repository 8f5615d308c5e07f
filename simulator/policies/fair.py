"""Fair policies: a waiting queue for each client, and the books of what each has received.

A client's *service* is what its requests have taken: `input_weight` for each token of a prompt, at
admission, and `output_weight` for each token of an answer, as it comes. A request that comes back
after a preemption waits before its client's others and pays nothing for what is computed again.

Nobody is walked token by token: the decode set knows how many members each client has in it, so
the output tokens of a client are a number and a slope (`ServiceCounter`), read when a decision is
due.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import ceil

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.policies.policy import Batch, Factor, PerSecond, Tokens
from simulator.util.errors import MappingError
from simulator.util.from_mapping import annotation_faults, check_range, raise_if

LEAST, MOST = 1e-6, 1e6  # of weights
ROUNDING = 1e-15  # of a client's books, relative


@dataclass(slots=True, eq=False)
class Account:
    """A client: its requests that wait, and what it has received."""

    weight: float
    waiting: deque[Request] = field(default_factory=deque)
    prompt: int = 0  # tokens of the prompts that were admitted
    output: int = 0  # tokens that came out, those of `members` counted back to tick 0
    members: int = 0  # of the decode set
    level: float = 0.0  # what the policy has added to its service, or granted
    round: int = 0  # up to which it has been granted its quantum
    joined: int = 0  # the number of its coming to wait; equals go in this order
    entry: int = -1  # its last one in a heap or a round; -1: it has none that holds


Turn = tuple[int, Account]
"""A client's entry in a round, and the client."""


class ServiceCounter(DecodeSet):
    """A decode set that counts the output tokens of each client."""

    def __init__(self, block_size: int, by_phase: bool, account: Callable[[str], Account]) -> None:
        super().__init__(block_size, by_phase)
        self.account = account

    def join(self, request: Request, ticks: int) -> None:
        super().join(request, ticks)
        account = self.account(request.client)
        account.members += 1
        account.output -= self.tick

    def leave(self, request: Request) -> int:
        account = self.account(request.client)
        account.members -= 1
        account.output += self.tick
        return super().leave(request)

    def emitted(self, request: Request) -> None:
        self.account(request.client).output += 1


class ClientQueues:
    """A queue for each client. `_pick` says whose turn it is: there the policies differ.

    It is policy and waiting queue in one. `weights` are shares by client, 1 for those not named.
    """

    moves = True

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        input_weight: Factor = 1.0,
        output_weight: Factor = 2.0,
    ) -> None:
        _check_weights(weights, input_weight, output_weight)
        self.weights = weights or {}
        self.input_weight = input_weight
        self.output_weight = output_weight

    def queue(self, batch: Batch) -> "ClientQueues":
        """Begin with empty books; those of a batch, to whose decode set they listen."""
        old = batch.decodes
        self.accounts: dict[str, Account] = {}
        self.active: dict[Account, None] = {}  # clients with requests that wait, as they joined
        self.joining: list[Account] = []  # those whose first request has come since the last step
        self.size = 0
        self.chosen: Account | None = None  # by `head`, unless the queue has changed since
        batch.decodes = self.decodes = ServiceCounter(
            old.block_size, old.members is not None, self.account
        )
        return self

    def account(self, client: str) -> Account:
        """Return the books of a client."""
        found = self.accounts.get(client)
        if found is None:
            found = self.accounts[client] = Account(self.weights.get(client, 1))
        return found

    def service(self, account: Account) -> float:
        """Weigh the tokens that a client has received up to now."""
        output = account.output + account.members * self.decodes.tick
        return self.input_weight * account.prompt + self.output_weight * output

    def __len__(self) -> int:
        return self.size

    def add(self, request: Request) -> bool:
        """Take a new request; say whether its client had none here."""
        account = self.account(request.client)
        joins = not account.waiting
        if joins:
            self.joining.append(account)
        account.waiting.append(request)
        self.size += 1
        self.chosen = None
        return joins

    def settle(self, now: float) -> None:
        """Bring in the clients that have come since the last step, before the next is decided."""
        for account in self.joining:
            self._enter(account)
            self.active[account] = None
            self._head_changed(account)
        self.joining.clear()

    def put_back(self, request: Request) -> None:
        account = self.account(request.client)
        account.waiting.appendleft(request)
        if account not in self.joining:
            self.active[account] = None
            self._head_changed(account)
        self.size += 1
        self.chosen = None

    def head(self) -> Request:
        if self.joining:
            self.settle(0.0)
        self.chosen = self._pick()
        return self.chosen.waiting[0]

    def take(self) -> Request:
        if self.chosen is None:
            self.head()
        account = self.chosen
        assert account is not None
        request = account.waiting.popleft()
        self.size -= 1
        self.chosen = None
        self._admit(account, request)
        if not request.preemptions:
            account.prompt += request.prompt_tokens
        if account.waiting:
            self._head_changed(account)
        else:
            self._leave(account)
        return request

    def remove(self, request: Request) -> None:
        account = self.account(request.client)
        account.waiting.remove(request)
        self.size -= 1
        self.chosen = None
        if account.waiting:
            if account in self.active:
                self._head_changed(account)
        elif account in self.active:
            self._leave(account)
        else:
            self.joining.remove(account)

    def _cost(self, request: Request) -> float:
        """Return what the admission of a request is charged."""
        return 0.0 if request.preemptions else self.input_weight * request.prompt_tokens

    def _enter(self, account: Account) -> None:
        """Prepare a client that comes to wait."""

    def _head_changed(self, account: Account) -> None:
        """Take note of an active client whose first request is another than before."""

    def _pick(self) -> Account:
        """Choose among the active clients."""
        raise NotImplementedError

    def _admit(self, account: Account, request: Request) -> None:
        """Take note of an admission, before it is charged."""

    def _leave(self, account: Account) -> None:
        """Let a client go that has no more requests waiting."""
        del self.active[account]


class SmallestFirst(ClientQueues):
    """The client whose `_rank` is smallest goes first, equals in the order in which they joined.

    A rank may only grow while the client's first request stays the same: what it receives counts
    against it. So a heap of ranks as they were bounds those of now from below, and a choice looks
    only at those that may be the smallest.
    """

    def queue(self, batch: Batch) -> "ClientQueues":
        self._heap: list[tuple[tuple[float, float], int, int, Account]] = []
        self._numbers = count()
        return super().queue(batch)

    def _rank(self, account: Account) -> tuple[float, float]:
        """Rank a client by its books and its first request."""
        raise NotImplementedError

    def _head_changed(self, account: Account) -> None:
        if account.entry < 0:
            account.joined = next(self._numbers)
        account.entry = next(self._numbers)
        heappush(self._heap, (self._rank(account), account.joined, account.entry, account))

    def _pick(self) -> Account:
        heap = self._heap
        while True:
            rank, joined, entry, account = heap[0]
            if account.entry != entry:
                heappop(heap)  # it has left, or has a newer entry
                continue
            now = self._rank(account)
            if now == rank:
                return account
            heapreplace(heap, (now, joined, entry, account))

    def _leave(self, account: Account) -> None:
        super()._leave(account)
        account.entry = -1


class Fair(SmallestFirst):
    """Virtual Token Counter: the client that has received the fewest tokens first. A prompt
    token counts `input_weight`, an answer token `output_weight`, divided by the client's
    weight (`weights: {a: 2}`; else 1).

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, and the
    weights of its section 4.3: a counter per client holds its service divided by its weight. When
    a client comes to wait that had no request waiting, its counter is lifted to the smallest of
    those who wait, or where nobody waits to that of the last who did, so that nobody saves up
    credit. Equal counters go by arrival. What waits is looked at before each step; the paper has
    no preemption.
    """

    reads = "client"
    trials = ({"weights": {"a": 3}},)

    def queue(self, batch: Batch) -> "ClientQueues":
        self.last: Account | None = None  # the last to leave the queue
        return super().queue(batch)

    def counter(self, account: Account) -> float:
        """Return a client's virtual token counter."""
        return account.level + self.service(account) / account.weight

    def _enter(self, account: Account) -> None:
        own = self.counter(account)
        if self.active:
            floor = self.counter(self._pick())
        elif self.last is not None:
            floor = self.counter(self.last)
        else:
            return
        if floor > own:
            account.level += floor - own

    def _rank(self, account: Account) -> tuple[float, float]:
        return self.counter(account), account.waiting[0].arrival

    def _leave(self, account: Account) -> None:
        super()._leave(account)
        self.last = account


class WFQ(SmallestFirst):
    """Weighted fair queueing: the smallest virtual finish time first, `boost` tokens sooner for
    each second of waiting; weights as for fair.

    Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994: a
    request's finish is its client's virtual time plus its cost divided by the client's weight, the
    smallest finish goes first, and a client that comes to wait starts no earlier than the finish
    that was served last. The cost that is known is that of the prompt; what the answer costs is
    added to the client's virtual time as it comes. For each second that a request waits its
    finish is `boost` tokens sooner, so that no weight starves anybody; 0 is the textbook.
    """

    reads = "client"
    trials = ({"weights": {"b": 0.3}, "boost": 2.5},)

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        boost: PerSecond = 0.0,
        input_weight: Factor = 1.0,
        output_weight: Factor = 2.0,
    ) -> None:
        super().__init__(weights=weights, input_weight=input_weight, output_weight=output_weight)
        raise_if(check_range("boost", boost, 0, MOST))
        self.boost = boost

    def queue(self, batch: Batch) -> "ClientQueues":
        self.virtual = 0.0  # the finish served last
        return super().queue(batch)

    def _enter(self, account: Account) -> None:
        start = account.level + self.service(account) / account.weight
        if self.virtual > start:
            account.level += self.virtual - start

    def _rank(self, account: Account) -> tuple[float, float]:
        # All boosts grow alike, so the order of two who wait does not change with time.
        first = account.waiting[0]
        output = account.output + account.members * self.decodes.tick  # as `service`, without calls
        spent = self.input_weight * account.prompt + self.output_weight * output
        if not first.preemptions:
            spent += self.input_weight * first.prompt_tokens
        return account.level + spent / account.weight + self.boost * first.arrival, first.arrival

    def _admit(self, account: Account, request: Request) -> None:
        spent = self.service(account) + self._cost(request)
        self.virtual = max(self.virtual, account.level + spent / account.weight)


class DRR(ClientQueues):
    """Deficit round robin: in each round a client may spend `quantum` tokens times its weight;
    weights as for fair.

    Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995: a
    client is served while its deficit, what it was granted and has not spent, pays for its next
    request; a client with nothing left to send loses what remains. The length of an answer is not
    known beforehand: it is charged as it comes, and may leave a debt, which the rounds pay off
    whether the client waits or not. A grant is `quantum` times the client's weight. Where nobody
    can pay, rounds pass until somebody can.
    """

    reads = "client"
    trials = ({"weights": {"c": 1.7}, "quantum": 5},)

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        quantum: Tokens = 512,
        input_weight: Factor = 1.0,
        output_weight: Factor = 2.0,
    ) -> None:
        super().__init__(weights=weights, input_weight=input_weight, output_weight=output_weight)
        raise_if(check_range("quantum", quantum, 1, MOST))
        self.quantum = quantum

    def queue(self, batch: Batch) -> "ClientQueues":
        self.round = 1
        self._turns: deque[Turn] = deque()  # those of this round that are still to come
        self._had: list[Turn] = []  # and those that are over
        self._numbers = count()
        return super().queue(batch)

    def deficit(self, account: Account) -> float:
        """Return what a client may still spend, in weighted tokens."""
        return account.level - self.service(account)

    def _grant(self, account: Account, upto: int) -> None:
        if upto > account.round:
            account.level += (upto - account.round) * self.quantum * account.weight
            account.round = upto

    def _enter(self, account: Account) -> None:
        self._grant(account, self.round - 1)
        account.level = min(account.level, self.service(account))

    def _pick(self) -> Account:
        turns = self._turns
        while True:
            while turns:
                entry, account = turns[0]
                if account.entry == entry:  # else it has left
                    self._grant(account, self.round)
                    if self._lacks(account) <= 0:
                        return account
                    self._had.append(turns[0])
                turns.popleft()
            turns.extend(self._had)
            self._had.clear()
            rounds = (self._lacks(one) / (self.quantum * one.weight) for one in self.active)
            self.round += max(1, ceil(min(rounds)))

    def _lacks(self, account: Account) -> float:
        """Return the weighted tokens that a client's next request costs more than it may spend.

        What is less than the rounding of the books is nothing: no number of rounds would pay it.
        """
        lacks = self._cost(account.waiting[0]) - self.deficit(account)
        return lacks if lacks > ROUNDING * abs(account.level) else 0.0

    def _head_changed(self, account: Account) -> None:
        if account.entry < 0:
            account.entry = next(self._numbers)
            self._turns.append((account.entry, account))

    def _leave(self, account: Account) -> None:
        super()._leave(account)
        account.entry = -1
        account.level = min(account.level, self.service(account))


def _check_weights(weights: object, input_weight: float, output_weight: float) -> None:
    for name, value in (("input_weight", input_weight), ("output_weight", output_weight)):
        raise_if(check_range(name, value, 0, MOST))
    raise_if((not input_weight + output_weight, "output_weight", "both weights are 0"))
    if weights is not None:
        check_shares(weights)


def check_shares(weights: object) -> None:
    """Raise ValueError unless these are shares by client."""
    if not isinstance(weights, Mapping):
        what = f"must be a mapping such as {{a: 2, b: 1}}, clients and weights, not {weights!r}"
        raise MappingError("weights", what)
    for name, value in weights.items():
        raise_if(others=annotation_faults(f"weights.{name}", float, value))
        raise_if(check_range(f"weights.{name}", value, LEAST, MOST))
