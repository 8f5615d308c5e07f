"""A model of a live server, from loads that come in turns with blind ones; and what-ifs by it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.special import stdtrit

from calibration.profile_yaml import scenario_profile
from calibration.running_server.ask import ask, scenario_of
from calibration.running_server.drive import Drive
from calibration.running_server.judge import METRICS, Outcome, fit_sent
from calibration.server_logs.from_loads import play_load
from headway.twin.replay import replay
from simulator.core.engine_config import EngineConfig
from simulator.results.request_table import RequestTable
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.workload.workload import Workload
from tests.support.live_vllm import FLAGS, VOCABULARY, LiveServer, steps_of

ENGINE: dict[str, Any] = {
    "name": "vllm",
    "max_num_seqs": int(FLAGS["--max-num-seqs"]),
    "max_num_batched_tokens": int(FLAGS["--max-num-batched-tokens"]),
    "async_scheduling": False,
}
"""What a server does not tell of itself. vLLM turns asynchronous scheduling off on a CPU, whatever
its flags and its log say (`vllm/platforms/cpu.py`)."""
KINDS = {"short": (100, 40), "mixed": (250, 60), "long": (800, 20), "most of a step": (320, 20)}
"""Mean tokens of prompts and of answers; each is drawn between half and one and a half of it."""
BLIND = (("mixed", 0.6), ("short", 0.4), ("long", 0.6))
TIMES = 3  # that each blind load comes in a turn
CALIBRATION = (
    *(("mixed", 0.5), ("short", 4), ("long", 0.5), ("mixed", 0.75), ("long", 2)),
    *(("short", 0.7), ("mixed", 6), ("short", 0.5), ("long", 0.6), ("mixed", 12)),
)
"""Loads by their kinds and their shares of what the server can take, below the knee; an integer is
the number of clients that wait for an answer each. Those of the calibration come before, between
and after the blind ones, so that both see the same machine."""
TEXTS = 2  # of a calibration load, with one of which three of four prompts begin
FEWEST = 20  # requests of a load
Chosen = NDArray[np.bool_] | None
Means = Mapping[str, float]
"""Mean latencies in ms, by metric."""


def drawn(kind: str, count: int, rate: float, random: np.random.Generator) -> Workload:
    """Draw requests of a kind that come at random, `rate` of them in a second."""
    lengths = [random.integers(mean // 2, mean * 3 // 2 + 1, count) for mean in KINDS[kind]]
    arrival = np.cumsum(random.exponential(1 / rate, count))
    return Workload(arrival - arrival[0], *lengths)


def begun_alike(load: Workload, texts: NDArray[Any], begins: NDArray[Any]) -> Workload:
    """Let each prompt begin with so many tokens of one of the texts, and go on by itself."""
    columns = (column.tolist() for column in (texts, begins, load.prompt_tokens - begins))
    pieces = [
        tuple(part for part in ((("shared", text), common), (("own", k), rest)) if part[1])
        for k, (text, common, rest) in enumerate(zip(*columns, strict=True))
    ]
    return replace(load, segments=pieces)


@dataclass
class Interleaved(Drive):
    """Sends calibration loads between blind ones, each of which comes `times` times in a turn.

    Where what it is to predict goes to other servers, `another` is sent between these loads.
    """

    turns: int = 1
    times: int = TIMES
    scenario: Scenario = field(init=False)
    limits: dict[str, float] = field(default_factory=dict)
    order: Iterator[tuple[str, float]] = field(default_factory=lambda: cycle(CALIBRATION))

    def another(self) -> None:
        """Send the next calibration load, three of four prompts begun like others.

        So some chunks follow cached tokens, but no large step, after which a CPU's cache lacks the
        weights. By those alone what such a step costs the next would be the price of the tokens.
        """
        name, load = self._calibration()
        begins = (load.prompt_tokens * self.random.uniform(0.5, 0.95, len(load))).astype(int)
        begins[::4] = 0
        texts = self.random.integers(TEXTS, size=len(load))
        went_on = self._send(name, begun_alike(load, texts, begins), False)
        if self.stopped:
            raise KeyboardInterrupt
        assert went_on, self.fault

    @property
    def part(self) -> float:
        """Seconds for a load."""
        return self.seconds / (2 + self.turns * (len(CALIBRATION) + self.times * len(BLIND)))

    def _loads(self) -> Iterator[tuple[str, Workload, bool]]:
        yield "warm-up", replace(self._drawn("mixed", 1e6, 16), max_concurrency=4), False
        for kind in dict.fromkeys(kind for kind, _ in BLIND):
            load = replace(self._drawn(kind, 1e6, 2 * FEWEST), max_concurrency=FEWEST)
            yield f"closed {kind}", load, False
            self.limits[kind] = self.sent[-1].rate
        blind = {
            f"{kind} at {share:g}": self._drawn(kind, share * self.limits[kind], self.part)
            for kind, share in BLIND
        }
        unseen = self.times * [*blind.items()]
        for again in self.turns * [*unseen, *(len(CALIBRATION) - len(unseen)) * [None]]:
            yield *self._calibration(), False
            if again is not None:
                yield *again, True

    def _calibration(self) -> tuple[str, Workload]:
        kind, share = next(self.order)
        rate = self.limits[kind] * (0.6 if isinstance(share, int) else share)
        load = self._drawn(kind, rate, self.part)
        if isinstance(share, int):
            load = replace(load, arrival=0.0 * load.arrival, max_concurrency=share)
        return f"{kind} at {share:g}", load

    def _drawn(self, kind: str, rate: float, seconds: float) -> Workload:
        count = max(round(rate * seconds), FEWEST) if rate < 1e6 else round(seconds)
        return drawn(kind, count, rate, self.random)


@dataclass(frozen=True)
class Calibrated:
    """What was found of a server by its loads."""

    scenario: Scenario
    limits: Mapping[str, float]  # requests/s that the server takes, by kind
    outcome: Outcome

    def blind(self) -> dict[str, list[tuple[Means, Means]]]:
        """Return predicted and measured means of each blind load, once for each time it came."""
        found: dict[str, list[tuple[Means, Means]]] = {}
        for one in self.outcome.compared:
            if one.load.held_out:
                both = [
                    {name: 1e3 * float(one.values[name][side].mean()) for name in METRICS}
                    for side in (0, 1)
                ]
                found.setdefault(one.load.name, []).append((both[0], both[1]))
        return found

    def predict(self, load: Workload, asked: Chosen = None, **knobs: object) -> Means:
        """Simulate a load on the server, or on one with other knobs; means of those `asked` for."""
        table = self._played(load, knobs)
        chosen = slice(None) if asked is None else asked
        return {name: 1e3 * float(np.nanmean(getattr(table, name)[chosen])) for name in METRICS}

    def throughput(self, load: Workload, **knobs: object) -> float:
        """Return how many requests/s of a load are served, by simulation."""
        return len(load) / float(self._played(load, knobs).finish.max())

    def _played(self, load: Workload, knobs: Mapping[str, object]) -> RequestTable:
        engine = self.scenario.engine.model_dump(exclude_unset=True) | {**knobs}
        scenario = self.scenario.model_copy(update={"engine": EngineConfig(**engine)})
        fit = self.outcome.fit
        return play_load(scenario, resolve(scenario), fit.cost, load, fit.latency).table

    def write(self, folder: Path) -> Path:
        """Write the scenario of the server with its profile; return its path."""
        fit, scenario = self.outcome.fit, self.scenario
        profile = scenario_profile(scenario, fit.cost, fit.residuals, {}, ["a live server"])
        (folder / "profile.yaml").write_text(profile)
        engine = scenario.engine.model_dump(exclude_unset=True)
        raw = {
            "model": scenario.model,
            "gpu": {"name": scenario.gpu.name},
            "engine": engine,
            "cost": {"profile": "profile.yaml"},
            "workload": {"num_prompts": 10, "request_rate": 1, "input_len": 9, "output_len": 9}
            | {"client_latency": fit.latency},
        }
        path = folder / "calibrated.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path


def send(
    live: LiveServer, model: Path, seconds: float, turns: int, times: int = TIMES
) -> Interleaved:
    """Warm a recording server up and send it loads for so many seconds."""
    server = ask(live.url)
    words = [f"engine.{key}={str(value).lower()}" for key, value in ENGINE.items()]
    words += ["gpu=CPU", f"model={model}", "predictor=oracle"]  # clients know how long answers are
    seats = ENGINE["max_num_seqs"]
    steps = steps_of(live.log)
    drive = Interleaved(server, len(VOCABULARY), seats, seconds, steps=steps, turns=turns)
    drive.times, drive.scenario = times, scenario_of(server, None, words)
    drive.random = np.random.default_rng(1)
    warm_up(live)
    drive.run()
    assert not drive.fault, drive.fault
    return drive


def fitted(drive: Interleaved) -> Calibrated:
    """Fit a cost to the steps of all loads that were sent so far and are not blind."""
    outcome = fit_sent(drive.scenario, drive.sent, drive.steps)
    return Calibrated(drive.scenario, drive.limits, outcome)


def warm_up(live: LiveServer, most: int = ENGINE["max_num_batched_tokens"]) -> None:
    """Send a prompt of each length that fits a step, `most` tokens, one after the other."""
    lengths = np.arange(1, most - 1)  # `most` may be all that a request can have, two answered
    measure(live, Workload(0.0 * lengths, lengths, 2 + 0 * lengths, max_concurrency=1))


def measure(live: LiveServer, load: Workload, asked: Chosen = None) -> Means:
    """Send a load, its prompts others each time; return mean latencies in ms of those asked for."""
    found = replay(load, live.url, timeout=120.0, vocab_size=len(VOCABULARY))
    if found.stopped:
        raise KeyboardInterrupt
    answers = found.requests
    assert not [one.error for one in answers if one.error]
    ttft = np.array([one.first - one.sent for one in answers])
    e2el = np.array([one.end - one.sent for one in answers])
    chosen = np.ones(len(load), bool) if asked is None else asked
    after = load.output_tokens - 1.0
    gaps = chosen & (after > 0)
    values = ttft[chosen], (e2el - ttft)[gaps] / after[gaps], e2el[chosen]
    return {n: 1e3 * float(v.mean()) for n, v in zip(("ttft", "tpot", "e2el"), values, strict=True)}


def noise_of_mean(repeats: Sequence[Sequence[float]]) -> float:
    """Return the half-width, relative, of the 95 % interval of a mean of repeats: the noise floor.

    `repeats` has the values of each load; how widely they lie about their mean is taken to be the
    same for all loads, which come in turns on the same machine (a pooled standard deviation).
    """
    apart = [np.asarray(values) / float(np.mean(values)) - 1.0 for values in repeats]
    degrees = sum(len(values) - 1 for values in apart)
    deviation = float(np.sqrt(sum(float(values @ values) for values in apart) / degrees))
    fewest = min(len(values) for values in apart)
    return float(stdtrit(degrees, 0.975)) * deviation / float(np.sqrt(fewest))
