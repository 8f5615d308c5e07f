"""Measured runs of real servers: read, replayed in simulation, and compared (docs/accuracy.md).

It may import `simulator`, `tools.profiles` and the files of `calibration` itself. Start
with `runs.py`, then `predict.py`.
"""
