"""Headway's decisions, compared step by step with schedules recorded from real schedulers.

It may import `simulator`, and `headway.vllm`, which runs and records a real scheduler. Start with
`replay.py`: it plays a case of `cases.py`, and `compare.py` holds the rows against a recording.
"""
