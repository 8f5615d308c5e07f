"""Many runs of a scenario: sweeps, replications and their intervals, plans under service levels.

It may import `report` and what lies below. Start with `design.py` and `runs.py`, which all share,
then `sweep.py`.
"""
