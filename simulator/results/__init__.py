"""What a run says of itself: its record, tables, and every metric, each defined once.

It may import `scenario` and what lies below. Start with `record.py`, then `metrics.py`.
"""
