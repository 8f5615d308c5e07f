"""From a YAML file to the parts of a run: one dataclass a section, checks, engines by name.

It may import `cluster`, `schedulers` and what lies below. Start with `scenario.py`: what a file may
say (`*_config.py`, one block each), then `load.py`: what may be wrong with it, then `settle.py`:
what each engine of it is.
"""

from simulator.scenario.assemble_scheduler import make_scheduler
from simulator.scenario.resolve import resolve, resolve_groups

__all__ = ["make_scheduler", "resolve", "resolve_groups"]
