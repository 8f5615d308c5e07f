"""Fit a cost profile to measured steps: non-negative least squares on relative errors.

A step's time is a sum of terms that are linear in their coefficients: the terms of PiecewiseCost,
with dense(T) as a constant and a slope between every two knots, or a staircase. No slope is
negative, so no step gets cheaper by a token more. Rows are divided by the time that the fit before
gave them, three times over: dividing by the measured time would favour fast outliers.

Where decodes ran as CUDA graphs these have a table of their own, a row per size, and so have steps
with prompts that did. On a GPU the device's seconds are fitted, and the host's apart. Steps without
a graph take no less than their launches: of several such floors, the one that leaves least is kept.

Points of the grid count by their median over the passes, steps of runs one by one. On the wall's
clock a step's time includes the scheduler's, which a grid has not: its points get what steps of as
many sequences took in runs.

It is one file since all its parts share the columns that `features_of` makes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from operator import attrgetter, itemgetter

import numpy as np

from calibration.engine_steps.grid import DENSE_TOKENS
from calibration.engine_steps.steps_file import Row
from calibration.errors import Errors, Floats, residuals
from simulator.costs.linear import QUANTITIES, Limits
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.tables import Table
from simulator.util.errors import HeadwayError

Pieces = list[tuple[int, int]]
"""Where dense may grow: (from, to) tokens, ascending; flat in between."""

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
KEY_FLOORS = (0, 32, 64, 128, 256, 512)  # keys that a decode costs at least, as tried on graphs
READ_FLOORS = (0, 2048, 4096, 8192, 12288, 16384, 24576, 32768)  # and all decodes of a step
ROUNDS = 4  # of dividing by the time fitted before
HELD_OUT = 5  # every fifth point, and runs whose name says so
GRID_WEIGHT = 0.1
FEWEST = 12  # samples to fit to
FORM_SAMPLES = 2000  # that the form is chosen by, at most
FLOORS = 15  # that are tried: quantiles of the steps launched one by one
FLOOR_GAIN = 0.02  # of the squared error that a floor must take away
FLOOR_MARGIN = 1.2  # times its floor: beyond, a step is certainly not bound by its launches
SWAPS = ("swap_out", "swap_in")
SIZES = ("tokens", "pairs", "context")
HELD_OUT_PREFIX = "heldout"  # begins the name of a run that the fit must not see


CLOCKS: dict[str, Callable[[Row], float]] = {
    "cpu": lambda row: row.device_s + row.host_s,  # what a CPU that nobody else used would take
    "wall": lambda row: row.wall_s + (row.schedule_s or 0.0),  # from schedule to tokens
}
"""What a step took, by the kind of time."""


@dataclass(frozen=True)
class Form:
    """What is fitted: where dense may grow, sizes of graphs, floors."""

    pieces: Pieces
    sizes: Sequence[int] = ()  # of the CUDA graphs of decodes that were measured
    mixed: Sequence[int] = ()  # and of those of steps with prompts
    keys: int = 0  # that a decode costs at least
    reads: int = 0  # keys that the decodes of a step cost together, at least
    floor: float = 0.0  # s, the least of a step launched kernel by kernel


@dataclass(frozen=True)
class Sample:
    """What is fitted to: a row with the seconds that it took."""

    row: Row
    seconds: float
    held_out: bool


@dataclass(frozen=True)
class StepFit:
    """A fitted cost, its range and its errors on samples that another fit had not seen."""

    cost: PiecewiseCost
    limits: Limits
    samples: list[Sample]
    trained: Errors  # of the fit to all samples
    held_out: dict[str, Errors]  # by kind of sample
    judged: PiecewiseCost  # that other fit
    residuals: Mapping[str, float] = field(default_factory=dict)  # by regime, of those unseen


def collect_samples(rows: Sequence[Row], clock: Callable[[Row], float]) -> list[Sample]:
    """Make samples of rows: grid points by their median, steps of runs one by one."""
    points: dict[tuple[str, int], list[Row]] = defaultdict(list)
    samples = []
    start = each = 0.0
    if clock is CLOCKS["wall"]:  # the scheduler's seconds
        start, each = _fit_line((_sequences(r), r.schedule_s) for r in rows if r.schedule_s)
    for row in rows:
        if row.kind == "probe" or row.swapped_out or row.swapped_in:
            continue
        if row.point >= 0:
            points[row.kind, row.point].append(row)
        else:
            samples.append(Sample(row, clock(row), row.run.startswith(HELD_OUT_PREFIX)))
    for (_, point), same in sorted(points.items()):
        seconds = float(np.median([clock(row) for row in same])) + start
        seconds += each * _sequences(same[0])
        samples.append(Sample(same[0], seconds, point % HELD_OUT == HELD_OUT - 1))
    return samples


def fit_rows(
    rows: Sequence[Row],
    clock: str = "cpu",
    sizes: Sequence[int] = (),
    mixed: Sequence[int] = (),
    *,
    launched: bool = False,
) -> StepFit:
    """Fit a cost to measured rows.

    `sizes` are the batches of decodes that had a CUDA graph, `mixed` the tokens of steps with
    prompts that had, both ascending; `launched`: a host launches the kernels of other steps one by
    one, which may take longer than they do. Raises HeadwayError where rows are too few, or were
    padded to something else.
    """
    rows = [_as_launched(row) for row in rows]
    _check_buckets(rows, sizes, mixed)
    samples = collect_samples(rows, CLOCKS[clock])
    if len(samples) < FEWEST:
        raise HeadwayError(
            f"{len(samples)} different steps are too few to fit: it takes {FEWEST}; measure for "
            "longer (--budget-s), or log more steps"
        )
    seen = [sample for sample in samples if not sample.held_out] or samples
    unseen = [sample for sample in samples if sample.held_out]
    if launched:
        device = collect_samples(rows, attrgetter("device_s"))
        fit = partial(_fit_apart, device, sizes)
    else:
        host = float(np.median([row.host_s for row in rows if row.tokens]))
        fit = partial(_fit, host, sizes)
    judged = fit(seen)
    held_out = {
        kind: judge(judged, [s for s in unseen if s.row.kind == kind])
        for kind in sorted({s.row.kind for s in unseen})
    }
    if unseen:
        held_out["all"] = judge(judged, unseen)
    cost = fit(samples)
    out, back = (_fit_swap([row for row in rows if row.kind == kind]) for kind in SWAPS)
    cost = replace(cost, swap_out=out[0], swap_out_per_block=out[1])
    cost = replace(cost, swap_in=back[0], swap_in_per_block=back[1])
    trained, left = judge(cost, samples), _residuals(judged, unseen)
    limits = limits_of([sample.row for sample in samples])
    return StepFit(cost, limits, samples, trained, held_out=held_out, judged=judged, residuals=left)


def with_buckets(rows: Iterable[Row], sizes: Sequence[int]) -> list[Row]:
    """Say of decodes to which of the CUDA graphs' sizes, ascending, a server has padded them."""
    found = []
    for row in rows:
        size = next((n for n in sizes if n >= row.decodes), 0) if not row.chunks else 0
        found.append(replace(row, bucket=size) if size else row)
    return found


