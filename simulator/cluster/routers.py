"""Routers: which replica a request goes to.

A router knows what a proxy in front of the replicas knows: what it has sent to each, what has
come back, and how full a replica said its KV cache was with its last answer. All of it changes only
as a request is sent or ends, so a router keeps an index and looks at no replica twice.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from numbers import Integral
from operator import attrgetter
from random import Random
from typing import Annotated, ClassVar, Protocol, runtime_checkable
from zlib import crc32

import numpy as np

from simulator.core.request import Request
from simulator.engine.client import RequestReader
from simulator.kv_cache.block_hashes import prompt_hashes
from simulator.policies.policy import raised
from simulator.util.errors import HeadwayError
from simulator.util.from_mapping import raise_if
from simulator.workload.workload import Ints, Workload

SPARE = 64  # entries beyond two a replica that a heap may hold before it is made anew


@dataclass(slots=True, eq=False)
class Target:
    """One replica, as a router sees it. Read it, never write to it."""

    index: int
    group: str
    block_size: int  # tokens
    blocks: int  # usable KV blocks
    outstanding: int = 0  # requests sent to it that have not ended
    tokens: int = 0  # prompt tokens of these
    used: int = 0  # KV blocks in use at its last answer, and those of the prompts sent since
    order: int = 0  # grows as it is chosen: of equals the one that waited longest comes next
    max_loras: int = 0  # adapters that run there at once; 0: it serves none
    models: Counter[str] = field(default_factory=Counter)  # what is asked for, of `outstanding`

    @property
    def kv_usage(self) -> float:
        """Share of its KV cache that it is taken to use."""
        return self.used / self.blocks


class Router(Protocol):
    """Chooses among the targets that are open; `session` names the conversation, -1: none."""

    def open(self, target: Target) -> None:
        """Take a target in."""

    def close(self, target: Target) -> None:
        """Send it nothing more."""

    def changed(self, target: Target) -> None:
        """Take note that an open target's numbers are others now."""

    def choose(self, request: Request, session: int) -> Target:
        """Choose one; there is at least one."""


@runtime_checkable
class StatelessRouter(Router, Protocol):
    """A router that looks at no replica: what it chooses is known beforehand."""

    def choose_many(self, workload: Workload) -> Ints:
        """Choose for each of the next requests; return the numbers of the targets."""


class Pool:
    """The open targets as a list, in no order that means anything."""

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self._at: dict[int, int] = {}

    def __contains__(self, target: Target) -> bool:
        return target.index in self._at

    def open(self, target: Target) -> None:
        self._at[target.index] = len(self.targets)
        self.targets.append(target)

    def close(self, target: Target) -> None:
        """Take a target out; the last one takes its place."""
        at = self._at.pop(target.index)
        last = self.targets.pop()
        if last is not target:
            self.targets[at] = last
            self._at[last.index] = at

    def changed(self, target: Target) -> None:
        """Nothing is kept about a target."""


class RoundRobin:
    """One after the other, in the order in which they were opened."""

    def __init__(self) -> None:
        self._ring: OrderedDict[int, Target] = OrderedDict()

    def open(self, target: Target) -> None:
        self._ring[target.index] = target

    def close(self, target: Target) -> None:
        del self._ring[target.index]

    def changed(self, target: Target) -> None:
        """Nothing is kept about a target."""

    def choose(self, request: Request, session: int) -> Target:
        index, target = next(iter(self._ring.items()))
        self._ring.move_to_end(index)
        return target

    def choose_many(self, workload: Workload) -> Ints:
        ring = np.array([*self._ring])
        for index in ring[: len(workload) % len(ring)].tolist():
            self._ring.move_to_end(index)
        chosen: Ints = ring[np.arange(len(workload)) % len(ring)]
        return chosen


