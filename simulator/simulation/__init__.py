"""From a scenario to a result and its files: the one place where all parts meet.

It may import `diagnosis` and what lies below. Start with `run.py`.
"""

from simulator.simulation.write import write_run

__all__ = ["write_run"]
