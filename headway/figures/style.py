"""How all pictures look: colours, sizes, frames, and how they are saved."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from simulator.util.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Matplotlib reads the current folder's `matplotlibrc` as it is imported, before that of
# MATPLOTLIBRC. A command, which trusts no file there, imports it elsewhere.
if os.environ.get("PYTHONSAFEPATH") and os.path.lexists("matplotlibrc"):
    with chdir(Path(__file__).parent):
        import matplotlib  # noqa: F401

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b8558f",
    "#b97d00",
    "#3a9bd9",
    "#333333",
    "#8a8500",
)
"""Of runs and of whatever else is a series, in pictures and pages: Okabe and Ito's, which
colour-blind people can tell apart, the light ones darkened to 3:1 on white (WCAG 2.1, 1.4.11)."""
DARK_COLORS = (
    "#4da9e0",
    "#ef8a47",
    "#2fc19a",
    "#e294c4",
    "#e9b13c",
    "#8fd0f5",
    "#d8d8d8",
    "#cfc94a",
)
"""The same on a dark page."""
PHASES = {
    "queue": "#b9c0c8",
    "prefill": "#54278f",
    "decode": "#b6a6d8",
    "slowed": "#8c6bb8",
    "preempted": "#8c510a",
    "recompute": "#d8b365",
    "swap": "#80b8b0",
    "retry": "#6b5344",
    "delivery": "#d9dce0",
    "decode_queue": "#8c96a0",
    "transfer": "#35606b",
}
"""Of what happens to a request: none is the colour of a run."""
DARK_PHASES = PHASES | {
    "prefill": "#7f4fc4",
    "decode": "#d3c8ee",
    "slowed": "#a184d4",
    "preempted": "#c98a3d",
    "retry": "#a58a78",
    "transfer": "#6fa3ad",
}
"""The same on a dark page."""
STATE_COLORS = {"up": "#7a6bb5", "draining": "#c3b9e0", "starting": "#d8b365", "down": "#8c2d04"}
"""Of what a replica does: likewise."""
WIDTH = 9.0  # inches: at a README's 830 pixels, letters of 11 points stay 14 pixels high
DPI = 150  # of a PNG: sharp on a screen of twice the pixels
LETTER_HEIGHT = 15  # of small letters, at 100 dots per inch
LETTERS = 100  # that fit into the width
LEGEND_LINE = 0.22  # inches
GREY, FAINT, PALE = "0.35", "0.65", "0.85"
SLO_LABEL: dict[str, Any] = {
    "color": GREY,
    "fontsize": 9,
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
}
"""Of a service level: legible on lines that cross it."""
BAD = "#b34700"  # of what failed
DASHES: dict[Any, tuple[float, float]] = {"-": (5.0, 0.0), "--": (3.7, 1.6)}
"""What of a line is drawn and what is left out, by its style, in widths of the line."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "headway",  # else every SVG names its parts at random
}


@contextmanager
def sheet(
    rows: int, columns: int, height: float, *, width: float = WIDTH, **options: Any
) -> "Iterator[Figure]":
    """Make a figure of `rows` x `columns` axes, its size in inches, in the house's style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        figure.subplots(rows, columns, **options)
        yield figure
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)


def grid(axes: "Axes", axis: str = "both") -> None:
    """Draw faint lines at the ticks."""
    axes.grid(color="0.9", linewidth=0.8, axis=axis)  # type: ignore[arg-type]


def from_zero(axes: "Axes") -> None:
    """Let both axes begin at 0, with room for the marks at the far ends."""
    for limits, top in ((axes.set_xlim, axes.dataLim.x1), (axes.set_ylim, axes.dataLim.y1)):
        limits(0, 1.05 * top or 1.0)


def color(number: int) -> str:
    """Return the colour of the n-th series; after eight they come again."""
    return COLORS[number % len(COLORS)]


def tones(hue: str, count: int = 4) -> list[str]:
    """Return so many lighter and darker tones of a colour, the darkest first."""
    from matplotlib.colors import to_hex, to_rgb

    base = np.array(to_rgb(hue))
    darkest, lightest = 0.72 * base, base + 0.45 * (1 - base)
    return [to_hex(darkest + share * (lightest - darkest)) for share in np.linspace(0, 1, count)]


def ink(hue: str) -> str:
    """Choose white or black letters that are read on a colour, by its luminance (WCAG 2.1)."""
    from matplotlib.colors import to_rgb

    light = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(hue)
    ]
    luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]  # black 0, white 1
    return "#ffffff" if luminance < 0.18 else "#000000"  # at least 4.5:1


def marker(number: int) -> str:
    """Return the n-th series' marker, which tells series apart where colours do not."""
    return MARKERS[number % len(MARKERS)]


