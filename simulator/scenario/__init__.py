"""From a YAML file to the parts of a run: one dataclass a section, checks, engines by name.

It may import `cluster`, `schedulers` and what lies below. Start with `scenario.py`: what a file may
say (`*_config.py`, one block each), then `load.py`: what may be wrong with it, then `settle.py`:
what each engine of it is.
"""
