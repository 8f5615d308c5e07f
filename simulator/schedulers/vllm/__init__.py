"""The scheduler of vLLM V1 and its kinds: asynchronous, speculative, with displacing policies.

Start with `scheduler.py`.
"""
