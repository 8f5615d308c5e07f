"""A measured run's requests as a workload: recorded ones replayed, others made from its numbers."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np

from calibration.measured.requests import Floats, Ints, Requests
from calibration.measured.runs import Run
from calibration.text_files import read_json
from simulator.core.request import Segments
from simulator.util.errors import HeadwayWarning
from simulator.workload.workload import FRONTENDS, Frontend, Workload

MAX_IDLE = 0.25  # s after an answer at which the next request still counts as waiting for it
STAGE_GAP = 1.0  # s without work before a load generator's next stage; within one there are 0.5
WAVE = 0.1  # s
ROUNDS = 10  # per client where no number is recorded; AIConfigurator's means are of so many
DEFAULT_REQUESTS = 1000  # of an open one
INFERENCEMAX_RATIO = (0.8, 1.0)  # of the nominal lengths: --random-range-ratio 0.8 of InferenceMAX
DEFAULT_RATIO = (0.98, 1.02)
"""Of the mean, where the spread of lengths is not recorded: texts come within a few tokens of what
a load generator asks for. Requests of exactly one length in a closed loop march in step for ever,
all prompts of a wave at once: so did AIConfigurator's, whose TTFT is the same for any answers."""
UNTOLD_RATIO = (0.8, 1.2)  # likewise, for what an untold spread of lengths may change
ROUNDS_OF_HALVES = 60  # of an interval: more than a double tells apart
WARM_GAP = 0.5  # s between requests that fill the prefix cache before a run


def frontend(run: Run) -> Frontend:
    """Return what a run's requests pass before the scheduler, by who took the times."""
    return FRONTENDS["client" if run.word("clock").lower().startswith("client") else "server"]


def replay(run: Run, requests: Requests, config: Mapping[str, object]) -> Workload:
    """Play what was recorded: arrivals, lengths, and which request waited for which."""
    told = requests.asked.get("segments") is not None
    asked = {k: v for k, v in requests.asked.items() if v is not None}
    if requests.conversation is not None and requests.client is not None and not told:
        if requests.prompt_id is not None:
            text = f"{run.run_id}: prompt_id: without effect: conversations say what prompts share"
            warnings.warn(text, HeadwayWarning, stacklevel=2)
        return replace(_conversations(requests), **asked)
    arrival, after, delay = _arrivals_and_delays(requests)
    work = Workload(
        arrival,
        requests.prompt,
        requests.output,
        client=requests.client,
        segments=None if told else _recorded_segments(run, requests, config),
        after=after,
        delay=delay,
        cancel_after=requests.patience,
        source=run.run_id,
    )
    return replace(work, **asked)


def _recorded_segments(
    run: Run, requests: Requests, config: Mapping[str, object]
) -> list[Segments | None] | None:
    """Return what prompts share: by their ids, else as a pool comes round, else a common prefix."""
    if requests.prompt_id is not None and any(requests.prompt_id):
        return _prompt_segments(requests.prompt_id, requests.prompt)
    if pool := run.count("prompt_pool"):
        return _prompt_segments((np.arange(len(requests)) % pool).tolist(), requests.prompt)
    prefix = _common_prefix(run, requests.prompt, config)
    stages = _stages(requests, config) if prefix else None
    return _prefix_segments(requests.prompt, prefix, stages) if prefix else None


def _arrivals_and_delays(requests: Requests) -> tuple[Floats, Ints | None, Floats | None]:
    """Return arrivals, and which request each one waited for, how long.

    A stage of requests that were sent one by one may take longer in simulation, or less; what
    came after it keeps its distance from its end.
    """
    arrival = requests.arrival.copy()
    chained = _count_sequential(requests)
    if chained < 2:
        return arrival, None, None
    ends = requests.ends
    before = np.minimum(np.arange(len(arrival)) - 1, chained - 1)
    delay = arrival - ends[before]
    if (delay[chained:] < 0).any():  # still at work when others came
        before[chained:] = -1
    before[0] = -1
    waits = before >= 0
    return np.where(waits, np.nan, arrival), before, np.where(waits, delay, 0.0)


