"""Published traces as workloads: a module for each family of formats.

Start with `read.py`, which tells the formats apart.
"""
