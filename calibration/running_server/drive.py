"""Loads for a server that is to be calibrated: from one request at a time to the knee, and back.

A closed loop of 1, 2, 4 ... clients doubles until throughput hardly grows: that is the knee. Open
loops at shares of it follow, of short prompts, long ones and both, every second one held out from
the fit. The first load is sent again at the end: it tells whether the machine has changed. No
prompt comes twice, so the prefix cache has none of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import numpy as np

from calibration.running_server.ask import Server, look
from calibration.server_logs.from_loads import Load
from headway.twin.measured_run import summary
from headway.twin.replay import Replayed, replay
from headway.twin.shadow import Poll
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Workload

Echo = Callable[[str], None]

SHARES = {"warm-up": 0.04, "probe": 0.07, "closed": 0.35, "open": 0.47}
"""Of the time: the probe comes twice, the others are several loads together."""
OPEN_LOOPS = (
    ("mixed", 0.3), ("mixed", 0.45), ("mixed", 0.75), ("mixed", 0.6),
    ("short", 0.8), ("short", 0.5), ("long", 0.4), ("long", 0.65),
)  # fmt: skip
"""Kinds of prompts, and shares of the knee's requests/s for them; every second is held out."""
GAIN = 1.1  # of throughput by twice as many clients, below which the knee is reached
LONG_SHARE = 0.3  # of the prompts of a mixed load
LEAST = 12  # requests of a load
LEAST_MODEL_LEN = 128  # tokens that prompt and answer of the probe need
LONGEST = 4096  # tokens of a prompt
DRIFT = 0.05  # relative difference of the probe's mean latency, from which it is told
KV_FREE = 0.9  # of the KV cache in use, below which nobody waits for blocks
FULL_POLLS = 5  # looks at the gauges, twice a second, that found all seats taken and others waiting
SETTLE = 0.3  # s after a load until the server's counters are looked at
PATIENCE = 120.0  # s for a request, beyond which the server hangs


@dataclass(frozen=True)
class Sent:
    """A load that was sent, and what came of it."""

    load: Load
    replayed: Replayed
    rate: float  # requests/s that were answered
    steps: tuple[int, int] = (0, 0)  # of the server's step log, where there is one


