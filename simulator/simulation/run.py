"""From a scenario to a result: the main verb of the package."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import simpy
from simpy.core import EmptySchedule

from simulator.core.log import Log
from simulator.costs.cost_model import CostModel
from simulator.costs.noise import Noise
from simulator.engine.async_replica import make_replica
from simulator.engine.client import Client
from simulator.engine.replica import REJECTED, Replica
from simulator.engine.stream_client import StreamClient
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.policies.predictor import make_predictor
from simulator.scenario.assemble import Parts, assemble, make_scheduler
from simulator.scenario.policy_table import find_policy
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayWarning
from simulator.util.user_errors import blamed
from simulator.workload.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

    from simulator.cluster.run import Story
    from simulator.results.kv_transfers import Transfers
    from simulator.results.tables import Tries

EVENTS_PER_LOOK = 4096  # events between two looks at the progress bar


@dataclass(slots=True)
class Result:
    """What happened: the facts, and the tables and metrics derived from them."""

    scenario: Scenario
    workload: Workload
    sent: npt.NDArray[np.float64]  # s, when each request went to the engine; NaN: it never did
    logs: list[Log]  # one per replica
    parts: Parts
    interrupted: bool = False
    warnings: list[str] = field(default_factory=list)
    warmup: float = 0.0  # s from the first request sent that the metrics leave out
    cooldown: float = 0.0  # s before the last one sent
    hints: npt.NDArray[np.int64] | None = None  # predicted output tokens; 0: never sent
    cluster: "Story | None" = None
    _summary: dict[str, Any] | None = None
    _time_parts: dict[str, npt.NDArray[np.float64]] | None = None

    @property
    def model(self) -> ModelSpec:
        """The model that was served."""
        return self.parts.model

    @property
    def gpu(self) -> Gpu:
        """What it was served on."""
        return self.parts.gpu

    @property
    def costs(self) -> list[CostModel]:
        """The cost model of each replica."""
        if self.cluster is None:
            return [self.parts.cost] * len(self.logs)
        return [parts.cost for parts in self.cluster.parts]

    @property
    def tries(self) -> "Tries | None":
        """What a cluster's clients sent again, and what they gave up."""
        return None if self.cluster is None else self.cluster.tries

    @property
    def transfers(self) -> "Transfers | None":
        """What became of KV caches, where a cluster prefills and decodes apart."""
        return None if self.cluster is None else self.cluster.transfers

    def summary(self) -> dict[str, Any]:
        """Metrics under the names of `vllm bench serve`, and a block `headway` of our own."""
        from simulator.diagnosis.rules import diagnose
        from simulator.results.metrics import summarize_result

        if self._summary is None:
            summary: dict[str, Any] = summarize_result(self)
            summary["headway"]["diagnosis"] = diagnose(self, summary)
            self._summary = summary
        return self._summary

    def time_parts(self) -> dict[str, npt.NDArray[np.float64]]:
        """Give the parts of each completed request's e2el in seconds, by id."""
        from simulator.results.breakdown import break_down
        from simulator.results.tables import RETRY, gather_requests

        if self._time_parts is None and self.transfers is not None:
            from simulator.results.kv_transfers import time_parts

            self._time_parts = time_parts(self, self.transfers)
        if self._time_parts is None:
            table = gather_requests(self.workload, self.sent, self.logs)
            self._time_parts = break_down(table, self.logs, self.costs)
        cluster = self.scenario.cluster
        if RETRY not in self._time_parts and cluster is not None and cluster.tries_again:
            table = gather_requests(self.workload, self.sent, self.logs, self.tries)
            self._time_parts = {RETRY: table.retry_time} | self._time_parts
        return self._time_parts

    @property
    def requests(self) -> "pd.DataFrame":
        """One row per request that was sent, with the columns of requests.csv."""
        from simulator.results.write import request_frame

        return request_frame(self)

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per step, or per stretch of `steps` equal ones, with the columns of steps.csv."""
        from simulator.results.write import step_frame

        return step_frame(self)


def run(
    scenario: Scenario,
    *,
    stepwise: bool = False,
    progress: Callable[[float, int, int], None] | None = None,
    workload: Workload | None = None,
    cost: CostModel | None = None,
    noise: Noise | None = None,
) -> Result:
    """Simulate a scenario.

    `stepwise` executes every step by itself, for the same result. `workload` and `cost` take the
    place of the scenario's; `noise` says how far off the cost is in this run, None: not at all.
    `progress(simulated seconds, requests done, requests in all)` is called now and then. An
    interrupt (Ctrl-C) ends the run early: the result then holds what was done until then. Raises
    ValueError, `field: what is wrong`, where the scenario contradicts itself, and HeadwayError
    where a file is at fault.
    """
    if scenario.cluster is not None:
        from simulator.cluster.run import run_cluster

        return run_cluster(
            scenario, stepwise=stepwise, progress=progress, workload=workload, cost=cost
        )
    parts = assemble(scenario)
    if cost is not None:
        parts = replace(parts, cost=cost)
    if noise is not None:
        parts = replace(parts, cost=noise.on(parts.cost))
    if workload is None:
        workload = scenario.make_workload()
    else:
        workload.check()
    scheduler = make_scheduler(scenario, parts, workload.segments is not None)
    env = simpy.Environment()
    replica = make_replica(env, scheduler, parts.cost, leap=not stepwise)
    try:
        return play(scenario, parts, workload, replica, progress)
    except Exception as error:
        told = blamed(find_policy(scenario)[0], error)
        if told is None:
            raise
        raise told from error


def play(
    scenario: Scenario,
    parts: Parts,
    workload: Workload,
    replica: Replica,
    progress: Callable[[float, int, int], None] | None = None,
) -> Result:
    """Send a workload to a replica, whatever its clock and its executor, until all is done."""
    env = replica.env
    predictor = make_predictor(scenario.predictor, workload, scenario.seed)
    client = Client(env, workload, replica.submit, predictor)
    replica.on_finish = client.finished
    interrupted = drive(env, client, progress)
    if interrupted:
        replica.abandon()
    if (tier := replica.scheduler.blocks.tier) is not None:
        replica.log.offloaded = tier.stored
    result = Result(
        scenario, workload, np.frombuffer(client.sent), [replica.log], parts, interrupted
    )
    if client.hints is not None:
        result.hints = np.frombuffer(client.hints, np.int64)
    for message in (*_all_rejected(result, replica), *parts.cost.outside(replica.log.steps)):
        result.warnings.append(message)
        warnings.warn(message, HeadwayWarning, stacklevel=2)
    return result


def drive(
    env: simpy.Environment,
    client: Client | StreamClient,
    progress: Callable[[float, int, int], None] | None,
) -> bool:
    """Let the clock run until all is done; say whether the user broke it off."""
    with no_garbage_collection():
        interrupted = _loop(env, client, progress)
    if client.done < len(client.sent) and not interrupted:
        raise RuntimeError(f"{len(client.sent) - client.done} requests never ended")
    return interrupted


def _all_rejected(result: Result, replica: Replica) -> list[str]:
    """Say why, where not one request could be served."""
    ended, load = replica.log.requests, result.workload
    if not len(ended) or not (ended["reason"] == REJECTED).all():
        return []
    longest, room = replica.scheduler.max_model_len, replica.scheduler.room
    long = int((load.prompt_tokens[ended["id"]] >= longest).sum())
    large = len(ended) - long
    reasons = [
        f"{long:,} with prompts of max_model_len ({longest:,}) tokens or more" if long else "",
        f"{large:,} too large for {room}" if large else "",
    ]
    return [f"all {len(ended):,} requests were rejected: {', '.join(filter(None, reasons))}"]


def _loop(
    env: simpy.Environment,
    client: Client | StreamClient,
    progress: Callable[[float, int, int], None] | None,
) -> bool:
    """Run until nothing is left to happen; say whether the user broke it off."""
    step = env.step
    total = len(client.sent)
    try:
        while True:
            for _ in repeat(None, EVENTS_PER_LOOK):
                step()
            if progress is not None:
                progress(env.now, client.done, total)
    except EmptySchedule:
        return False
    except KeyboardInterrupt:
        return True


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Spare the loop the collector: its objects go by reference count."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
