"""Pictures for papers, slides and READMEs, of runs and of the folders that commands write.

It may import `simulation` and what lies below. Start with `data.py`, the run that is drawn, and
`runs.py`.
"""

from headway.figures.data import Run
from headway.figures.fleet import draw_fleet
from headway.figures.memory import draw_memory
from headway.figures.occupancy import draw_occupancy
from headway.figures.runs import (
    draw_clients,
    draw_fairness,
    draw_kv,
    draw_policies,
    draw_throughput,
)
from headway.figures.tables import draw_chunk, draw_latency, draw_pareto, draw_steps

__all__ = [
    "Run",
    "draw_chunk",
    "draw_clients",
    "draw_fairness",
    "draw_fleet",
    "draw_kv",
    "draw_latency",
    "draw_memory",
    "draw_occupancy",
    "draw_pareto",
    "draw_policies",
    "draw_steps",
    "draw_throughput",
]
