"""Rollouts of reinforcement learning: groups of samples, step after step.

A step begins `num_prompts` prompts with `workload.n` samples each, all at once, and ends when so
many groups are complete: then the weights change, and with them every KV cache is void. So each
step is a run of its own, on idle engines. With `oversampling` more groups are begun than are
wanted, and the slowest are cut off: thrown away, or with `partial` gone on with in the next step,
from the tokens that are there (APRIL, 2025; Kimi k1.5, 2025). Nothing that is cut can have changed
what was before, so a step is simulated to its last sample, and read up to its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

import numpy as np

from simulator.core.log import Log
from simulator.core.request import Segments
from simulator.scenario.scenario import Scenario
from simulator.simulation.run import run
from simulator.util.errors import HeadwayError
from simulator.workload.generate import Generator, generate
from simulator.workload.workload import Floats, Ints, Workload

TAIL = 0.9  # share of a step's samples after which its tail begins


class RolloutStep(NamedTuple):
    """What came of one step."""

    seconds: float  # until enough groups were complete
    tail: float  # s of these in which less than a tenth of the samples it ends with was left
    samples: int  # that it ends with
    tokens: int  # that came out in it
    wasted: int  # of these, of samples that were thrown away
    stale: int  # tokens of earlier weights in the samples that it ends with
    dollars_per_hour: float | None  # of all GPUs


@dataclass(slots=True, eq=False)
class _Sample:
    """One answer to a prompt, of which earlier steps have said some."""

    prompt: Segments
    tokens: int  # in all
    said: int = 0
    finish: float = 0.0  # s, in the step at hand; 0: in an earlier one
    done: bool = False


@dataclass(slots=True, eq=False)
class _Group:
    """The samples of one prompt."""

    samples: list[_Sample] = field(default_factory=list)

    @property
    def complete(self) -> float:
        """When its last sample ends, s."""
        return max(sample.finish for sample in self.samples)


def rollouts(scenario: Scenario) -> Iterator[RolloutStep]:
    """Yield the steps that a scenario's `rollouts` asks for; HeadwayError where it cannot be."""
    generator, asked = scenario.workload.generator, scenario.rollouts
    if scenario.workload.trace is not None or generator.sessions is not None:
        raise HeadwayError("rollouts: need a generator of prompts, without trace and sessions")
    wanted = generator.num_prompts
    begun = ceil(wanted * (1 + asked.oversampling))
    carried: list[_Group] = []
    for number in range(asked.steps):
        fresh = _draw(generator, begun - len(carried), scenario.seed + number)
        groups = [*carried, *fresh]
        step, carried = _step(scenario, groups, wanted, partial=asked.partial)
        yield step


def _draw(generator: Generator, count: int, seed: int) -> list[_Group]:
    """Draw so many prompts and their samples."""
    if count < 1:
        return []
    n = generator.n
    work = generate(replace(generator, num_prompts=count, max_tokens=None), seed)
    groups = [_Group() for _ in range(count)]
    for at, tokens in enumerate(work.output_tokens.tolist()):
        prompt = work.segments[at] if work.segments else None
        named = prompt or ((("prompt", seed, at // n), int(work.prompt_tokens[at])),)
        groups[at // n].samples.append(_Sample(_named(named, seed), tokens))
    return groups


def _named(prompt: Segments, seed: int) -> Segments:
    """Let prompts of different steps differ, where they are no one's prefix."""
    return tuple(
        ((*name, seed) if isinstance(name, tuple) and name[0] == "in" else name, count)
        for name, count in prompt
    )


def _step(
    scenario: Scenario, groups: list[_Group], wanted: int, *, partial: bool
) -> tuple[RolloutStep, list[_Group]]:
    """Run one step; return what came of it, and the groups that the next one goes on with."""
    open_ = [sample for group in groups for sample in group.samples if not sample.done]
    result = run(scenario, workload=_workload(open_)).whole()
    table = result.request_table()
    if not table.completed.all():
        at = int(np.flatnonzero(~table.completed)[0])
        length = f"{_length(open_[at].prompt):,} tokens and an answer of {open_[at].tokens:,}"
        raise HeadwayError(f"rollouts: a prompt of {length} could never be served")
    for sample, finish in zip(open_, table.finish.tolist(), strict=True):
        sample.finish = finish
    ranked = sorted(groups, key=lambda group: group.complete)
    trained, others = ranked[:wanted], ranked[wanted:]
    end = trained[-1].complete
    said = tokens_by(result.logs, len(open_), end)
    stale = sum(sample.said for group in trained for sample in group.samples)
    wasted = 0
    for sample, count in zip(open_, said.tolist(), strict=True):
        sample.said += count
        sample.done = sample.finish <= end
    for sample in (sample for group in others for sample in group.samples):
        wasted += 0 if partial else sample.said
        sample.finish = 0.0
    finishes = [sample.finish for group in trained for sample in group.samples]
    own = result.summary()["headway"]
    step = RolloutStep(
        seconds=end,
        tail=end - float(np.quantile(finishes, TAIL, method="higher")),
        samples=len(finishes),
        tokens=int(said.sum()),
        wasted=wasted,
        stale=stale,
        dollars_per_hour=own.get("cluster", own)["dollars_per_hour"],
    )
    order = {group: at for at, group in enumerate(groups)}  # who has waited longest goes first
    return step, sorted(others, key=order.__getitem__) if partial else []


def _length(prompt: Segments) -> int:
    return sum(count for _, count in prompt)


def _workload(samples: Sequence[_Sample]) -> Workload:
    """Send samples at once, each with what it has said before behind its prompt."""
    segments: list[Segments | None] = [
        (*one.prompt, (("said", at), one.said)) if one.said else one.prompt
        for at, one in enumerate(samples)
    ]
    return Workload(
        np.zeros(len(samples)),
        np.array([_length(parts or ()) for parts in segments], np.int64),
        np.array([one.tokens - one.said for one in samples], np.int64),
        segments=segments,
        source="rollouts",
    )


def tokens_by(logs: Sequence[Log], size: int, time: float) -> Ints:
    """Count the tokens of each of `size` requests that have come out by a time, s."""
    found = np.zeros(size, np.int64)
    for log in logs:
        runs = log.runs
        ends: Floats = np.asarray(log.tick_ends, np.float64)
        over = int(np.searchsorted(ends, time, side="right"))  # ticks that are over
        ticks = np.clip(over - runs["first_tick"], 0, runs["ticks"])
        np.add.at(found, runs["id"], np.where(runs["start"] <= time, 1 + ticks, 0))
    return found
