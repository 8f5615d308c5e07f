"""Which policy shall run in vLLM or another engine: by the class asked for, and the environment."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simulator.build.policy_table import (
    POLICIES,
    POLICY_VARIABLE,
    check_arguments,
    policy_name,
)
from simulator.schedulers.base import SchedulerBase
from simulator.util.errors import HeadwayError, did_you_mean, one_line
from simulator.util.user_code import load_user_code

VARIABLE = POLICY_VARIABLE

PLUGIN_POLICIES = [n for n, cls in POLICIES.items() if not issubclass(cls, SchedulerBase)]
CLASSES: dict[str, str | None] = {
    "HeadwayScheduler": None,
    **{POLICIES[name].__name__: name for name in PLUGIN_POLICIES},
}
"""The classes for `--scheduler-cls`, and their policies; None: the one in HEADWAY_POLICY."""


def make_policy(
    wanted: str | None, engine: str = "vLLM", names: Iterable[str] = PLUGIN_POLICIES
) -> Any:
    """Make the policy that a class stands for, or that HEADWAY_POLICY names, to run in `engine`.

    `names` are those of Headway's that can run there, which an unknown name is told.
    The variable is a JSON object: `policy`, a name or `module:Class` (found on the Python path or
    in the working directory), and beside it arguments. Raises HeadwayError, in one line.
    """
    text = os.environ.get(VARIABLE, "")
    spec = _read(text)
    named = spec.pop("policy", wanted)
    if named is None:
        lack = "has no policy" if text.strip() else "is not set"
        raise HeadwayError(
            f'{VARIABLE}: {lack}; it names a policy, as in {{"policy": "sjf", "by": "hint"}}'
        )
    if wanted is not None and named != wanted:
        raise HeadwayError(
            f"{VARIABLE}: policy {named!r} cannot be used with a class that is {wanted}"
        )
    found = _find(named, engine, names)
    try:
        check_arguments(found, spec, taken={})
        return found(**spec)
    except Exception as error:
        what = one_line(error).replace("engine.scheduling_policy.", "")
        raise HeadwayError(f"{VARIABLE}: {policy_name(found)}: {what}") from error


def _read(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise HeadwayError(f"{VARIABLE}: {text!r} is no JSON: {one_line(error)}") from error
    if not isinstance(spec, dict):
        raise HeadwayError(f"{VARIABLE}: must be a JSON object, not {text!r}")
    return spec


def _find(name: object, engine: str, names: Iterable[str]) -> type:
    """Find a policy's class; refuse what is a scheduler of its own."""
    if isinstance(name, str) and ":" in name:
        try:
            found = load_user_code(name, Path.cwd())
        except ValueError as error:
            raise HeadwayError(f"{VARIABLE}: {error}") from error
    elif name in POLICIES:
        found = POLICIES[str(name)]
    else:
        known = ", ".join(names)
        raise HeadwayError(
            f"{VARIABLE}: no policy {name!r}; there are {known}, or package.module:Class"
            f"{did_you_mean(str(name), POLICIES)}"
        )
    if not isinstance(found, type) or issubclass(found, SchedulerBase):
        raise HeadwayError(
            f"{VARIABLE}: {name} is no policy that orders the waiting queue: it cannot run in "
            f"{engine}"
        )
    if not any(callable(getattr(found, hook, None)) for hook in ("key", "rank", "queue")):
        raise HeadwayError(
            f"{VARIABLE}: {name} has no method `key(request)` or `rank(waiting, now)`"
        )
    return found
