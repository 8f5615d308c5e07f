"""What a trace asks for and a scenario does not simulate: told, never dropped without a word."""

import warnings
from collections import Counter

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Media
from simulator.util.errors import HeadwayWarning, printable
from simulator.workload.workload import Workload

MOST_NAMED = 3  # models


def has_media(workload: Workload) -> bool:
    """Return whether the prompts say themselves which images and clips they have."""
    parts = workload.segments or ()
    return any(isinstance(name, Media) for one in parts for name, _ in one or ())


def over_limits(workload: Workload, engine: EngineConfig) -> tuple[int, str]:
    """Return how many prompts have more images or clips than they may, and what is said of them."""
    over, said = 0, ""
    limits = engine.multimodal_config.limit_mm_per_prompt if engine.multimodal_config else {}
    for kind, most in limits.items() if workload.segments else ():
        counts = [
            sum(isinstance(name, Media) and name.modality == kind for name, _ in parts or ())
            for parts in workload.segments or ()
        ]
        if many := sum(count > most for count in counts):
            over += many
            allowed = f"the {most} of {kind} that limit_mm_per_prompt allows (up to {max(counts)})"
            said = f"requests with more than {allowed}: {many:,}"
    return over, said


def warn_of_limits(workload: Workload, engine: EngineConfig) -> None:
    """Warn of prompts with more images or clips than the engine lets one have."""
    over, said = over_limits(workload, engine)
    if over:
        warnings.warn(f"{said}: the engine rejects them", HeadwayWarning, stacklevel=3)


def warn_of_images(workload: Workload) -> None:
    """Warn of images without a size."""
    if workload.images is not None and (count := int(workload.images.sum())):
        text = f"{workload.source}: images: {count}, whose sizes nothing tells: not simulated"
        warnings.warn(f"{text}; workload.multimodal draws them", HeadwayWarning, stacklevel=4)


def warn_of_models(workload: Workload) -> None:
    """Warn where requests for several models all go to one."""
    asked = Counter(name or "none" for name in workload.model or ())
    if len(asked) < 2:
        return
    named = ", ".join(f"{printable(name)} ({n})" for name, n in asked.most_common(MOST_NAMED))
    more = f" and {len(asked) - MOST_NAMED} more" if len(asked) > MOST_NAMED else ""
    text = f"{workload.source}: requests ask for several models: {named}{more}; one serves all"
    warnings.warn(text, HeadwayWarning, stacklevel=4)
