"""A finished run's folder, read back: its summary, its tables, and one request's story.

It may import `simulator`. Start with `read.py`, which says by its place what is damaged.
"""
