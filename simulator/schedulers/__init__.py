"""What each step computes: schedulers of vLLM and SGLang in folders, of other engines in files.

`interface.py` says what an engine asks of any, `base.py` has what all share. They may import
`kv_cache`, `policies`, `costs` and what lies below; no clock, no files. Start with
`vllm/scheduler.py`.
"""

from simulator.schedulers.limits import Limits
from simulator.schedulers.vllm.scheduler import Scheduler

__all__ = ["Limits", "Scheduler"]
