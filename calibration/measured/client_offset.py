"""What the clients of a server add to each TTFT, told from the errors of the engine.

Network, HTTP and a tokenizer add as much to a short TTFT as to a long one; an engine that is too
fast or too slow errs in proportion, and so does what a prompt costs. Prompts of one length cannot
tell the two apart: the longest must be twice as long as the shortest. Over the runs of a server,
measured = f predicted + offset, in relative terms, with f taken to be 1 within `ENGINE_ERROR`: what
the runs do not tell apart by their different TTFTs, this does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration.measured.compare import Outcome
from headway.report.text import near_saturation

ENGINE_ERROR = 0.1  # standard deviation of f
FEWEST = 4  # runs of a server that tell an offset
LONGER = 2.0  # times as long as the shortest prompts of a server are the longest that tell it
LEAST = 1.0  # ms; a smaller one is not worth a line
ROUNDS = 20  # in which the runs' scatter and the offset settle
METRICS = ("mean_ttft_ms", "p99_ttft_ms")


@dataclass(frozen=True)
class Offset:
    """What clients add to each TTFT beyond what was assumed, ms."""

    value: float
    half_width: float  # of its 95 % interval
    errors: dict[str, list[float]]  # of METRICS, each run's with the offset that the others tell


def find_offset(outcomes: Sequence[Outcome]) -> Offset | None:
    """Return the offset of the runs of one server.

    None where they tell none: too few, prompts of one length, an interval that holds 0, or errors
    that it does not mend.
    """
    good = [one for one in outcomes if not one.impossible and not near_saturation(one.load)]
    lengths = [one.computed for one in good if one.computed > 0]
    if not lengths or max(lengths) < LONGER * min(lengths):
        return None
    rows = [
        {row.metric: (row.predicted, row.measured) for row in one.rows if row.measured > 0}
        for one in good
    ]
    rows = [row for row in rows if METRICS[0] in row]
    if len(rows) < FEWEST:
        return None
    means = np.array([row[METRICS[0]] for row in rows])
    value, half_width = fit_offset(means)
    if abs(value) < max(half_width, LEAST):
        return None
    errors: dict[str, list[float]] = {}
    for k, row in enumerate(rows):
        others = fit_offset(np.delete(means, k, axis=0))[0]
        for metric in METRICS:
            if metric in row:
                predicted, measured = row[metric]
                errors.setdefault(metric, []).append((predicted + others) / measured - 1.0)
    before = np.median(np.abs(means[:, 0] / means[:, 1] - 1.0))
    if np.median(np.abs(errors[METRICS[0]])) >= before:
        return None
    return Offset(value, half_width, errors)


def fit_offset(means: np.ndarray) -> tuple[float, float]:
    """Fit the offset to rows of (predicted, measured), ms; return it and half its 95 % interval."""
    terms = np.column_stack([means[:, 0] / means[:, 1], 1.0 / means[:, 1]])
    scatter = ENGINE_ERROR
    for _ in range(ROUNDS):
        weight = scatter / ENGINE_ERROR  # of what is known of f, beside a run
        known = np.vstack([terms, [weight, 0.0]])
        found = np.linalg.lstsq(known, np.append(np.ones(len(means)), weight), rcond=None)[0]
        apart = terms @ found - 1.0
        scatter = max(float(np.sqrt(apart @ apart / (len(means) - 1))), 1e-9)
    from scipy.special import stdtrit  # scipy.stats takes 1 s longer to import

    variance = scatter**2 * np.linalg.inv(known.T @ known)[1, 1]
    return float(found[1]), float(stdtrit(len(means) - 1, 0.975) * np.sqrt(variance))
