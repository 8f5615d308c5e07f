"""Adapters (LoRA) that an engine serves beside its model.

Start with `lora.py`: who may run beside whom, and what is loaded. What loading and computing them
costs is in `cost.py`, what one weighs in `size.py`.
"""

from simulator.features.lora.lora import Lora

FEATURE = Lora
