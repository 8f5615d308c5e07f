"""From a YAML file to the parts of a run: one dataclass a section, checks, engines by name.

It may import `cluster`, `schedulers` and what lies below. Start with `scenario.py`: what a file may
say (`*_config.py`, one block each), then `load.py`: what may be wrong with it, then `assemble.py`:
what it stands for.
"""

from simulator.scenario.assemble import assemble
from simulator.scenario.assemble_scheduler import make_scheduler

__all__ = ["assemble", "make_scheduler"]
