"""What a model weighs and computes, from its config.json; GPUs; how much KV cache fits beside it.

It may import `core` and `util`. Start with `spec.py`; `config_json.py` reads it from a file, and
`configs/` has the models that are shipped.
"""

from simulator.models.load import load_model

__all__ = ["load_model"]
