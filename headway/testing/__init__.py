"""Laws that every policy and scheduler keeps, for those of your own: `check_policy`.

It may import `simulator`. Start with `check.py`: the laws.
"""

from headway.testing.check import check_policy

__all__ = ["check_policy"]
