"""Imports SimPy without what it would import to look up its own version: a parser of e-mails.

With `importlib.metadata` and all below it SimPy takes five times as long to import.
"""

import importlib
import sys
from importlib import import_module
from types import ModuleType

METADATA = "importlib.metadata"

if METADATA not in sys.modules and "simpy" not in sys.modules:
    nothing = ModuleType(METADATA)
    vars(nothing).update(version=lambda _: None, PackageNotFoundError=ImportError)
    sys.modules[METADATA] = nothing
    importlib.metadata = nothing
    try:
        import_module("simpy")
    finally:
        del sys.modules[METADATA], importlib.metadata
