"""What is asked of an engine: the table of requests, made by generators or read from traces.

It may import what lies below: `models`, `core`, `util`. Start with `workload.py`.
"""

from simulator.workload.workload import Workload

__all__ = ["Workload"]
