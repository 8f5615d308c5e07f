"""Code of the user's that a scenario names, looked up beside the scenario, too."""

import importlib
import sys
from pathlib import Path
from typing import Any


def search_in(folder: Path) -> None:
    """Let modules be imported from a scenario's folder, after all others."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)


def load_own(name: str, folder: Path) -> Any:
    """Import what `package.module:attribute` names; raise ValueError where that fails."""
    module, _, attribute = name.partition(":")
    search_in(folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does
        raise ValueError(f"cannot load {name}: {' '.join(str(error).split())}") from error
