"""What fills the memory of GPUs that may serve a model: a bar by part for each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.figures.style import COLORS, GREY, PALE, legend_below, sheet
from simulator.models.gpus import GIB
from simulator.models.kv_budget import LEFT_OVER, MemoryBudget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.45  # inches


def draw_memory(budgets: Sequence[MemoryBudget]) -> "Figure":
    """Draw GiB of each GPU by part; the tokens that fit beside each, or that it does not start."""
    parts = [budget.parts for budget in budgets]
    names = list(dict.fromkeys(name for one in parts for name in one if name != LEFT_OVER))
    with sheet(1, 1, 1.4 + BAR * len(budgets)) as figure:
        axes = figure.axes[0]
        places = range(len(budgets))
        begin = [0.0] * len(budgets)
        for name, colour in [*zip(names, COLORS, strict=False), (LEFT_OVER, PALE)]:
            sizes = [one.get(name, 0) / GIB for one in parts]
            axes.barh(places, sizes, left=begin, color=colour, label=name, height=0.7)
            begin = [start + size for start, size in zip(begin, sizes, strict=True)]
        for at, (budget, end) in enumerate(zip(budgets, begin, strict=True)):
            text = " does not start" if budget.refusal else f" {budget.tokens:,} tokens"
            axes.annotate(text, (end, at), va="center", color=GREY, fontsize="small")
            label = "" if at else "memory of the GPU"
            axes.vlines(budget.gpu.memory / GIB, at - 0.4, at + 0.4, color="black", label=label)
        axes.set_yticks(places, [f"{one.sizes.gpus} x {one.gpu.name}" for one in budgets])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(begin))
        axes.set_xlabel(f"GiB of each GPU: {budgets[0].model.name}")
        legend_below(figure, axes)
    return figure
