"""A real engine in torch behind the simulator's scheduler: paged KV cache, continuous batching.

It may import `simulator`; only `calibration` and `tools` may import it. Start with
`engine.py`, then `executor.py`: a `Step` in, seconds out.
"""

from importlib.util import find_spec

from simulator.util.errors import HeadwayError

if find_spec("torch") is None:
    raise HeadwayError("torch is not installed: pip install 'headway[gpu]' brings it")
