"""What a trace asks for and a scenario does not simulate: told, never dropped without a word."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Media
from simulator.util.errors import printable, warn
from simulator.workload.workload import Ints, Workload

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


def warn_of_limits(workload: Workload, engine: EngineConfig, total: int = 0) -> None:
    """Warn of prompts with more images or clips than the engine lets one have.

    `total`: of the run, where these requests are its first ones.
    """
    over, said = over_limits(workload, engine)
    if engine.multimodal_config is None and has_media(workload):
        text = f"{workload.source}: prompts have images or clips, whose tokens are taken as text"
        without = "engine.multimodal_config simulates their encoder"
        warn(f"{text}; {without}")
    if over:
        some = f"of the first {len(workload):,} requests, " if total > len(workload) else ""
        warn(f"{some}{said}: the engine rejects them")


def warn_of_images(source: str, images: Ints | int | None) -> None:
    """Warn of images without a size, by how many each request has, or all have."""
    if images is not None and (count := int(np.sum(images))):
        text = f"{source}: images: {count}, whose sizes nothing tells: not simulated"
        warn(f"{text}; workload.multimodal draws them")


def most_asked(asked: Counter[str]) -> str:
    """Name the models that most requests ask for, with how many do."""
    most = asked.most_common(MOST_NAMED)
    more = f" and {len(asked) - MOST_NAMED} more" if len(asked) > MOST_NAMED else ""
    return ", ".join(f"{printable(name) or 'none'} ({count})" for name, count in most) + more


def warn_of_models(source: str, models: Iterable[str] | Mapping[str, int]) -> None:
    """Warn where requests for several models all go to one."""
    asked = Counter(models)
    if len(asked) < 2:
        return
    warn(f"{source}: requests ask for several models: {most_asked(asked)}; one serves all")


def warn_of_adapters(source: str, models: Iterable[str], own: str) -> None:
    """Warn where no request of a trace asks for the engine's own model, by a name that is known."""
    asked = Counter(models)
    if not asked[""]:
        text = f"{source}: no request asks for {own}: each name is taken as an adapter"
        text += f": {most_asked(asked)}; if one is the served model's, write base for it"
        warn(text)