class Uniform(Pool):
    """Each with the same probability, whatever it has to do."""

    def __init__(self, seed: Annotated[int, "of its random choices"]) -> None:
        super().__init__()
        self._random = Random(seed)

    def choose(self, request: Request, session: int) -> Target:
        return self.targets[int(self._random.random() * len(self.targets))]

    def choose_many(self, workload: Workload) -> Ints:
        # numpy's Mersenne twister is Python's: from the same state it draws the same.
        version, state, gauss = self._random.getstate()
        drawing = np.random.MT19937()
        drawing.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(state[:-1], np.uint32), "pos": state[-1]},
        }
        drawn = np.random.Generator(drawing).random(len(workload))
        places = (drawn * len(self.targets)).astype(np.int64)
        after = drawing.state["state"]
        self._random.setstate((version, (*after["key"].tolist(), int(after["pos"])), gauss))
        chosen: Ints = np.array([target.index for target in self.targets])[places]
        return chosen


class PowerOfTwo(Pool):
    """The one of two drawn at random with fewer requests (Mitzenmacher, 2001)."""

    def __init__(self, seed: Annotated[int, "of its random choices"]) -> None:
        super().__init__()
        self._random = Random(seed)

    def choose(self, request: Request, session: int) -> Target:
        count = len(self.targets)
        first = int(self._random.random() * count)
        if count == 1:
            return self.targets[0]
        second = int(self._random.random() * (count - 1))
        second += second >= first
        one, two = self.targets[first], self.targets[second]
        return two if two.outstanding < one.outstanding else one


class Least:
    """The one with the fewest requests that have not ended; of equals the one chosen longest ago.

    Subclasses count something else, their `load`. A heap has an entry for each change; those that
    time has passed over are dropped as they come up, and it is made anew when most of it is such.
    """

    load: ClassVar["attrgetter[float]"] = attrgetter("outstanding")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Target]] = []
        self._open: dict[int, Target] = {}

    def open(self, target: Target) -> None:
        self._open[target.index] = target
        self.changed(target)

    def close(self, target: Target) -> None:
        del self._open[target.index]

    def changed(self, target: Target) -> None:
        heap = self._heap
        if len(heap) > 2 * len(self._open) + SPARE:
            load = self.load
            heap[:] = [(load(one), one.order, one.index, one) for one in self._open.values()]
            heapify(heap)
        else:
            heappush(heap, (self.load(target), target.order, target.index, target))

    def least(self) -> Target:
        """Find the open target with the least load."""
        heap = self._heap
        while True:
            load, order, index, target = heap[0]
            if order == target.order and load == self.load(target) and index in self._open:
                return target
            heappop(heap)

    def choose(self, request: Request, session: int) -> Target:
        return self.least()


class LeastTokens(Least):
    """The one with the fewest prompt tokens of requests that have not ended."""

    load = attrgetter("tokens")


class LeastKv(Least):
    """The one with the least KV in use, by its last answer and the prompts sent since."""

    load = attrgetter("kv_usage")


class SessionAffinity(Least):
    """A conversation, else a client, stays where it began; new ones go to the least busy.

    Where its replica is gone, or `capacity` others have been here since, it begins again. Requests
    of no session and without a client's name go to the least busy.
    """

    def __init__(self, *, capacity: Annotated[int, "sessions and clients"] = 1_000_000) -> None:
        super().__init__()
        raise_if((capacity < 1, "capacity", f"must be at least 1, not {capacity}"))
        self._capacity = capacity
        self._homes: OrderedDict[int | str, Target] = OrderedDict()

    def choose(self, request: Request, session: int) -> Target:
        key: int | str = session if session >= 0 else request.client
        if key == "":
            return self.least()
        home = self._homes.get(key)
        if home is None or home.index not in self._open:
            home = self._homes[key] = self.least()
            if len(self._homes) > self._capacity:
                self._homes.popitem(last=False)
        else:
            self._homes.move_to_end(key)
        return home


