"""What a step costs: cost models, the profiles that hold their numbers, overheads, noise.

It may import `workload` and what lies below. Start with `cost_model.py`, then `piecewise.py`.
"""

from simulator.costs.cost_model import CostModel
from simulator.costs.linear import Fitted

__all__ = ["CostModel", "Fitted"]
