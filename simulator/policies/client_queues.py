"""A waiting queue for each client, and the books of what each has received; for the fair policies.

A client's *service* is what its requests have taken: `input_weight` for each token of a prompt, at
admission, and `output_weight` for each token of an answer, as it comes. A request that comes back
after a preemption waits before its client's others and pays nothing for what is computed again.

Nobody is walked token by token: the decode set knows how many members each client has in it, so
the output tokens of a client are a number and a slope (`Ledger`), read when a decision is due.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulator.core.decode_set import DecodeSet
from simulator.core.request import Request
from simulator.util.from_mapping import check, refuse

if TYPE_CHECKING:
    from simulator.schedulers.vllm.batch import Batch

LEAST, MOST = 1e-6, 1e6  # of weights


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


class Ledger(DecodeSet):
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
    """A queue for each client. `_pick` says whose turn it is; the fair policies differ in it.

    It is policy and waiting queue in one. `weights` are shares by client, 1 for those not named.
    """

    moves = True

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        _check_weights(weights, input_weight, output_weight)
        self.weights = weights or {}
        self.input_weight = input_weight
        self.output_weight = output_weight

    def queue(self, batch: "Batch") -> "ClientQueues":
        """Begin with empty books; those of a batch, to whose decode set they listen."""
        old = batch.decodes
        self.accounts: dict[str, Account] = {}
        self.active: list[Account] = []  # clients with requests that wait, in order of joining
        self.joining: list[Account] = []  # those whose first request has come since the last step
        self.size = 0
        self.chosen: Account | None = None  # by `head`, unless the queue has changed since
        batch.decodes = self.decodes = Ledger(old.block_size, old.members is not None, self.account)
        return self

    def account(self, client: str) -> Account:
        """Give the books of a client."""
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
            self.active.append(account)
        self.joining.clear()

    def put_back(self, request: Request) -> None:
        account = self.account(request.client)
        if not account.waiting:
            self.active.append(account)
        account.waiting.appendleft(request)
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
        if not account.waiting:
            self._leave(account)
        return request

    def remove(self, request: Request) -> None:
        account = self.account(request.client)
        account.waiting.remove(request)
        self.size -= 1
        self.chosen = None
        if not account.waiting:
            if account in self.joining:
                self.joining.remove(account)
            else:
                self._leave(account)

    def _cost(self, request: Request) -> float:
        """Give what the admission of a request is charged."""
        return 0.0 if request.preemptions else self.input_weight * request.prompt_tokens

    def _enter(self, account: Account) -> None:
        """Prepare a client that comes to wait."""

    def _pick(self) -> Account:
        """Choose among the active clients."""
        raise NotImplementedError

    def _admit(self, account: Account, request: Request) -> None:
        """Take note of an admission, before it is charged."""

    def _leave(self, account: Account) -> None:
        """Let a client go that has no more requests waiting."""
        self.active.remove(account)


def _check_weights(weights: object, input_weight: float, output_weight: float) -> None:
    for name, value in (("input_weight", input_weight), ("output_weight", output_weight)):
        refuse(
            (not 0 <= value <= MOST, f"{name}: must be from 0 to {MOST:g}, not {value}"),
        )
    refuse((not input_weight + output_weight, "output_weight: both weights are 0"))
    if weights is not None:
        check_shares(weights)


def check_shares(weights: object) -> None:
    """Raise ValueError unless these are shares by client."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights: {weights!r} is no mapping by client")
    for name, value in weights.items():
        refuse(check(f"weights: {name}", float, value))
        wrong = not LEAST <= value <= MOST
        refuse((wrong, f"weights: {name}: must be from {LEAST:g} to {MOST:g}, not {value}"))