def _count_sequential(requests: Requests) -> int:
    """Count the first requests that were sent one after the other, each upon the last answer."""
    ends = requests.ends
    idle = requests.arrival[1:] - ends[:-1]
    breaks = np.flatnonzero(~((idle >= 0) & (idle < MAX_IDLE)))
    return 1 + int(breaks[0]) if breaks.size else len(requests)


def _common_prefix(run: Run, prompts: Ints, config: Mapping[str, object]) -> int:
    """Return the tokens that all prompts begin with: as configured or noted, else by the hits."""
    workload = config.get("workload")
    if isinstance(workload, Mapping):
        told = workload.get("prefix_tokens", workload.get("shared_prefix_tokens"))
        if isinstance(told, int | float) and told > 0:
            return int(told)
    noted = re.search(
        r"(\d[\d,]*)[- ]?(?:token|tok)s? (?:shared|common|system)[- ]?(?:prefix|prompt)",
        run.word("notes"),
    )
    if noted:
        return int(noted[1].replace(",", ""))
    if "prefillheavy" in run.run_id or "prefill-heavy" in run.run_id:
        return 1024
    return round((run.number("prefix_hit_frac") or 0.0) * float(prompts.mean()))


def _prompt_segments(ids: Sequence[object], prompts: Ints) -> list[Segments | None]:
    """Let prompts of one id be the same; one whose id is empty shares nothing."""
    return [
        None if name == "" else ((("prompt", name), size),)
        for name, size in zip(ids, prompts.tolist(), strict=True)
    ]


def _stages(requests: Requests, config: Mapping[str, object]) -> Ints | None:
    """Number the stages of a sweep that has a prefix of its own in each; None: one for all.

    GuideLLM seeds the texts of a stage by its number (iteration_count of its synthetic data, from
    0.4 on), so the first prompt of each is cold. The next one begins after STAGE_GAP without work.
    """
    workload = config.get("workload")
    if not isinstance(workload, Mapping) or "guidellm" not in str(workload.get("tool")).lower():
        return None
    done = np.maximum.accumulate(requests.ends)
    return np.append(0, np.cumsum(requests.arrival[1:] - done[:-1] > STAGE_GAP))


def _prefix_segments(
    prompts: Ints, prefix: int, stages: Ints | None = None
) -> list[Segments | None]:
    """Let all prompts, or those of each stage, begin alike, and each go on by itself."""
    segments: list[Segments | None] = []
    for k, prompt in enumerate(prompts.tolist()):
        common = min(prefix, prompt)
        own = ((("in", k), prompt - common),) if prompt > common else ()
        name = "prefix" if stages is None else ("prefix", int(stages[k]))
        segments.append(((name, common), *own))
    return segments


def _conversations(requests: Requests) -> Workload:
    """Let each client send its next turn as long after the last answer as it did.

    At its recorded time, where nobody took the time of that answer. A turn's prompt begins like the
    one before it in its conversation, with its answer behind.
    """
    total = len(requests)
    assert requests.client is not None
    assert requests.conversation is not None
    ends = requests.ends
    after, delay = np.full(total, -1), np.zeros(total)
    arrival = requests.arrival.copy()
    sent: dict[str, int] = {}  # the last request of each client
    turn: dict[str, int] = {}  # and of each conversation
    segments: list[Segments | None] = []
    for k in range(total):
        client, conversation = requests.client[k], requests.conversation[k]
        if (last := sent.get(client)) is not None and not np.isnan(ends[last]):
            after[k], delay[k] = last, max(0.0, requests.arrival[k] - ends[last])
            arrival[k] = np.nan
        sent[client] = k
        segments.append(_turn_segments(segments, requests, turn.get(conversation), k))
        turn[conversation] = k
    return Workload(
        arrival,
        requests.prompt,
        requests.output,
        client=requests.client,
        segments=segments,
        after=after,
        delay=delay,
        cancel_after=requests.patience,
        source="conversations",
    )


def _turn_segments(
    segments: list[Segments | None], requests: Requests, last: int | None, k: int
) -> Segments:
    """Return a turn's contents: history, answer, and what is new; cut to its length."""
    left = int(requests.prompt[k])
    if last is None:
        return ((("in", k), left),)
    parts: list[tuple[object, int]] = []
    for name, count in (*(segments[last] or ()), (("out", last), int(requests.output[last]))):
        taken = min(count, left)
        if taken:
            parts.append((name, taken))
        left -= taken
    if left:
        parts.append((("in", k), left))
    return tuple(parts)


