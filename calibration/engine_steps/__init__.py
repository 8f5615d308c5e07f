"""Our own engine, or any executor, measured step by step: a profile fitted to it, and its errors.

It may import `simulator`. Start with `calibrate.py`.
"""