def _residuals(cost: PiecewiseCost, unseen: Sequence[Sample]) -> dict[str, float]:
    """Return what a fit leaves of samples that it has not seen, by regime."""
    if not unseen:
        return {}
    rows = [sample.row for sample in unseen]
    return residuals(
        np.array([cost.execute(row.step).seconds for row in rows]),
        _seconds(unseen),
        **{name: np.array([getattr(row, name) for row in rows], float) for name in SIZES},
    )


def judge(cost: PiecewiseCost, samples: Sequence[Sample]) -> Errors:
    """Compare a cost with samples."""
    predicted = np.array([cost.execute(sample.row.step).seconds for sample in samples])
    return Errors.of(predicted, _seconds(samples))


def _as_launched(row: Row) -> Row:
    """Return a graph's row with the last tokens of prompts, one of each, among the decodes.

    A graph takes every sequence with one new token; the scheduler tells these two apart.
    """
    if not row.bucket or not row.chunks or any(new > 1 for _, new in row.chunks):
        return row
    ends = [start + new for start, new in row.chunks]
    return replace(
        row, decodes=row.decodes + len(ends), context=row.context + sum(ends), chunks=(),
        longest=max(row.longest, *ends),
    )  # fmt: skip


def _check_buckets(rows: Sequence[Row], sizes: Sequence[int], mixed: Sequence[int]) -> None:
    """Raise HeadwayError where a row was not padded as the cost will pad it."""
    for number, row in enumerate(rows, 2):
        prompts = bool(row.chunks)
        name, there = ("mixed", mixed) if prompts else ("capture", sizes)
        if row.bucket and row.bucket != next((n for n in there if n >= row.tokens), 0):
            what = f"{row.tokens} tokens" if prompts else f"{row.decodes} decodes"
            raise HeadwayError(
                f"row {number}: {what} were padded to {row.bucket}, which is not the next of "
                f"cudagraph_{name}_sizes: {[*there]}"
            )


