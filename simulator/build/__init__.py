"""From the blocks of a scenario to the parts of a run: engines settled, schedulers and fleets made.

It may import `cluster`, `schedulers` and what lies below. Start with `settle.py`: what an engine
is, then `assemble_scheduler.py` and `assemble_fleet.py`: what is made of it.
"""
