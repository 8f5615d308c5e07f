"""Drafts of tokens that a step verifies: speculative decoding, as vLLM and as SGLang do it.

Start with `speculation.py`: which scheduler verifies them. vLLM's are in `as_sums.py` and
`walk.py`, SGLang's in `eagle.py`, their blocks in `blocks.py`; what drafting takes is in
`cost.py`.
"""

from simulator.features.drafts.speculation import Speculation

FEATURE = Speculation
