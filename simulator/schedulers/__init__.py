"""What each step computes: vLLM's scheduler in `vllm/`, and a file for each other engine.

It may import `kv_cache`, `policies` and what lies below; no clock, no files. Start with
`vllm/scheduler.py`.
"""

from simulator.schedulers.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]