class PrefixAware(Least):
    """To the replica that saw most of the prompt before, unless it is much busier than others.

    The router remembers where the last `capacity` chunks of `chunk` tokens went; the longest known
    beginning decides if it is at least `threshold` of the prompt. Where that replica has over
    `balance_abs` requests and `balance_rel` times more than the least busy one, and where nothing
    is known, the least busy one gets it (after `cache_aware` of SGLang's router; its tree of
    texts per worker is here one table for all).
    """

    def __init__(
        self,
        *,
        chunk: Annotated[int, "tokens"] = 64,
        threshold: Annotated[float, "share of the prompt"] = 0.3,
        balance_abs: Annotated[int, "requests"] = 64,
        balance_rel: Annotated[float, "times the least busy one's requests"] = 1.5,
        capacity: Annotated[int, "chunks"] = 1_000_000,
    ) -> None:
        super().__init__()
        raise_if(
            (chunk < 1, "chunk", f"must be at least 1, not {chunk}"),
            (not 0 <= threshold <= 1, "threshold", f"must be from 0 to 1, not {threshold}"),
            (balance_abs < 0, "balance_abs", f"must be at least 0, not {balance_abs}"),
            (balance_rel < 1, "balance_rel", f"must be at least 1, not {balance_rel}"),
            (capacity < 1, "capacity", f"must be at least 1, not {capacity}"),
        )
        self._chunk, self._threshold = chunk, threshold
        self._abs, self._rel = balance_abs, balance_rel
        self._capacity = capacity
        self._seen: OrderedDict[int, Target] = OrderedDict()

    def choose(self, request: Request, session: int) -> Target:
        hashes = prompt_hashes(request, self._chunk) if request.segments else []
        target = self._known(hashes, request.prompt_tokens)
        least = self.least()
        most = max(least.outstanding + self._abs, least.outstanding * self._rel)
        if target is None or target.outstanding > most:
            target = least
        for key in hashes:
            self._seen[key] = target
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return target

    def _known(self, hashes: list[int], tokens: int) -> Target | None:
        """Find who has seen the longest beginning that counts."""
        for count in range(len(hashes), 0, -1):
            if count * self._chunk < self._threshold * tokens:
                break
            target = self._seen.get(hashes[count - 1])
            if target is not None and target.index in self._open:
                return target
        return None


class LoraAffinity(Pool):
    """To a replica that has the request's adapter, has room for one more, or is little busy.

    The sum of three scores from 0 to 1 decides, as in the Gateway API Inference Extension
    (`lora-affinity-scorer`, `queue-scorer` and `kv-cache-utilization-scorer`, equal weights): 1
    where requests for the adapter have been sent and not ended, 0.8 where those are for fewer than
    `max_loras` adapters, else 0; requests sent and not ended, 1 for the fewest and 0 for the most;
    the share of the KV cache that is free. Of equals who was chosen longest ago.
    """

    def choose(self, request: Request, session: int) -> Target:
        counts = [target.outstanding for target in self.targets]
        most, spread = max(counts), max(counts) - min(counts)

        def rank(target: Target) -> tuple[float, int]:
            queue = (most - target.outstanding) / spread if spread else 1.0
            affinity = self._affinity(request.model, target)
            return affinity + queue + 1.0 - min(target.kv_usage, 1.0), -target.order

        return max(self.targets, key=rank)

    @staticmethod
    def _affinity(model: str, target: Target) -> float:
        """Say how well a replica suits an adapter; the model itself runs everywhere."""
        if not model or model in target.models:
            return 1.0
        others = len(target.models) - ("" in target.models)
        return 0.8 if others < target.max_loras else 0.0


