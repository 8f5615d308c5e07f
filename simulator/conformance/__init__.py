"""Step for step against schedules that were recorded from real schedulers.

It may import `planning` and what lies below. Start with `replay.py`.
"""
