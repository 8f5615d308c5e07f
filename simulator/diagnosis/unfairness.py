"""Who gets too little: a client waits, and meanwhile another gets more than a fair policy gives.

Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024) bound the difference in
service of two clients that both wait by 2 U, where U is what one batch can take. Here U is what the
run's own batches took at most; the bound is doubled, as the other client need not wait all the
time; and a client is treated unfairly while another gets more than twice what it gets, by more than
that. Waits say nothing of it: who asks for more than the others rightly waits longer.

A request's service (`results/fairness.py`) counts where it is first admitted: that is what
a policy decides.
"""

from dataclasses import dataclass

import numpy as np

from simulator.results.fairness import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Clients,
    backlogged_periods,
    expand_ranges,
)
from simulator.results.request_table import Floats, Ints, RequestTable

MIN_REQUESTS = 10  # requests that a client must have sent to be compared
COMPARED = 16  # clients that waited the longest, and as many that got the most: 256 pairs
FACTOR = 2.0  # as much service is clearly more


@dataclass(frozen=True, slots=True)
class Underserved:
    """A client that waited while another got more than its share."""

    worst: int  # code of the client that waited
    best: int  # code of the other
    time: float  # s, of its waiting
    share: float  # of all time in which it waited
    service: float  # per weight, in that time
    best_service: float


@dataclass(slots=True)
class _Admissions:
    """All first admissions, in order of time; amounts are service per weight."""

    time: Floats
    owner: Ints
    amount: Floats

    @classmethod
    def of(cls, clients: Clients) -> "_Admissions":
        table = clients.table
        order = np.argsort(table.first_scheduled, kind="stable")  # NaN comes last
        order = order[: np.count_nonzero(~np.isnan(table.first_scheduled))]
        owner = clients.codes[order]
        prompts, answers = table.workload.prompt_tokens[order], table.generated[order]
        service = INPUT_WEIGHT * prompts + OUTPUT_WEIGHT * answers
        return cls(table.first_scheduled[order], owner, service / clients.weights[owner])

    def within(self, begin: Floats, end: Floats, least: float) -> tuple[Ints, Ints]:
        """Name the admissions in each stretch that has `least` or more: stretch, admission."""
        low = np.searchsorted(self.time, begin, "left")
        high = np.searchsorted(self.time, end, "right")
        upto = np.append(0.0, np.cumsum(self.amount))
        long = np.flatnonzero(upto[high] - upto[low] >= least)
        return expand_ranges(long, low[long], high[long])


def batch_service(table: RequestTable) -> float:
    """Return U: the longest prompt, and the most that the answers under way at one time brought."""
    here = np.flatnonzero(~np.isnan(table.first_scheduled))
    answer = OUTPUT_WEIGHT * table.generated[here]
    finish = np.where(np.isnan(table.finish[here]), np.inf, table.finish[here])
    order = np.argsort(np.append(finish, table.first_scheduled[here]), kind="stable")  # ends first
    under_way = np.cumsum(np.append(-answer, answer)[order])
    prompt = np.max(table.workload.prompt_tokens[here], initial=0)
    return float(INPUT_WEIGHT * prompt + np.max(under_way, initial=0))


def most_underserved(clients: Clients) -> Underserved | None:
    """Find the client that waited the longest while another got more than its share.

    Of more than `COMPARED` clients those that waited the longest are compared with those that got
    the most.
    """
    admissions, batch = _Admissions.of(clients), batch_service(clients.table)
    size = len(clients.weights)
    codes, begin, stop = backlogged_periods(clients)
    waited = np.bincount(codes, stop - begin, size)
    waited[np.bincount(clients.codes, minlength=size) < MIN_REQUESTS] = 0.0
    got = np.bincount(admissions.owner, admissions.amount, size)
    best = np.argsort(-got, kind="stable")[:COMPARED]
    found: list[Underserved] = []
    for worst in np.argsort(-waited, kind="stable")[:COMPARED]:
        if not waited[worst]:
            break
        bounds = 2 * batch * (1 / clients.weights + 1 / clients.weights[worst])
        mine = codes == worst
        waiting = _WaitingClient(
            admissions, int(worst), begin[mine], stop[mine], float(bounds.min())
        )
        found += [
            underserved
            for code in best[got[best] > bounds[best]]
            if code != worst and (underserved := waiting.against(int(code), float(bounds[code])))
        ]
    return max(found, key=lambda underserved: underserved.time, default=None)


class _WaitingClient:
    """What happened while one client waited."""

    def __init__(
        self, admissions: _Admissions, worst: int, begin: Floats, end: Floats, least: float
    ) -> None:
        self.worst, self.begin = worst, begin
        self.waited = float((end - begin).sum())
        self.stretch, row = admissions.within(begin, end, least)
        self.time, self.owner = admissions.time[row], admissions.owner[row]
        self.amount = admissions.amount[row]

    def against(self, best: int, bound: float) -> Underserved | None:
        """Find the times in which another got more than its share, each the longest there is.

        A walk goes up by what the other gets and down by `FACTOR` what this client gets. Where it
        rises by more than the bound above its lowest point of the stretch, the time from there to
        its peak counts.
        """
        both = np.flatnonzero((self.owner == self.worst) | (self.owner == best))
        theirs = self.owner[both] == best
        amount, stretch = self.amount[both], self.stretch[both]
        steps = np.where(theirs, amount, -FACTOR * amount)
        first = np.flatnonzero(np.append(True, stretch[1:] != stretch[:-1])[: len(both)])
        # Each stretch begins with a fall below all that was before.
        walk = np.cumsum(np.insert(steps, first, -np.abs(steps).sum() - 1.0))
        time = np.insert(self.time[both], first, self.begin[stretch[first]])
        lowest = np.minimum.accumulate(walk)
        opens = np.flatnonzero(walk == lowest)
        if not len(opens):
            return None
        rise = walk - lowest
        spent, service = 0.0, np.zeros(2)
        paid = np.cumsum(np.insert(np.where([~theirs, theirs], amount, 0.0), first, 0.0, 1), 1)
        for number in np.flatnonzero(np.maximum.reduceat(rise, opens) > bound):
            low = opens[number]
            high = opens[number + 1] if number + 1 < len(opens) else len(rise)
            peak = low + int(rise[low:high].argmax())
            spent += float(time[peak] - time[low])
            service += paid[:, peak] - paid[:, low]
        if not spent:
            return None
        return Underserved(self.worst, best, spent, spent / self.waited, *map(float, service))
