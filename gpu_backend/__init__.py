"""A real engine behind the simulator's scheduler: paged KV cache, continuous batching, torch."""

from importlib.util import find_spec

from simulator.util.errors import HeadwayError

if find_spec("torch") is None:
    raise HeadwayError("torch is not installed: pip install 'headway[gpu]' brings it")
