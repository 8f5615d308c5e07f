"""The vocabulary of all packages: requests and steps, executors, the log, the decode set.

It may import `util`. Start with `request.py`, then `executor.py`: who says how long a
step takes.
"""

from simulator.core.executor import CanLeap, Executor, Leap, Timing
from simulator.core.request import Chunk, Request, Step

__all__ = ["CanLeap", "Chunk", "Executor", "Leap", "Request", "Step", "Timing"]