def _dense_tokens(row: Row) -> int:
    """Count the tokens that the matrix products see: padding of a CUDA graph is among them."""
    return row.tokens if row.chunks else row.bucket or row.decodes


def _fit_apart(
    device: Sequence[Sample], sizes: Sequence[int], samples: Sequence[Sample]
) -> PiecewiseCost:
    """Fit the device's seconds, and what a step takes beside them: its kernels may wait for the
    host's launches, but never for the rest of the host's work.

    Before a graph the host mostly goes on from the step before, which is less work than before
    other steps: the difference is in the tables of the graphs, whose kernels wait for nobody.
    """
    rows = {id(sample.row) for sample in samples}
    device = [sample for sample in device if id(sample.row) in rows]
    pairs = [*zip(samples, device, strict=True)]
    anew = [pair for pair in pairs if not pair[0].row.bucket or pair[0].row.chunks]
    beside = ((_sequences(a.row), max(a.seconds - b.seconds, 0.0)) for a, b in anew or pairs)
    start, each = _fit_line(beside)
    device = [
        replace(kernels, seconds=max(whole.seconds - start - each * _sequences(whole.row), 1e-6))
        if whole.row.bucket
        else kernels
        for whole, kernels in pairs
    ]
    cost = _fit(0.0, sizes, device, launched=True)
    return replace(cost, overhead=_round(start), overhead_per_sequence=_round(each))


def _fit(
    host: float, sizes: Sequence[int], samples: Sequence[Sample], *, launched: bool = False
) -> PiecewiseCost:
    """Fit with every floor of a decode's keys, keep the best; on a GPU dense may be a staircase."""
    graphs = _some([s for s in samples if s.row.bucket and not s.row.chunks])
    others = _some([sample for sample in samples if not sample.row.bucket])
    used = sorted({sample.row.bucket for sample in graphs})
    mixed = sorted({s.row.bucket for s in samples if s.row.bucket and s.row.chunks})
    most = max([_dense_tokens(sample.row) for sample in others], default=1)
    form = Form(linear_pieces(most))
    if used and len(others) >= FEWEST:
        form = min((form, Form(_step_pieces(most))), key=partial(_held_out_loss, others))
    if launched and others:
        form = _with_floor(others, form)
    if used:
        floors = product(KEY_FLOORS, READ_FLOORS)
        forms = [Form([], used, keys=keys, reads=reads) for keys, reads in floors]
        best = min(forms, key=lambda one: _fit_form(graphs, graphs, one)[1])
        form = replace(form, sizes=used, keys=best.keys, reads=best.reads)
    form = replace(form, mixed=mixed)
    found, _ = _fit_form(samples, samples, form)
    return replace(cost_of(found, form, host), cudagraph_capture_sizes=sizes)


