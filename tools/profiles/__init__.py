"""Cost profiles out of published tables of kernel times, and how they compare with measurements.

It may import `simulator` and `calibration`. Start with `fit.py`, then
`compose.py`.
"""
