"""What an engine may have beside its model, a folder each.

A folder has all of it: what its scheduler asks, what it costs and takes, what contradicts its keys.
It may import `schedulers` and what lies below; nothing that every engine passes imports it, so
without the folder all else works. Start with `Feature` in `schedulers/feature.py`.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from simulator.core.engine_config import EngineConfig
from simulator.schedulers.feature import Feature


@cache
def all_features() -> tuple[type[Feature], ...]:
    """Return those whose folders are here, by name."""
    names = sorted(folder.name for folder in iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").FEATURE for name in names)


def features_of(engine: EngineConfig) -> Iterator[type[Feature]]:
    """Yield those that an engine has."""
    return (feature for feature in all_features() if feature.wanted(engine))