def generate(run: Run, seed: int = 0, spread: tuple[float, float] = DEFAULT_RATIO) -> Workload:
    """Make the workload of a run that records rate or concurrency and mean lengths alone.

    With both, requests come at the rate and wait at the client for one of the seats. `spread` is
    that of lengths around their mean, where it is not recorded.
    """
    concurrency = run.count("concurrency")
    rate = run.number("rate_rps")
    if concurrency is None and rate is None:
        raise ValueError("neither per-request file nor rate_rps nor concurrency is recorded")
    count = _count(run, concurrency, rate)
    lengths, outputs = np.random.default_rng(seed).spawn(2)
    nominal_in, nominal_out = _nominal_lengths(run)
    means = run.number("mean_input_tokens"), run.number("mean_output_tokens")
    cap, cv = run.count("output_cap"), run.number("output_cv")
    if cap is not None and cv is not None:
        raise ValueError(
            "output_cap: cannot be used with output_cv: answers that end by themselves"
        )
    prompt = _lengths(
        lengths, "input", nominal_in, means[0], count, spread=spread, cv=run.number("input_cv")
    )
    output = _lengths(
        outputs, "output", nominal_out, means[1], count, spread=spread, cv=cv, cap=cap
    )
    arrival = np.zeros(count)
    if rate is not None and isfinite(rate):
        arrival = _arrivals(run, rate, count, seed)
    load = Workload(arrival, prompt, output, max_concurrency=concurrency, source=run.run_id)
    if prefix := _common_prefix(run, prompt, {}):
        load.segments = _prefix_segments(prompt, prefix)
    return load


def draw_from_pool(run: Run, load: Workload) -> tuple[Workload, int]:
    """Let the prompts of a run's pool come round; give the requests before, too, if some are warm.

    The pool's first prompts are the cold ones. A request of one token for each of the others has
    it in the prefix cache, `WARM_GAP` apart, before the run begins; the second value counts these.
    """
    pool = min(run.count("prompt_pool") or 0, len(load))
    if not pool:
        return load, 0
    warm = np.arange(_cold_prompts(run, pool, load.prompt_tokens), pool)
    ids = np.append(warm, np.arange(len(load)) % pool)
    prompts = load.prompt_tokens[ids]
    head = np.arange(len(warm)) * WARM_GAP
    return Workload(
        np.append(head, load.arrival + len(warm) * WARM_GAP),
        prompts,
        np.append(np.ones(len(warm), np.int64), load.output_tokens),
        segments=_prompt_segments(ids.tolist(), prompts),
        max_concurrency=load.max_concurrency,
        source=load.source,
    ), len(warm)


def first_wave(load: Workload) -> float:
    """Return the share of a closed loop's requests that are sent at once, before all others.

    Clients of a recorded one begin one after the other, within `WAVE`.
    """
    clients = load.max_concurrency or len(load) * (load.after is not None)
    return min(clients, int((load.arrival <= np.nanmin(load.arrival) + WAVE).sum())) / len(load)


def limit_patience(load: Workload, seconds: float | None) -> None:
    """Let each client give up so long after sending, if it has not before; None: none does."""
    if seconds is not None:
        told = load.cancel_after
        load.cancel_after = np.fmin(np.nan if told is None else told, np.full(len(load), seconds))


