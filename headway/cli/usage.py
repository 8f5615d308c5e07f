"""What is wrong with a command line itself: the option, what it is given, and what it takes."""

import re
from typing import get_args

from cyclopts import Argument, CycloptsError
from cyclopts import exceptions as wrong

from simulator.util.errors import did_you_mean, one_line

SETTABLE = ("run", "compare", "sweep", "plan", "rollouts")  # take --set
TAKES = {
    int: "must be a whole number such as 64",
    float: "must be a number such as 0.5",
    bool: "takes no value",
}
HELP_DEFAULT = re.compile(r" \[default: .*\]$")


def usage_message(error: CycloptsError) -> str:
    """Return a command line's fault as a line; an option's help says its unit."""
    verb = " ".join(error.command_chain or ())
    if isinstance(error, wrong.UnknownCommandError):
        verb = (error.unused_tokens or [""])[0]
        verbs = [name for name in error.app or () if name[0] != "-"]
        return f"{verb}: no verb; there are {', '.join(verbs)}{did_you_mean(verb, verbs)}"
    if isinstance(error, wrong.UnusedCliTokensError):
        unused = error.unused_tokens or []
        key = verb in SETTABLE and next((one for one in unused if re.match(r"[\w.]+=", one)), "")
        hint = f"; a key is set by --set {key}" if key else ""
        return f"unexpected argument: {' '.join(unused)}{hint}"
    if isinstance(error, wrong.UnknownOptionError):
        option = error.token.keyword or error.token.value
        names = [name[2:] for one in error.argument_collection for name in one.names]
        near = did_you_mean(option.lstrip("-"), filter(None, names)).replace("mean ", "mean --")
        return f"{option}: unknown option{near or f'; `headway {verb} --help` has its options'}"
    if isinstance(error, wrong.RepeatArgumentError):
        return f"{error.token.keyword} {error.token.value}: is given before; give it once"
    if error.argument is None:
        return one_line(error)
    meaning = HELP_DEFAULT.sub("", error.argument.parameter.help or "")
    return _of_option(error, error.argument, f" ({meaning})")


def _of_option(error: CycloptsError, argument: Argument, meaning: str) -> str:
    """Say what is wrong with an option's value, or that it has none."""
    if isinstance(error, wrong.MissingArgumentError):
        what = "is missing" if error.keyword is None else "needs a value"
        return f"{error.keyword or argument.name}: {what}{meaning}"
    token = getattr(error, "token", None) or argument.tokens[-1]
    place = f"{token.keyword or argument.name} {token.value}"
    if isinstance(error, wrong.ValidationError):
        return f"{place}: {error.exception_message}{meaning}"
    if isinstance(error, wrong.CoercionError):
        kinds = [error.target_type, *get_args(error.target_type)]
        choices = [kind for kind in kinds if isinstance(kind, str)]
        plain = [TAKES[kind] for kind in kinds if kind in TAKES]
        takes = plain[0] if plain else f"must be one of {', '.join(choices)}"
        return f"{place}: {takes}{meaning}{did_you_mean(token.value, choices)}"
    return one_line(error)
