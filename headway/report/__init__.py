"""What people look at: text, HTML, timelines, Prometheus.

It may import `figures`, `simulation` and what lies below. Start with `text.py`.
"""
