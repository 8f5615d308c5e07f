"""Our own engine, or any executor, measured step by step: a profile fitted to it, and its errors.

It may import `simulator`, `gpu_backend` and the files of `calibration` itself. Start with
`calibrate.py`.
"""
