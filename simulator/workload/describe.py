"""What a trace is like: how many requests, how fast, how bursty, how long, how much alike."""

from collections.abc import Hashable
from typing import TypedDict

import numpy as np

from simulator.workload.workload import Ints, Workload

PERCENTILES = (50, 90, 95, 99)


class Description(TypedDict):
    """What `describe` finds, in seconds and tokens."""

    format: str
    source: str
    requests: int
    session_turns: int  # of the requests, those that wait for the answer to another one
    span_s: float  # from the first arrival to the last
    request_rate: float | None  # per second; None: all arrive at once
    burstiness_cv: float | None  # of the gaps between arrivals: 0 a metronome, 1 Poisson
    input_tokens: int
    output_tokens: int
    input_len: dict[str, float]  # min, mean, p50, p90, p95, p99, max
    output_len: dict[str, float]
    prefix_sharing: float | None  # of the input tokens; None: the prompts have no contents
    prefix_granularity: int | None  # tokens of the longest run that has a name


def describe(workload: Workload, format: str) -> Description:
    """Describe a workload by plain numbers.

    `prefix_sharing` is the share of input tokens that are a prefix of an earlier prompt, as
    finely as the trace tells: `prefix_granularity` is the block size of its ids.
    """
    arrival = workload.arrival[~np.isnan(workload.arrival)]
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


def _lengths(lengths: Ints) -> dict[str, float]:
    """Give the least, the mean, percentiles (linear) and the most of some lengths."""
    least, most = float(lengths.min()), float(lengths.max())
    percentiles = zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)
    between = {f"p{p}": value for p, value in percentiles}
    return {"min": least, "mean": float(lengths.mean()), **between, "max": most}


def shared_prefix_tokens(workload: Workload) -> int | None:
    """Count the input tokens that are a prefix of an earlier prompt; None without contents.

    A cache without bounds would find as many, but for the rounding to its own blocks. What has
    been generated counts only once it has been part of a prompt.
    """
    if not workload.segments or not any(workload.segments):
        return None
    shared = 0
    longest: dict[tuple[int, Hashable], int] = {}  # of the runs that follow a prefix, by name
    follow: dict[tuple[int, Hashable, int], int] = {}  # the prefix that a whole run leads to
    for parts in workload.segments:
        prefix = 0
        seen = True
        for name, count in parts or ():
            known = longest.get((prefix, name), 0)
            if seen:
                shared += min(known, count)
            if count > known:
                longest[prefix, name] = count
            seen = seen and (prefix, name, count) in follow
            prefix = follow.setdefault((prefix, name, count), len(follow) + 1)
    return shared


def describe_text(workload: Workload, format: str) -> str:
    """Describe a workload in lines of plain text, for a terminal."""
    found = describe(workload, format)
    rate, spread, sharing = found["request_rate"], found["burstiness_cv"], found["prefix_sharing"]
    rows = [("format", format), ("requests", f"{found['requests']:,}")]
    if found["session_turns"]:
        rows.append(("later turns", f"{found['session_turns']:,}"))
    rows += [
        ("span", f"{found['span_s']:,.3f} s"),
        ("request rate", "all at once" if rate is None else f"{rate:,.3f} req/s"),
        ("burstiness", _burstiness(spread)),
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
    return "\n".join(f"{name:<16}{text}" for name, text in rows)


def _burstiness(spread: float | None) -> str:
    """Tell the spread of the gaps, and as what vLLM's knob of that name would imitate it."""
    if spread is None:
        return "none"
    knob = f", burstiness: {spread**-2:.2g} in a scenario" if spread else ""
    return f"CV of gaps {spread:.2f} (Poisson: 1{knob})"
