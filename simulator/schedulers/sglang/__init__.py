"""SGLang's scheduler. Start with `scheduler.py`, which says what a pass of its loop does; the other
files are its parts.
"""
