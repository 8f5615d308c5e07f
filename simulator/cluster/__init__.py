"""Many engines: a fleet behind a router, failures, scaling, admission, data-parallel ranks.

It may import `engine` and what lies below. Start with `fleet.py`.
"""
