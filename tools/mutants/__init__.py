"""Do the tests notice a fault? `python -m tools.mutants` puts faults in, and runs those that could.

Start with `__main__.py`. `mutate.py` draws the faults, `session.py` runs tests with one in a fork.
It imports nothing of the other packages.
"""
