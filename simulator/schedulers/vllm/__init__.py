"""The scheduler of vLLM V1 and its kinds: asynchronous, speculative, with displacing policies.

It may import what `schedulers` may. Start with `scheduler.py`.
"""
