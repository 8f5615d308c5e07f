"""Step for step against schedules that were recorded from real schedulers.

It may import `simulator`. Start with `replay.py`: it plays a case of
`cases.py`, and `compare.py` holds the rows against a recording.
"""
