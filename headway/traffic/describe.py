"""What a trace is like: how many requests, how fast, how bursty, how long, how much alike."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.util.errors import printable
from simulator.workload.prefixes import shared_prefix_tokens
from simulator.workload.workload import Floats, Ints, Workload

PERCENTILES = (50, 90, 95, 99)
CLIENTS, NAME_WIDTH = 10, 24  # rows of a table, letters of a name


def describe(workload: Workload, format: str) -> dict[str, Any]:
    """Describe a workload by plain numbers, in seconds and tokens.

    `session_turns` are the requests that wait for the answer to another one, `span_s` goes from the
    first arrival to the last, `request_rate` is None where all arrive at once, `burstiness_cv` that
    of the gaps between arrivals: 0 a metronome, 1 Poisson. Lengths have min, mean, p50, p90, p95,
    p99 and max. `prefix_sharing` is the share of input tokens that are a prefix of an earlier
    prompt, as finely as the trace tells: `prefix_granularity` is the block size of its ids.
    """
    arrival = _timed(workload)
    gaps = np.diff(arrival)
    scaled = np.ldexp(gaps, -np.frexp(gaps.max(initial=0.0))[1])  # so that squares stay finite
    span = float(arrival[-1] - arrival[0]) if len(arrival) else 0.0
    shared = shared_prefix_tokens(workload)
    runs = (n for parts in workload.segments or () for _, n in parts or ())
    return {
        "format": format,
        "source": workload.source,
        "requests": len(workload),
        "session_turns": len(workload) - len(arrival),
        "span_s": span,
        "request_rate": len(gaps) / span if span else None,
        "burstiness_cv": float(scaled.std() / scaled.mean()) if span else None,
        "input_tokens": workload.total_input,
        "output_tokens": workload.total_output,
        "input_len": _lengths(workload.prompt_tokens),
        "output_len": _lengths(workload.output_tokens),
        "prefix_sharing": None if shared is None else shared / workload.total_input,
        "prefix_granularity": max(runs, default=None),
    }


def _lengths(lengths: Ints | Floats) -> dict[str, float]:
    """Return the least, the mean, percentiles (linear) and the most of some lengths or times."""
    least, most = float(lengths.min()), float(lengths.max())
    percentiles = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    between = {f"p{p}": value for p, value in percentiles}
    return {"min": least, "mean": float(lengths.mean()), **between, "max": most}


def describe_text(
    workload: Workload,
    format: str,
    latencies: Mapping[str, Floats] | None = None,
    columns: Sequence[tuple[str, str]] = (),
) -> str:
    """Describe a workload in lines of plain text, for a terminal.

    With what each client asks for, where there are several, and what was measured of each request:
    `latencies` by name, in seconds, NaN where one is not told. `columns`: rows of what became of
    the file's.
    """
    found = describe(workload, format)
    rate, spread, sharing = found["request_rate"], found["burstiness_cv"], found["prefix_sharing"]
    rows = [("format", format), ("requests", f"{found['requests']:,}")]
    if found["session_turns"]:
        rows.append(("later turns", f"{found['session_turns']:,}"))
    rows += [
        ("span", f"{found['span_s']:,.3f} s"),
        ("request rate", "all at once" if rate is None else f"{rate:,.3f} req/s"),
        ("burstiness", _burstiness(spread)),
        *_whole_seconds(workload),
        ("input tokens", f"{found['input_tokens']:,}"),
        ("output tokens", f"{found['output_tokens']:,}"),
        (
            "prefix sharing",
            "no prefix information"
            if sharing is None
            else f"{sharing:.1%} of input tokens (blocks of {found['prefix_granularity']})",
        ),
        ("tokens", "".join(f"{name:>10}" for name in found["input_len"])),
        ("input length", "".join(f"{value:>10,.0f}" for value in found["input_len"].values())),
        ("output length", "".join(f"{value:>10,.0f}" for value in found["output_len"].values())),
    ]
    rows += _latencies(latencies or {})
    if workload.priority is not None and len(set(workload.priority.tolist())) > 1:
        rows.append(("priorities", _counted(workload.priority.tolist())))
    if workload.model is not None and len(set(workload.model)) > 1:
        rows.append(("models", _counted(workload.model)))
    if workload.images is not None and workload.images.any():
        some = int((workload.images > 0).sum())
        rows.append(("images", f"{workload.images.sum():,} in {some:,} requests"))
    lines = [f"{name:<16}{text}" for name, text in (*rows, *columns)]
    return "\n".join([*lines, *_clients(workload)])


def _counted(values: Sequence[int] | Sequence[str]) -> str:
    """Say how many requests have each value; of many values the first alone."""
    levels = sorted(Counter(values).items())
    more = f", and {len(levels) - CLIENTS} more" if len(levels) > CLIENTS else ""
    told = ", ".join(f"{printable(str(level))}: {count:,}" for level, count in levels[:CLIENTS])
    return f"{told}{more} (requests of each)"


def _whole_seconds(workload: Workload) -> Iterator[tuple[str, str]]:
    """Tell where a clock of whole seconds makes bursts that the traffic did not have."""
    seconds = _timed(workload)[_first_answers(workload)]
    _, counts = np.unique(seconds, return_counts=True)
    shared = int(counts[counts > 1].sum())
    if len(counts) > 1 and shared and (seconds == np.floor(seconds)).all():
        yield (
            "resolution",
            f"whole seconds: {shared:,} requests share theirs, {counts.max():,} at most; "
            "trace convert --spread-seconds parts them",
        )


def _timed(workload: Workload) -> Floats:
    """Return the arrivals of those who come at a time of their own, s."""
    return workload.arrival[~np.isnan(workload.arrival)]


def _first_answers(workload: Workload) -> npt.NDArray[np.bool_]:
    """Return which of these are no further answer to the prompt of the request before them."""
    timed = np.flatnonzero(~np.isnan(workload.arrival)).tolist()
    parts, at = workload.segments or [None] * len(workload), workload.arrival
    again = (parts[k] and parts[k] == parts[i] and at[k] == at[i] for i, k in pairwise(timed))
    return np.array([True, *(not one for one in again)][: len(timed)], np.bool_)


def spread_seconds(workload: Workload) -> None:
    """Part requests that share an arrival time: n of them go 1/n s apart, in their order.

    Answers to one prompt stay together. For traces whose clock has whole seconds; ValueError where
    it has finer ones.
    """
    timed, first = ~np.isnan(workload.arrival), _first_answers(workload)
    seconds, counts = np.unique(workload.arrival[timed][first], return_counts=True)
    if not (seconds == np.floor(seconds)).all():
        raise ValueError("the times are finer than whole seconds")
    apart = np.concatenate(
        [at + np.arange(n) / n for at, n in zip(seconds.tolist(), counts.tolist(), strict=True)]
    )
    workload.arrival[timed] = apart[np.cumsum(first) - 1]


def _latencies(latencies: Mapping[str, Floats]) -> Iterator[tuple[str, str]]:
    """Tabulate latencies, in ms, under the heads of the lengths."""
    for name, seconds in latencies.items():
        known = seconds[~np.isnan(seconds)]
        if len(known):
            told = "".join(f"{value:>10,.1f}" for value in _lengths(1e3 * known).values())
            few = "" if len(known) == len(seconds) else f"  of {len(known):,} requests"
            yield f"{name} (ms)", told + few


def _clients(workload: Workload) -> Iterator[str]:
    """Tabulate what each client sent, most requests first; of many the last as one row."""
    if workload.client is None or len(set(workload.client)) < 2:
        return
    sent: dict[str, list[int]] = {}
    for k, client in enumerate(workload.client):
        sent.setdefault(client, []).append(k)
    rows = sorted(sent.items(), key=lambda one: (-len(one[1]), one[0]))
    if len(rows) > CLIENTS + 1:
        others = [k for _, members in rows[CLIENTS:] for k in members]
        rows[CLIENTS:] = [(f"{len(rows) - CLIENTS:,} others", others)]
    heads = f"{'requests':>12}{'share':>8}{'mean input':>12}{'output':>10}"
    yield f"{'client':<{NAME_WIDTH + 1}}{heads}"
    for client, members in rows:
        name = printable(client)
        name = name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"
        share = f"{len(members):>12,}{len(members) / len(workload):>8.1%}"
        prompt = workload.prompt_tokens[members].mean()
        output = workload.output_tokens[members].mean()
        yield f"{name:<{NAME_WIDTH + 1}}{share}{prompt:>12,.0f}{output:>10,.0f}"


def _burstiness(spread: float | None) -> str:
    """Tell the spread of the gaps, and as what vLLM's knob of that name would imitate it."""
    if spread is None:
        return "none"
    knob = f"; with workload.burstiness: {spread**-2:.2g}" if spread else ""
    return f"CV of gaps {spread:.2f} (Poisson: 1{knob})"
