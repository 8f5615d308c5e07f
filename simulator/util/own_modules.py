"""Modules of the user's beside a scenario: each folder's own, as its files are now."""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from types import ModuleType

SHIPPED = {*sys.stdlib_module_names, "calibration", "gpu_backend", "headway", "simulator"}
"""Names of modules that are never the user's."""
LIBRARY = os.path.dirname(os.__file__)
OWN: dict[str, tuple[int, int] | None] = {}
"""The modules that are loaded from `PLACES`, by name: when each file changed (ns), its bytes."""
PLACES: list[str] = []


def import_from(places: list[str], name: str) -> ModuleType:
    """Import a module from the first of some folders that has it, unless it is installed.

    What was imported from other folders is forgotten, and so is all of a folder's where one of the
    files has changed: modules beside two scenarios may have one name. Raises what the module does.
    """
    if places != PLACES or any(_file_state(one) != state for one, state in OWN.items()):
        for one in OWN:
            sys.modules.pop(one, None)
        OWN.clear()
        PLACES[:] = places
    path, before = [*sys.path], {*sys.modules}
    installed = [one for one in path if one.startswith(LIBRARY) or one.endswith("-packages")]
    sys.path[:] = [*installed, *places, *path]
    try:
        _forget_another(name.partition(".")[0])
        return importlib.import_module(name)
    finally:
        sys.path[:] = path
        for new in filter(_is_beside, {*sys.modules} - before | {name}):
            OWN.setdefault(new, _file_state(new))


def _forget_another(top: str) -> None:
    """Forget a module that was imported from elsewhere than from `PLACES`, where it is now."""
    spec = None if top in SHIPPED else PathFinder.find_spec(top)
    found = spec.origin or "" if spec is not None else ""
    if _in_places(found) and getattr(sys.modules.get(top), "__file__", None) != found:
        for name in [one for one in sys.modules if one.partition(".")[0] == top]:
            del sys.modules[name]


def _is_beside(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in SHIPPED and _in_places(getattr(sys.modules.get(top), "__file__", None) or "")


def _in_places(file: str) -> bool:
    """Say whether a module or package lies in one of `PLACES`."""
    return os.path.dirname(file.removesuffix(f"{os.sep}__init__.py")) in PLACES


def _file_state(name: str) -> tuple[int, int] | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not os.path.exists(file):
        return None
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_size
