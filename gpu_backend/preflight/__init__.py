"""What can be known of the engine on a GPU without one: `python -m gpu_backend.preflight`.

It may import all of `gpu_backend`, and calls `calibration` as the campaign does, by processes, but
for the virtual GPU, which hands it an engine. Start with `__main__.py`.
"""
