"""A router of the user's own: a function, or an object with `choose`."""

from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Protocol

from simulator.cluster.routers import Target
from simulator.core.request import Request
from simulator.util.errors import HeadwayError


class Chooser(Protocol):
    """A router of the user's own: a function, or an object whose `choose` this is."""

    def __call__(self, request: Request, targets: Sequence[Target]) -> int:
        """Return the place in `targets`, the open ones by index, that the request goes to."""


class Own:
    """Asks a function of the user's; HeadwayError where it fails. The time it takes is theirs."""

    def __init__(self, name: str, choose: Chooser, key: str = "cluster.router") -> None:
        self._name, self._choose, self._key = name, choose, key
        self._targets: list[Target] = []

    def open(self, target: Target) -> None:
        self._targets.append(target)
        self._targets.sort(key=lambda one: one.index)

    def close(self, target: Target) -> None:
        self._targets.remove(target)

    def changed(self, target: Target) -> None:
        """Nothing is kept about a target."""

    def choose(self, request: Request, session: int) -> Target:
        try:
            at = self._choose(request, self._targets)
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            raise HeadwayError(
                f"{self._key}: {self._name}(request {request.id}) raised "
                f"{type(error).__name__}: {' '.join(str(error).split())} "
                f"({Path(place.filename).name}:{place.lineno})"
            ) from error
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < len(self._targets):
            raise HeadwayError(
                f"{self._key}: {self._name}(request {request.id}) gave {at!r}, which is none "
                f"of the places 0 to {len(self._targets) - 1}"
            )
        return self._targets[at]
