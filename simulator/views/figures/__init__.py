"""Pictures for papers, slides and READMEs, of runs and of the folders that commands write."""

from simulator.views.figures.data import Run
from simulator.views.figures.load import draw_chunk, draw_latency, draw_pareto
from simulator.views.figures.memory import draw_kv
from simulator.views.figures.occupancy import draw_occupancy
from simulator.views.figures.policies import draw_policies
from simulator.views.figures.shares import draw_fairness
from simulator.views.figures.steps import draw_steps
from simulator.views.figures.throughput import draw_throughput

__all__ = [
    "Run",
    "draw_chunk",
    "draw_fairness",
    "draw_kv",
    "draw_latency",
    "draw_occupancy",
    "draw_pareto",
    "draw_policies",
    "draw_steps",
    "draw_throughput",
]
