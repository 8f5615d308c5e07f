"""What traffic is like: a trace described, and the load that a server tells at /metrics.

It may import `simulator`. Start with `describe.py`, then `server_metrics.py`.
"""
