"""An exception in a class of the user's own, told in one line that names the place."""

import sys
from pathlib import Path
from traceback import extract_tb

from simulator.util.errors import HeadwayError


def blamed(found: type, error: Exception) -> HeadwayError | None:
    """Say which line of a user's policy or scheduler, or of a base of it, led to an exception.

    None where the class is one of Headway's, or the error is told in one line already. Where no
    line of the user's file took part, the class alone is named.
    """
    modules = {cls.__module__ for cls in found.__mro__}
    files = {
        getattr(sys.modules.get(name), "__file__", None)
        for name in modules
        if name != "builtins" and not name.startswith("simulator.")
    }
    if not files or isinstance(error, HeadwayError):
        return None
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    for place in reversed(extract_tb(error.__traceback__)):
        if place.filename in files:
            where = f"{Path(place.filename).name}:{place.lineno}"
            return HeadwayError(
                f"engine.scheduling_policy: {found.__name__}: {place.name} {text} ({where})"
            )
    return HeadwayError(f"engine.scheduling_policy: {found.__name__} {text}")
