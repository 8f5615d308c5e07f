"""What each step computes: schedulers of vLLM and SGLang in folders, of other engines in files.

It may import `kv_cache`, `policies` and what lies below; no clock, no files. Start with
`vllm/scheduler.py`.
"""

from simulator.schedulers.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]
