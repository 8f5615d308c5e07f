"""Who goes first: orders of the waiting queue, fairness, victims; predictions of lengths.

It may import `workload` and what lies below, and knows no scheduler. Start with `policy.py`.
"""