def _cold_prompts(run: Run, pool: int, prompts: Ints) -> int:
    """Count the pool's prompts that no earlier request has left in the prefix cache.

    As many as `prefix_hit_frac` says, if prompts that are found are so but for their last, partial
    block; all where it is not recorded.
    """
    hits = run.number("prefix_hit_frac")
    block = run.count("block_size") or 16
    found = float(((prompts - 1) // block * block).sum() / prompts.sum())
    if hits is None or not found:
        return pool
    return min(pool, max(0, round(len(prompts) * (1.0 - hits / found))))


def _count(run: Run, concurrency: int | None, rate: float | None) -> int:
    """Return the number of requests; where it is not recorded, as many as say something."""
    if told := run.count("n_requests"):
        return told
    count = ROUNDS * (concurrency or DEFAULT_REQUESTS // ROUNDS)
    seconds = run.number("duration_s")
    if seconds and rate is not None and isfinite(rate):
        count = max(1, round(seconds * rate))
    warnings.warn(f"n_requests: not recorded: {count} are taken", HeadwayWarning, stacklevel=2)
    return count


def _arrivals(run: Run, rate: float, count: int, seed: int) -> Floats:
    """Return arrivals at a rate: Poisson, or as `arrival` and `burstiness` say.

    Burstiness is vLLM bench's: the shape of gamma-distributed gaps, 1 / CV^2.
    """
    word = run.word("arrival").lower()
    if re.search(r"constant|uniform|determinist|even", word):
        return np.arange(count) / rate
    shape = run.number("burstiness")
    if shape is None and (told := re.search(r"burstiness\D{0,3}(\d+(?:\.\d+)?)", word)):
        shape = float(told[1])
    if shape is None and (told := re.search(r"\bcv\D{0,3}(\d+(?:\.\d+)?)", word)):
        shape = 1 / max(float(told[1]), 0.01) ** 2
    draw = np.random.default_rng([seed, 1])
    if shape:
        gaps = draw.gamma(shape, 1 / (rate * shape), count)
    else:
        gaps = draw.exponential(1 / rate, count)
    return np.asarray(np.cumsum(gaps) - gaps[0])


def _nominal_lengths(run: Run) -> tuple[float | None, float | None]:
    found = re.search(r"isl ?/ ?osl[ :=]*(\d+) ?/ ?(\d+)", run.word("notes").lower())
    found = found or re.search(r"isl[ :=]*(\d+)\D{1,3}osl[ :=]*(\d+)", run.word("notes").lower())
    found = found or re.search(r"_(\d+)x(\d+)_c\d+", run.run_id)
    return (float(found[1]), float(found[2])) if found else (None, None)


def _lengths(
    draw: np.random.Generator,
    what: str,
    nominal: float | None,
    mean: float | None,
    count: int,
    *,
    spread: tuple[float, float],
    cv: float | None = None,
    cap: int | None = None,
) -> Ints:
    """Return lengths: uniform near the nominal where the mean says so, else near the mean.

    Where the mean is the nominal one itself, each is: a load generator was told no spread. `cv` is
    the coefficient of variation of lengths, gamma-distributed; 0: all are equal. `cap` is the most
    that an answer may have, which ends before with the same chance at each token.
    """
    middle = mean or nominal
    if not middle:
        raise ValueError(f"mean_{what}_tokens: is not recorded, nor nominal lengths in notes")
    if cv == 0 or (cap is not None and middle >= cap):
        return np.full(count, round(middle))
    if cv is not None:
        return np.maximum(1, draw.gamma(cv**-2, middle * cv**2, count).round()).astype(np.int64)
    if cap is not None:
        cut = np.minimum(draw.exponential(_uncut(middle, cap), count), cap)
        return np.maximum(1, cut.round()).astype(np.int64)
    if nominal == mean:
        return np.full(count, round(middle))
    if nominal and mean and abs(mean / nominal - sum(INFERENCEMAX_RATIO) / 2) < 0.02:
        low, high = (round(part * nominal) for part in INFERENCEMAX_RATIO)
        return draw.integers(low, high + 1, count)
    low, high = (max(1, round(part * middle)) for part in spread)
    return draw.integers(low, high + 1, count)


def _uncut(mean: float, cap: float) -> float:
    """Return the mean of an exponential distribution that has this mean when cut at `cap`."""
    low, high = mean, 1e3 * cap
    for _ in range(ROUNDS_OF_HALVES):
        middle = (low + high) / 2
        short = middle * -np.expm1(-cap / middle) < mean
        low, high = (middle, high) if short else (low, middle)
    return low


def tells_lengths(run: Run) -> bool:
    """Return whether a run tells how equal its answers are."""
    told = (run.number("output_cv"), run.count("output_cap"), _nominal_lengths(run)[1])
    return any(one is not None for one in told)


def read_config(path: Path | None) -> Mapping[str, object]:
    """Read the JSON beside a per-request file, if there is one."""
    return read_json(path) if path is not None and path.is_file() else {}
