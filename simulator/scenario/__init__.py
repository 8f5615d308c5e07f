"""From a YAML file to the parts of a run: one dataclass a section, checks, engines by name.

It may import `cluster`, `schedulers` and what lies below. Start with `scenario.py`, then
`assemble.py`.
"""

from simulator.scenario.assemble import assemble, make_scheduler

__all__ = ["assemble", "make_scheduler"]
