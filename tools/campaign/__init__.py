"""A day's work on a GPU machine in one command: checks, timings, calibration, live runs, a report.

It may import all of `gpu_backend`; `headway` commands run as processes. Start with `plan.py`, the
list of parts.
"""
