"""What a trace asks for and a scenario does not simulate: told, never dropped without a word."""

import warnings
from collections import Counter

from simulator.core.request import Media
from simulator.util.errors import HeadwayWarning, printable
from simulator.workload.workload import Workload

MOST_NAMED = 3  # models


def has_media(workload: Workload) -> bool:
    """Return whether the prompts say themselves which images and clips they have."""
    parts = workload.segments or ()
    return any(isinstance(name, Media) for one in parts for name, _ in one or ())


def warn_of_images(workload: Workload) -> None:
    """Warn of images without a size."""
    if workload.images is not None and (count := int(workload.images.sum())):
        text = f"{workload.source}: images: {count}, whose sizes nothing tells: not simulated"
        warnings.warn(f"{text}; workload.multimodal draws them", HeadwayWarning, stacklevel=4)


def warn_of_models(workload: Workload) -> None:
    """Warn where requests for several models all go to one."""
    asked = Counter(name for name in workload.model or () if name)
    if len(asked) < 2:
        return
    named = ", ".join(f"{printable(name)} ({n})" for name, n in asked.most_common(MOST_NAMED))
    more = f" and {len(asked) - MOST_NAMED} more" if len(asked) > MOST_NAMED else ""
    text = f"{workload.source}: requests ask for several models: {named}{more}; one serves all"
    warnings.warn(text, HeadwayWarning, stacklevel=4)