def log_scale(axes: "Axes", which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with a few ticks, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    low, high = axis.get_view_interval()
    across = which == "x"  # numbers are wider than high
    crowded = across and high > 100 and axes.get_gridspec().ncols > 2  # type: ignore[union-attr]
    subs: tuple[float, ...] = (1.0,)
    if high < 5 * low:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 7.0)
    elif high < (30 if across else 300) * low:
        subs = (1.0, 2.0, 5.0)
    elif high < 1000 * low and not crowded:
        subs = (1.0, 3.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def symlog_scale(axes: "Axes") -> None:
    """Make the y axis logarithmic above 1, and linear from 0 to 1, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("symlog", linthresh=1.0, linscale=0.3)
    axes.set_ylim(bottom=0.0)  # a little below 0, ticks of negative numbers would stand
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def rate(value: float) -> str:
    """Write a rate: with a decimal where it is small."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def window(begin: float, end: float, whole: float) -> str:
    """Say which seconds of a run of `whole` s are shown."""
    if begin <= 0 and end >= whole:
        return "the whole run"
    shown = (f"{time:,.0f}" if whole >= 10 else f"{time:.3g}" for time in (begin, end, whole))
    return "{} to {} s of {} s".format(*shown)


def whole_ticks(axes: "Axes") -> None:
    """Mark whole numbers alone on the y axis, of what is counted."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def bars_with_ratios(
    axes: "Axes",
    labels: Sequence[str],
    values: Sequence[float],
    *,
    gap: str = " ",
    offset: int = 4,
    room: float = 1.5,
    **text: Any,
) -> None:
    """Draw the output throughput of each run as a bar, with its value and ratio to the first."""
    axes.barh(range(len(values)), values, color=[color(k) for k in range(len(values))], height=0.65)
    for place, value in enumerate(values):
        ratio = f"{gap}({value / values[0]:.2f}x)" if place and values[0] else ""
        axes.annotate(
            f"{rate(value)}{ratio}",
            (value, place),
            (offset, 0),
            textcoords="offset points",
            va="center",
            **text,
        )
    axes.set_yticks(range(len(values)), labels)
    axes.invert_yaxis()
    axes.set(xlim=(0, max([*values, 1e-9]) * room), title="Output throughput", xlabel="tokens/s")


def draw_bounds(
    axes: "Axes",
    summaries: Sequence[Mapping[str, Any]],
    dashes: Mapping[str, str],
    scale: float,
    top: float = 1.0,
) -> None:
    """Draw as upright grey lines what service levels allow each request, ms times `scale`.

    `dashes` has the style of each latency's line, `top` where it ends, as a share of the height;
    bounds beyond the axis are left out.
    """
    for name, style in dashes.items():
        known = {summary["headway"].get(f"slo_{name}_ms") for summary in summaries} - {None}
        draw_upright(axes, [bound * scale for bound in known], style, top)


def draw_levels(axes: "Axes", bounds: Iterable[float]) -> None:
    """Draw bounds of service levels as grey lines across; those beyond the axis are left out."""
    low, high = axes.get_ylim()
    for bound in sorted({*bounds}):
        if low <= bound <= high:
            axes.axhline(bound, color=GREY, linewidth=1.2, zorder=1)
            at = axes.get_yaxis_transform()
            axes.text(0.01, bound, "SLO", transform=at, va="bottom", **SLO_LABEL)


def draw_upright(axes: "Axes", bounds: Iterable[float], style: str = "-", top: float = 1.0) -> None:
    """Draw bounds of service levels as grey upright lines; those beyond the axis are left out.

    `top` is where the lines end, as a share of the height.
    """
    low, high = axes.get_xlim()
    for bound in sorted({*bounds}):
        if low <= bound <= high:
            look: dict[str, Any] = {"linestyle": style, "linewidth": 1.2}
            axes.axvline(bound, ymax=top, color=GREY, zorder=1, **look)
            at: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90}
            axes.text(bound, 0.02, "SLO", ha="right", **SLO_LABEL, **at)


def label_ends(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write labels beside the ends of lines: x, y, text, colour; none upon another.

    The axes' scales must be set.
    """
    height = LETTER_HEIGHT / (axes.bbox.height or 1.0)
    places = axes.transData.transform([(x, y) for x, y, *_ in ends])[:, 1]
    up = axes.transAxes.inverted()
    heights = up.transform([(0.0, place) for place in places])[:, 1]
    below = -np.inf
    for k in np.argsort(heights, kind="stable"):
        below = max(heights[k], below + height)
        x, _, text, hue = ends[k]
        right = (axes.transData + up).transform((x, 1.0))[0]
        look: dict[str, Any] = {"va": "center", "fontsize": 9, "annotation_clip": False}
        axes.annotate(
            text,
            (right, below),
            (6, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=hue,
            **look,
        )


def legend_below(figure: "Figure", axes: "Axes", title: str = "") -> None:
    """Name the series under the picture, if there are several."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        name_below(figure, handles, labels, title)


def name_below(
    figure: "Figure", handles: Sequence[Any], labels: Sequence[str], title: str = ""
) -> None:
    """Write a legend under the picture, in as many columns and lines as its labels need."""
    labels = [fill(label, LETTERS - 8) for label in labels]
    widths = [max(map(len, label.split("\n"))) + 8 for label in labels]
    columns = len(labels)
    while columns > 1 and sum(map(max, np.array_split(widths, columns))) > LETTERS:
        columns -= 1
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(lines - 2, 0))
    place: Any = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=columns, title=title, frameon=False)


def tell_apart(axes: "Axes") -> None:
    """Let lines that lie upon one another share their way, a dash of each colour in turn."""
    alike: list[list[Line2D]] = []
    for line in axes.lines:
        if line.get_linestyle() in DASHES:
            group = next((group for group in alike if _coincide(group[0], line)), None)
            if group is None:
                alike.append(group := [])
            group.append(line)
    for group in alike:
        on, off = DASHES[group[0].get_linestyle()]
        turn = on + off
        for place, line in enumerate(group if len(group) > 1 else ()):
            line.set_linestyle((-place * turn, (on, len(group) * turn - on)))


def _coincide(one: "Line2D", other: "Line2D") -> bool:
    """Say whether two lines of one style are nearer, on average, than they are wide."""
    a, b = (line.get_transform().transform(line.get_xydata()) for line in (one, other))
    if one.get_linestyle() != other.get_linestyle() or a.shape != b.shape or not len(a):
        return False
    return bool(np.nanmean(np.abs(a - b).sum(axis=1)) < one.get_linewidth())


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG or SVG, by the name's ending; the same figure gives the same bytes."""
    kind = path.suffix.lower().removeprefix(".")
    return write_atomic(path, lambda file: encode(figure, file, kind))


def encode(figure: "Figure", file: BinaryIO, kind: str = "png") -> None:
    """Write a figure to an open file."""
    from matplotlib import rc_context

    metadata = {"Date": None} if kind == "svg" else None
    with rc_context(SETTINGS):
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
