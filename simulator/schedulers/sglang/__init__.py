"""SGLang's scheduler, on the base that all have: the steps and requests of `vllm/`.

It may import what `schedulers` may. Start with `scheduler.py`, which says what a pass of its loop
does; the other files are its parts.
"""
