"""Images and clips in prompts, which an encoder turns into tokens.

Start with `images.py`, which says what is encoded and kept; what that takes is in `cost.py`.
"""

from simulator.features.images.images import Images

FEATURE = Images
