"""From the command that starts a server to the keys of a scenario.

It may import `util`, and the
releases of `schedulers`. Start with `keys.py`.
"""
