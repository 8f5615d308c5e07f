"""A local page on which a scenario's knobs are turned and its results are seen at once.

It may import `report.html` and what lies below. Start with `server.py`.
"""
