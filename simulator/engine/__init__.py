"""An engine on a SimPy clock, and the client that sends to it.

It may import `schedulers` and what lies below. Start with `loop.py`: schedule, execute, commit.
"""

from simulator.engine.replica import Replica, make_replica

__all__ = ["Replica", "make_replica"]