@dataclass
class Drive:
    """A calibration on its way: what to send, and what was sent so far."""

    server: Server
    vocab_size: int
    max_num_seqs: int
    seconds: float  # to spend
    max_rate: float = inf  # requests/s
    steps: Path | None = None
    echo: Echo = print
    kept: Callable[["Sent"], object] = lambda sent: None
    """Told of each load as it is over."""
    sent: list[Sent] = field(default_factory=list)
    knee: float = 0.0  # requests/s of the mixed load; 0: not reached yet
    stopped: bool = False  # by Ctrl-C
    fault: str = ""  # what ended it before its time
    random: np.random.Generator = field(default_factory=np.random.default_rng)

    def run(self) -> None:
        """Send all loads. What ends it half-way, Ctrl-C or a fault, leaves what was measured."""
        self.begin = time.monotonic()
        length = self.server.max_model_len
        if length < LEAST_MODEL_LEN:
            raise HeadwayError(
                f"--server: {self.server.url}: max_model_len {length} is too small for the probe's "
                f"prompts and answers: it takes {LEAST_MODEL_LEN} tokens"
            )
        try:
            for name, workload, held_out in self._loads():
                if not self._send(name, workload, held_out):
                    return
        except KeyboardInterrupt:
            self.stopped = True

    @property
    def drift(self) -> float | None:
        """The relative difference of the two probes' mean latency; None: there were not two."""
        probes = [sent.load for sent in self.sent if sent.load.name.startswith("probe")]
        if len(probes) < 2:
            return None
        first, last = (float(np.nanmean(load.e2el)) for load in (probes[0], probes[-1]))
        return last / first - 1.0

    @property
    def seats(self) -> int | None:
        """The most requests that ran, where that many often ran while others waited with KV free.

        None: nobody had to wait for a seat.
        """
        polls = [poll for sent in self.sent for poll in sent.replayed.gauges]
        most = max((running for _, running, _, _ in polls), default=0.0)
        full = [1 for _, run, wait, used in polls if run == most and wait >= 1 and used < KV_FREE]
        return int(most) if len(full) >= FULL_POLLS else None

    def _loads(self) -> Iterator[tuple[str, Workload, bool]]:
        """Yield name, requests, and whether they are held out; each when that before is sent."""
        yield "warm-up", self._closed(4, LEAST, "mixed"), False
        probe = self._lengths("mixed", self._count("probe", 1.0, self._rate(1)))
        yield "probe", _loop(*probe, 1, self.max_rate), False
        count, last = 1, 0.0
        most = int(np.ceil(np.log2(self.max_num_seqs))) or 1
        while True:
            count = min(2 * count, self.max_num_seqs)
            number = self._count("closed", 1 / most, self._rate(count))
            yield f"closed-{count}", self._closed(count, max(number, 2 * count), "mixed"), False
            rate = self.sent[-1].rate
            if rate < GAIN * last or count == self.max_num_seqs or rate > 0.9 * self.max_rate:
                break
            last = rate
        self.knee = max(sent.rate for sent in self.sent)
        factors = {"mixed": 1.0, "short": self._weight("short"), "long": self._weight("long")}
        for number, (kind, share) in enumerate(OPEN_LOOPS):
            left = self.seconds * (1 - SHARES["probe"]) - (time.monotonic() - self.begin)
            if left <= 0:
                break
            rate = min(share * self.knee * factors[kind], self.max_rate)
            seconds = left / (len(OPEN_LOOPS) - number)
            size = max(LEAST, round(rate * seconds))
            arrival = np.cumsum(self.random.exponential(1 / rate, size))
            load = Workload(arrival - arrival[0], *self._lengths(kind, size))
            yield f"open-{kind}-{rate:.3g}", load, number % 2 == 1
        yield "probe-again", _loop(*probe, 1, self.max_rate), False

    def _rate(self, clients: int) -> float:
        """Guess the requests/s of so many clients by the load before."""
        before = self.sent[-1]
        was = before.load.workload.max_concurrency or clients
        return before.rate * (min(clients / was, 1.5))

    def _count(self, kind: str, part: float, rate: float) -> int:
        return max(LEAST, round(SHARES[kind] * part * self.seconds * rate))

    def _weight(self, kind: str) -> float:
        """Say how many requests of a kind are as much work as a mixed one, by their tokens."""
        mean = {one: self._mean_work(one) for one in ("short", "long")}
        mixed = LONG_SHARE * mean["long"] + (1 - LONG_SHARE) * mean["short"]
        return mixed / mean[kind]

    def _mean_work(self, kind: str) -> float:
        (low, high), (least, most) = self._ranges(kind)
        return (low + high) / 2 + 4 * (
            least + most
        ) / 2  # a decode weighs more than a prompt's token

    def _ranges(self, kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the least and greatest length of prompts and of answers, tokens."""
        length = min(self.server.max_model_len, 2 * LONGEST)
        if kind == "short":
            return (16, max(length // 10, 32)), (8, max(min(length // 24, 100), 16))
        return (length // 8, length // 2), (16, max(min(length // 16, 200), 24))

    def _lengths(self, kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the lengths of prompts and answers."""
        long = np.full(count, kind == "long")
        if kind == "mixed":
            long = self.random.random(count) < LONG_SHARE
        drawn = []
        for part in (0, 1):
            both = [self._ranges(one)[part] for one in ("long", "short")]
            columns = [self.random.integers(low, high + 1, count) for low, high in both]
            drawn.append(np.where(long, *columns))
        return drawn[0], drawn[1]

    def _closed(self, clients: int, count: int, kind: str) -> Workload:
        return _loop(*self._lengths(kind, count), clients, self.max_rate)

    def _send(self, name: str, workload: Workload, held_out: bool) -> bool:
        """Send a load and keep what came of it; False: that was the last."""
        root, first = self.server.url, self._steps()
        begin = self._look(f"before {name}")
        if begin is None:
            return False
        found = replay(
            workload, root, self.server.model, timeout=PATIENCE, vocab_size=self.vocab_size
        )
        good = np.array([not one.error for one in found.requests])
        self.stopped = found.stopped
        errors = [one.error for one in found.requests if one.error] if not found.stopped else []
        if good.any():
            load = _measured(name, workload, found, held_out=held_out)
            self._keep(load, found, (first, self._steps()))
        if found.stopped:
            return False
        failed = f"{len(errors)} of {len(good)} requests of {name} failed: {(errors or [''])[0]}"
        time.sleep(SETTLE)
        end = self._look(failed if errors else f"after {name}")
        if end is None:
            return False
        if errors:
            self.fault = failed
            return False
        others = end.finished - begin.finished - good.sum()
        if others:
            self.fault = (
                f"{others:.0f} requests of others ended during {name}: calibrate a server that "
                "nobody else uses"
                if others > 0
                else f"its counters fell during {name}: it was started anew"
            )
        return not self.fault

    def _look(self, when: str) -> Poll | None:
        """Read the server's counters; None, and a fault, where it does not tell them any more."""
        try:
            return look(self.server.url)
        except HeadwayError as error:
            reason = str(error).removeprefix(f"--server: {self.server.url}")
            self.fault = f"the server is gone: {when}; {reason.lstrip(': ')}"
            return None

    def _keep(self, load: Load, found: Replayed, steps: tuple[int, int]) -> None:
        answers = [one for one in found.requests if not one.error]
        answered = replace(found, requests=sorted(answers, key=lambda one: one.sent))
        told = summary(answered, load.workload)
        one = Sent(load, answered, told["request_throughput"], steps)
        self.sent.append(one)
        self.kept(one)
        left = max(self.seconds - (time.monotonic() - self.begin), 0.0)
        self.echo(
            f"{load.name:<18}{len(answers):>5} requests {one.rate:>8.3g}/s   TTFT "
            f"{told['mean_ttft_ms']:>8.1f}   TPOT {told.get('mean_tpot_ms', 0.0):>7.2f}   E2EL "
            f"{told['mean_e2el_ms']:>9.1f} ms   {left:>4.0f} s left"
        )

    def _steps(self) -> int:
        """Count the steps that the server's recorder has written so far."""
        if self.steps is None:
            return 0
        try:
            lines = self.steps.read_bytes().splitlines()
        except OSError as error:
            raise HeadwayError(f"--steps {self.steps}: cannot read: {error.strerror}") from None
        if not lines or not lines[0].startswith(b"{"):
            return max(len(lines) - 1, 0)  # a table with its head
        return sum(b'"type":"step"' in line and b'"sched":[]' not in line for line in lines)


def _measured(name: str, workload: Workload, found: Replayed, *, held_out: bool) -> Load:
    """Return the answered requests of a load in the order in which they were sent.

    Those of an open loop arrive in a simulation as they were sent, not as they were to be.
    """
    good = [k for k, one in enumerate(found.requests) if not one.error]
    good.sort(key=lambda k: found.requests[k].sent)
    answers = [found.requests[k] for k in good]
    sent, first, end = (np.array([getattr(one, key) for one in answers])
                        for key in ("sent", "first", "end"))  # fmt: skip
    load = workload.part(np.array(good))
    if workload.max_concurrency is None:
        load.arrival = sent - sent[0]
    return Load(name, load, first - sent, end - sent, held_out)


def _loop(prompts: np.ndarray, outputs: np.ndarray, clients: int, max_rate: float) -> Workload:
    """Return the requests of a closed loop, sent no faster than `max_rate`."""
    arrival = np.arange(len(prompts)) / max_rate
    return Workload(arrival, prompts, outputs, max_concurrency=clients)
