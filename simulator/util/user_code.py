"""Code of the user's that a scenario names: found beside the scenario, blamed where it fails."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simulator.util.errors import HeadwayError, MappingError, did_you_mean, one_line
from simulator.util.own_modules import import_from

NO_OWN_CODE = "HEADWAY_NO_OWN_CODE"
"""The environment variable that, where it is set and not empty, refuses users' code. Workers
inherit it."""
REFUSED = "is code of the scenario's own, which --no-own-code refuses"
NOT_USERS = str(Path(__file__).parents[1]), str(Path(os.__file__).parent / "importlib"), "<"
"""How the names of files begin that are Headway's or Python's import."""
LOADED: set[str] = set()
"""What was loaded: its files may be open, which Python closes as it ends."""
SEARCHED: list[str] = []
"""What `search_in` has added to `sys.path`."""
NOT_ALLOWED = "is code of the scenario's own: serve runs it with --own-code alone, the studio never"


def own_code_refused() -> bool:
    """Say whether this process may load no code that a scenario names."""
    return bool(os.environ.get(NO_OWN_CODE))


def search_in(folder: Path) -> list[str]:
    """Let modules be imported from a scenario's folder, after all others, and from this one.

    From this one, since a scenario that a run wrote lies elsewhere than the code it names. The
    folder of a scenario before is searched no more. Return both.
    """
    places = list(dict.fromkeys((str(folder.resolve()), os.getcwd())))
    for path in SEARCHED:
        if path in sys.path:  # the last, as a user may have added it at the front
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(path)]
    SEARCHED[:] = [path for path in places if path not in sys.path]
    sys.path += SEARCHED
    return places


def unknown_name(what: str, name: str, known: Iterable[str], form: str) -> MappingError:
    """Say that nothing shipped has a name, and what there is beside the user's own of a form."""
    there = f"there are {', '.join(known)}, or package.module:{form}"
    return MappingError("", f"no {what} {name!r}; {there}{did_you_mean(name, known)}", "value")


def load_user_code(name: str, folder: Path) -> Any:
    """Import what `package.module:attribute` names; raise ValueError where that fails.

    Importing a module runs it. Whoever gets the attribute looks what it is before it calls it.
    """
    if own_code_refused():
        raise ValueError(f"{name} {REFUSED}")
    module, _, attribute = name.partition(":")
    places = search_in(folder)
    LOADED.add(name)
    try:
        found = import_from(places, module)
        if hasattr(found, attribute):
            return getattr(found, attribute)
        raise AttributeError(f"{found} has no attribute {attribute!r}")
    except (Exception, SystemExit) as error:  # whatever the module does
        raise ValueError(f"cannot load {name}: {with_line(error)}") from error


def with_line(error: BaseException) -> str:
    """Return an error's type and text, and the first line of the user's that led to it."""
    from traceback import extract_tb

    text = f"{type(error).__name__}: {one_line(error)}"
    for place in extract_tb(error.__traceback__):
        if not place.filename.startswith(NOT_USERS):
            return f"{text} ({Path(place.filename).name}:{place.lineno})"
    return text


def failure_lines(error: Exception | SystemExit) -> Sequence[str]:
    """Say what ended a part of a run."""
    if isinstance(error, HeadwayError):
        return error.messages
    if isinstance(error, SystemExit):
        return [exit_message(error)]
    return [f"{type(error).__name__}: {one_line(error)}"]


def exit_message(error: SystemExit) -> str:
    """Say where code of the user's asked Python to end, which is no way for a part of a run."""
    from traceback import extract_tb

    place = extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{where}: {place.name} raised SystemExit: {error.code}"


@contextmanager
def blaming(found: Iterable[type], key: str = "engine.scheduling_policy") -> Iterator[None]:
    """Say of an exception which of the user's own classes led to it, at the key that names it."""
    try:
        yield
    except Exception as error:
        told = next(filter(None, (user_error(cls, error, key) for cls in found)), None)
        if told is None:
            raise
        raise told from error


def user_error(found: type, error: Exception, key: str) -> HeadwayError | None:
    """Say which line of a user's class, or of a base of it, led to an exception.

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
    text = f"raised {type(error).__name__}: {one_line(error)}"
    from traceback import extract_tb

    for place in reversed(extract_tb(error.__traceback__)):
        if place.filename in files:
            where = f"{Path(place.filename).name}:{place.lineno}"
            text = f": {place.name} {text} ({where})"
            return HeadwayError(f"{key}: {found.__name__}{text}")
    return HeadwayError(f"{key}: {found.__name__} {text}")
