"""Modules under the names that pages and notebooks gave them before they had folders."""

import sys


class FormerNames:
    """Finds modules of a package by their former names; whoever uses one is told the new one."""

    def __init__(self, package: str, homes: dict[str, str]) -> None:
        """`homes` has the new name of each former one, both within `package`."""
        self.homes = {f"{package}.{old}": f"{package}.{new}" for old, new in homes.items()}
        sys.meta_path.append(self)  # type: ignore[arg-type]

    def find_spec(self, name: str, *_: object) -> object:
        """Say who loads a module of a former name: called where nobody else knows it."""
        if name not in self.homes:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        home = find_spec(self.homes[name])
        assert home is not None
        return ModuleSpec(name, self, origin=home.origin)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        """Let there be a module, for as long as the import takes."""

    def exec_module(self, module: object) -> None:
        """Put the module of the new name in its place."""
        from importlib import import_module
        from warnings import warn

        name = module.__name__  # type: ignore[attr-defined]
        home = self.homes[name]
        warn(f"{name} is now {home}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(home)

    def get_code(self, name: str) -> object:
        """Give what `python -m` runs."""
        from importlib.util import find_spec

        spec = find_spec(self.homes[name])
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]
