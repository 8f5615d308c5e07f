"""What limits a run, and the knob to turn; one request explained; who is served unfairly.

It may import `results` and what lies below. Start with `rules.py`.
"""
