"""Laws that every policy and scheduler keeps, for those of your own: `check_policy`.

It may import `planning` and what lies below. Start with `check.py`: the laws.
"""

from simulator.testing.check import check_policy

__all__ = ["check_policy"]