class SessionHash(Pool):
    """Hashes the conversation, else the client's name, else the request's number."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # requests that `choose_many` has chosen for

    def key(self, request: Request, session: int) -> object:
        """Return what is hashed."""
        return session if session >= 0 else request.client or request.id

    def choose(self, request: Request, session: int) -> Target:
        at = crc32(repr(self.key(request, session)).encode())
        return self.targets[at % len(self.targets)]

    def choose_many(self, workload: Workload) -> Ints:
        ids = range(self._seen, self._seen + len(workload))
        self._seen, read = ids.stop, RequestReader(workload, ids).read
        chosen = (self.choose(read(k, 0.0), -1).index for k in range(len(workload)))
        return np.fromiter(chosen, np.int64, len(workload))


class PrefixHash(SessionHash):
    """Hashes what the prompt begins with, else as `session_hash`."""

    def key(self, request: Request, session: int) -> object:
        if request.segments:
            return request.segments[0][0]
        return super().key(request, session)


class ByModel(Pool):
    """Before the replicas of several models: the one that a request asks for.

    Its targets stand for models, in the order of `names`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._places = {name: place for place, name in enumerate(names)}

    def choose(self, request: Request, session: int) -> Target:
        return self.targets[self._at[self._places[request.model]]]


class Pods:
    """A router that looks at no replica before groups of them, each with a router of its own.

    `pods` is the group of each target, by its number. The front knows each group as one target.
    """

    def __init__(self, front: Router, pods: Sequence[int], routers: Mapping[int, Router]) -> None:
        self._front, self._pods, self._routers = front, pods, routers
        self._members = {pod: Target(pod, "", 1, 1) for pod in routers}
        self._open = dict.fromkeys(routers, 0)  # targets

    def open(self, target: Target) -> None:
        pod = self._pods[target.index]
        if not self._open[pod]:
            self._front.open(self._members[pod])
        self._open[pod] += 1
        self._routers[pod].open(target)

    def close(self, target: Target) -> None:
        pod = self._pods[target.index]
        self._routers[pod].close(target)
        self._open[pod] -= 1
        if not self._open[pod]:
            self._front.close(self._members[pod])

    def changed(self, target: Target) -> None:
        self._routers[self._pods[target.index]].changed(target)

    def choose(self, request: Request, session: int) -> Target:
        pod = self._front.choose(request, session).index
        return self._routers[pod].choose(request, session)


ROUTERS: dict[str, type] = {
    "round_robin": RoundRobin,
    "random": Uniform,
    "least_outstanding": Least,
    "least_tokens": LeastTokens,
    "least_kv": LeastKv,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "lora_affinity": LoraAffinity,
    "session_affinity": SessionAffinity,
    "session_hash": SessionHash,
    "prefix_hash": PrefixHash,
}
STATELESS_ROUTERS = [name for name, router in ROUTERS.items() if hasattr(router, "choose_many")]
"""Those that look at no replica."""


class Chooser(Protocol):
    """A router of the user's own: a function, or an object whose `choose` this is."""

    def __call__(self, request: Request, targets: Sequence[Target]) -> int:
        """Return the place in `targets`, the open ones by index, that the request goes to."""


class Own:
    """Asks a function of the user's; HeadwayError where it fails. The time it takes is theirs."""

    def __init__(self, name: str, choose: Chooser, key: str = "cluster.router") -> None:
        self._name, self._choose, self._key = name, choose, key
        self._targets: list[Target] = []

    def open(self, target: Target) -> None:
        self._targets.append(target)
        self._targets.sort(key=lambda one: one.index)

    def close(self, target: Target) -> None:
        self._targets.remove(target)

    def changed(self, target: Target) -> None:
        """Nothing is kept about a target."""

    def choose(self, request: Request, session: int) -> Target:
        try:
            at = self._choose(request, self._targets)
        except Exception as error:
            raise raised(f"{self._key}: {self._name}(request {request.id})", error) from error
        if isinstance(at, bool) or not isinstance(at, Integral) or not 0 <= at < len(self._targets):
            raise HeadwayError(
                f"{self._key}: {self._name}(request {request.id}) gave {at!r}, which is none "
                f"of the places 0 to {len(self._targets) - 1}"
            )
        return self._targets[at]
