"""What runs on CUDA alone: Triton kernels, the backend that launches them, graphs of steps.

It may import the files of `gpu_backend` below `engine.py`; only `graphs.py` may be imported without
triton. Start with `ops.py`.
"""
