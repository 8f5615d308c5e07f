"""What limits a run, and what to raise or lower; who is served unfairly.

It may import `results` and what lies below. Start with `rules.py`.
"""
