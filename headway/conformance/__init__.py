"""Headway's decisions, compared step by step with schedules recorded from real schedulers.

It may import `simulator`. Start with `replay.py`: it plays a case of
`cases.py`, and `compare.py` holds the rows against a recording.
"""
