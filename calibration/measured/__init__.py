"""Measured runs of real servers: read, replayed in simulation, and compared (docs/accuracy.md).

It may import `simulator` and `calibration.kernel_tables`. Start with `runs.py`, then `predict.py`.
"""