def _some(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Thin samples out, evenly, to as many as a form is chosen by."""
    return samples[:: -(-len(samples) // FORM_SAMPLES) or 1]


def _with_floor(samples: Sequence[Sample], form: Form) -> Form:
    """Choose the seconds that a step launched kernel by kernel takes at least, 0: no such floor."""
    times = _seconds(samples)
    best = (_fit_form(samples, samples, form)[1] * (1.0 - FLOOR_GAIN), form)
    for floor in np.quantile(times, np.linspace(0.0, 0.5, FLOORS)):
        one = replace(form, floor=float(floor))
        best = min(best, (_fit_form(samples, samples, one)[1], one), key=itemgetter(0))
    return best[1]


def linear_pieces(most: int) -> Pieces:
    """Let dense grow evenly between knots."""
    knots = [knot for knot in KNOTS if knot < most]
    return list(pairwise([*knots, max(most, 2)]))


def _step_pieces(most: int) -> Pieces:
    """Let dense grow only just past the sizes measured for it, where tiles end, and evenly beyond.

    Between them Vidur's matrix products of Llama-2-7B on an H100 are off by a median of 1.6 %
    (P95 5.9 %) so, and of 4.4 % (13.6 %) with ramps.
    """
    steps = [(size, size + 1) for size in DENSE_TOKENS if size < most]
    beyond = [knot for knot in KNOTS if DENSE_TOKENS[-1] < knot < most]
    first = DENSE_TOKENS[-1] + 1
    return steps + (list(pairwise([first, *beyond, most])) if most > first else [])


def _held_out_loss(samples: Sequence[Sample], form: Form) -> float:
    """Fit without every fifth sample, give the loss of those."""
    seen = [sample for k, sample in enumerate(samples) if k % HELD_OUT]
    return _fit_form(seen, samples[::HELD_OUT], form)[1]


def _fit_form(seen: Sequence[Sample], judged: Sequence[Sample], form: Form) -> tuple[Floats, float]:
    """Fit coefficients to some samples; also give the weighted squared error of others."""

    def table(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
        rows = [features_of(sample.row, form) for sample in samples]
        floors = np.array([0.0 if sample.row.bucket else form.floor for sample in samples])
        return np.array(rows), floors

    features, floors = table(seen)
    found = solve(features, _seconds(seen), _weights(seen), floors)
    if judged is not seen:
        features, floors = table(judged)
    off = np.maximum(features @ found, floors) / _seconds(judged) - 1.0
    return found, float((_weights(judged) * off**2).sum())


def _seconds(samples: Sequence[Sample]) -> Floats:
    return np.array([sample.seconds for sample in samples])


def _weights(samples: Sequence[Sample]) -> Floats:
    """Let the grid weigh a tenth of the runs: it is there for coverage, they for the level."""
    grid = np.array([sample.row.point >= 0 for sample in samples])
    weights = np.ones(len(samples))
    if grid.any() and not grid.all():
        weights[grid] = max(1.0, GRID_WEIGHT * (~grid).sum() / grid.sum())
    return np.asarray(weights / weights.sum())


TERMS = (
    "head_per_sequence",
    "decode_per_context",
    "prefill",
    "prefill_per_pair",
    "prefill_per_token",
    "prefill_per_key",
    "prefill_per_sequence",
    "mixed_per_context",
    "mixed_per_sequence",
)
"""What is fitted beside the dense table; the coefficients follow those of the knots."""


def features_of(row: Row, form: Form) -> list[float]:
    """Return what each coefficient is multiplied by: tables of either path, then the terms."""
    tokens, graph = _dense_tokens(row), bool(row.bucket)
    dense = [0.0 if graph else 1.0]
    for low, high in form.pieces:
        dense.append(0.0 if graph else float(min(max(tokens - low, 0), high - low)))
    prompts = bool(row.chunks)
    dense += [float(not prompts and row.bucket >= size) for size in form.sizes]
    dense += [float(prompts and row.bucket >= size) for size in form.mixed]
    if not prompts:
        read = max(row.context, form.keys * row.decodes, form.reads)
        return [*dense, 0.0 if graph else tokens, read, *(0.0,) * 7]
    new = sum(size for _, size in row.chunks)
    seen = sum(start + size for start, size in row.chunks)
    count = len(row.chunks)
    read = max(row.context, form.reads) if row.decodes else 0
    const = not graph
    work = (row.decodes + count, 0.0, const, row.pairs, new, seen, count, read, row.decodes)
    return [*dense, *map(float, work)]


def solve(table: Floats, measured: Floats, weights: Floats, floors: Floats) -> Floats:
    """Find the non-negative coefficients of least relative error.

    Rows that take no longer than their floor say nothing but that. Which ones these are, their
    own time cannot tell: of the rows about the floor only the slow ones would be fitted to. So a
    round takes those that the one before it put above the floor, and those far above it.
    """
    from scipy.optimize import nnls

    scale = measured
    found = np.zeros(table.shape[1])
    beyond = above = measured > FLOOR_MARGIN * floors
    if not above.any():
        return found
    for _ in range(ROUNDS):
        rows = (np.sqrt(weights) / scale)[above]
        scaled = table[above] * rows[:, None]
        sizes = np.linalg.norm(scaled, axis=0)
        sizes[sizes == 0.0] = 1.0
        # The triangle of a QR decomposition has the same least squares in far fewer rows.
        whole = np.column_stack((scaled / sizes, measured[above] * rows))
        triangle = np.asarray(np.linalg.qr(whole, mode="r"))
        found = nnls(triangle[:, :-1], triangle[:, -1])[0] / sizes
        above = beyond | (table @ found > floors)
        # Nobody may weigh much for being thought fast.
        scale = np.maximum(table @ found, np.maximum(measured / 2.0, floors))
    return found


def cost_of(found: Floats, form: Form, host: float) -> PiecewiseCost:
    """Write coefficients as a cost model. The host's time is told apart where it can be."""
    count = 1 + len(form.pieces)
    ends = count + len(form.sizes), count + len(form.sizes) + len(form.mixed)
    graphs, mixed = np.cumsum(found[count : ends[0]]), np.cumsum(found[ends[0] : ends[1]])
    terms = dict(zip(TERMS, map(_round, found[ends[1] :]), strict=True))
    consts = [max(float(const), 1e-9) for const in (found[0], *graphs[:1], *mixed[:1])]
    overhead = _round(min(host, *(const / 2.0 for const in consts)))
    height = consts[0] - overhead
    heights = {1: height}
    for (low, high), slope in zip(form.pieces, found[1:count], strict=True):
        heights[low] = height
        height += float(slope) * (high - low)
        heights[high] = height
    dense = [[tokens, _round(height)] for tokens, height in heights.items()]
    floor = _round(form.keys * terms["decode_per_context"])
    cost = PiecewiseCost(
        dense=dense,
        overhead=overhead,
        decode_per_sequence=floor,
        decode_least=_round(form.reads * terms["decode_per_context"]),
        mixed_least=_round(form.reads * terms["mixed_per_context"]),
        graph_dense=_graph_table(form.sizes, graphs, overhead),
        graph_mixed=_graph_table(form.mixed, mixed, overhead),
        launch=_round(max(form.floor - overhead, 0.0)),
    )
    return replace(cost, **terms)  # type: ignore[arg-type]


def _graph_table(sizes: Sequence[int], seconds: Floats, overhead: float) -> Table:
    """Return the rows of a table of graphs, none where there are no graphs."""
    pairs = zip(sizes, seconds, strict=True)
    return [[size, _round(max(float(value), 1e-9) - overhead)] for size, value in pairs] or ()


def _round(value: float) -> float:
    """Round to five digits: what the file says is what is judged."""
    return float(f"{value:.5g}")


def limits_of(rows: Sequence[Row]) -> Limits:
    """Return the range of the steps fitted to."""
    found = {}
    for name in QUANTITIES:
        column = "decodes" if name == "sequences" else name
        values = [getattr(row, column) for row in rows]
        if positive := [value for value in values if value > 0]:
            found[name] = min(positive), max(positive)
    return found


def _sequences(row: Row) -> int:
    return row.decodes + len(row.chunks)


def _fit_line(pairs: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Fit start + each n to seconds, by the medians of each n; zeros where there are none."""
    from scipy.optimize import nnls

    groups: dict[int, list[float]] = defaultdict(list)
    for count, seconds in pairs:
        groups[count].append(seconds)
    if not groups:
        return 0.0, 0.0
    counts = np.array(sorted(groups), float)
    weights = np.sqrt([len(groups[int(count)]) for count in counts])
    times = np.array([float(np.median(groups[int(count)])) for count in counts])
    table = np.stack([np.ones(len(counts)), counts], axis=1) * weights[:, None]
    start, each = nnls(table, times * weights)[0]
    return float(start), float(each)


def _fit_swap(rows: Sequence[Row]) -> tuple[float, float]:
    """Fit start + per_block blocks to swaps, on relative errors; zeros where none was measured."""
    from scipy.optimize import nnls

    if not rows:
        return 0.0, 0.0
    times = np.array([row.wall_s for row in rows])  # of the copies alone; CPU time on a CPU
    blocks = np.array([sum(row.swapped_out + row.swapped_in) for row in rows], float)
    table = np.stack([np.ones(len(rows)), blocks], axis=1) / times[:, None]
    start, per_block = nnls(table, np.ones(len(rows)))[0]
    return _round(start), _round(per_block)


def with_name(fit: StepFit, name: str) -> StepFit:
    """Return the fit under the name that reports will call its cost."""
    return replace(fit, cost=replace(fit.cost, name=name, limits=fit.limits))
