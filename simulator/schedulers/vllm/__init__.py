"""The scheduler of vLLM V1 and its kinds: asynchronous, speculative, with displacing policies.

It may import what `schedulers` may. Start with `reference.py`, its loop in a page;
`scheduler.py` decides the same faster, with all its features.
"""
