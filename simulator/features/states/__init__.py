"""Prompts of models with states, as linear attention and Mamba keep them, cut at block boundaries.

Start with `states.py`.
"""

from simulator.features.states.states import States

FEATURE = States
