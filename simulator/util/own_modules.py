"""Modules of the user's beside a scenario: each folder's own, as its files are now."""

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

SHIPPED = {*sys.stdlib_module_names, "headway", "simulator"}
"""Names of modules that are never the user's."""


class Loaded(NamedTuple):
    """A file as it was when its module was loaded."""

    file: Path
    changed: int  # ns
    size: int  # bytes

    @classmethod
    def of(cls, file: Path) -> "Loaded":
        """Look at a file; one that is gone has no size."""
        if not file.exists():
            return cls(file, 0, -1)
        stat = file.stat()
        return cls(file, stat.st_mtime_ns, stat.st_size)


OWN: dict[str, Loaded] = {}
"""The modules that are loaded from `PLACES`, by their names in `sys.modules`."""
PLACES: list[str] = []


def import_from(places: Sequence[str], name: str) -> ModuleType:
    """Import a module from the first of some folders that has it, unless it is installed.

    What was imported from other folders is forgotten, and so is all of a folder's where one of the
    files has changed: modules beside two scenarios may have one name. Raises what the module does.
    """
    if [*places] != PLACES or any(Loaded.of(one.file) != one for one in OWN.values()):
        _forget(OWN)
        OWN.clear()
        PLACES[:] = places
    before = {*sys.modules}
    try:
        _load_package(places, name.partition(".")[0])
        return importlib.import_module(name)
    finally:
        _keep({*sys.modules} - before | {name})


def _load_package(places: Sequence[str], name: str) -> None:
    """Load what Python would not find, or find elsewhere first: it looks in `places` last."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    if name in SHIPPED or PathFinder.find_spec(name, installed) is not None:
        return
    spec = PathFinder.find_spec(name, places)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    if getattr(sys.modules.get(name), "__file__", None) == spec.origin:
        return
    _forget([one for one in sys.modules if one.partition(".")[0] == name])
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        _forget([name])
        raise


def _forget(names: Iterable[str]) -> None:
    for name in names:
        sys.modules.pop(name, None)


def _keep(names: Iterable[str]) -> None:
    """Put down which of some modules are from the folders, and as what file."""
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            continue
        for place in PLACES:
            path = Path(place, *name.split("."))
            if Path(file).with_suffix("") in (path, path / "__init__"):
                OWN.setdefault(name, Loaded.of(Path(file)))
