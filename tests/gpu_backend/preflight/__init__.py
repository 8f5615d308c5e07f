"""What can be known of the engine on a GPU without one: `python -m tests.gpu_backend.preflight`.

It may import all of `gpu_backend`, and calls `calibration` by processes, as the campaign does.
Start with `__main__.py`.
"""
