"""Many runs of a scenario: sweeps, replications and their intervals, plans under service levels.

It may import `views` and what lies below. Start with `sweep.py`, then `plan.py`.
"""
