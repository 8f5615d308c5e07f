"""An engine on a SimPy clock, and the client that sends to it.

It may import `schedulers` and what lies below. Start with `replica.py`: schedule, execute, commit.
"""

from simulator.engine.async_replica import make_replica

__all__ = ["make_replica"]
