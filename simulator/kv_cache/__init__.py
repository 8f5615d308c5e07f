"""Where the KV cache of each request lies: blocks, prefix caches, host tier, swap space.

It may import `workload` and what lies below. Start with `block_manager.py`.
"""

from simulator.kv_cache.block_manager import BlockCounter, BlockManager

__all__ = ["BlockCounter", "BlockManager"]
