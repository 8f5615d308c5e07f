"""Pictures for papers, slides and READMEs, of runs and of the folders that commands write."""

from simulator.figures.data import Run
from simulator.figures.load import draw_chunk, draw_latency, draw_pareto
from simulator.figures.memory import draw_kv
from simulator.figures.occupancy import draw_occupancy
from simulator.figures.policies import draw_policies
from simulator.figures.shares import draw_fairness
from simulator.figures.steps import draw_steps
from simulator.figures.throughput import draw_throughput

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
