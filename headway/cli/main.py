"""The command `headway`: its verbs, and what goes wrong told in one line each.

Only the verb that is called is imported.
"""

import gc
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cyclopts import App, CycloptsError

from headway.cli.console import one_line_warnings, print_errors, print_interrupt, print_os_error
from simulator.util.environment import SAFE_PATH
from simulator.util.errors import HeadwayError, NoAnswerError, one_line
from simulator.util.files import READ_FILES, WRITTEN_FILES
from simulator.util.user_code import NO_OWN_CODE, exit_message
from simulator.util.version import __version__

# To import what a verb needs makes many objects that stay: looking for cycles takes 0.03 s or more.
gc.set_threshold(200_000)
# Nothing here multiplies matrices, and numpy's BLAS spends 0.1 s of CPU on starting its threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Pydantic would look for plug-ins in every installed package, and import `email` to read of them.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
os.environ.update(SAFE_PATH)  # for every Python that a verb starts, whichever library does

VERBS = {
    "init": "Write a first scenario, from answers or options.",
    "run": "Simulate a scenario; print its report, write its files.",
    "compare": "Simulate a scenario with some keys varied, side by side.",
    "sweep": "Simulate a scenario at many points, on all cores or a cluster; one row per point.",
    "plan": "Find the largest rate under service levels, the fewest replicas, the cheapest fleet.",
    "rollouts": "Simulate rollouts of reinforcement learning: how long steps wait for answers.",
    "plot": "Draw a picture of what run, compare, sweep, plan or live wrote.",
    "report": "Write an HTML page of runs.",
    "diagnose": "Find what limits a run, and simulate each change that it advises.",
    "explain": "Explain where one request's time went.",
    "trace": "Describe a workload, write it as Mooncake JSONL, or read a running server's.",
    "memory": "Print how many tokens and requests fit on a GPU.",
    "engines": "List the named engines.",
    "schema": "Print the scenario's JSON Schema, for completion and checks in an editor.",
    "conform": "Compare every decision with a recorded schedule of vLLM or SGLang.",
    "serve": "Answer over HTTP as the scenario's vLLM server would, without a GPU.",
    "studio": "Change a scenario on a local page, and see the results at once.",
    "tokenizer": "Write a small tokenizer, for `serve` and its clients.",
    "doctor": "Check the installation: versions, extras, data, a short run.",
    "completion": "Install completion for bash, zsh or fish.",
    "live": "Run a scenario on a real engine.",
    "calibrate": "Measure what steps take on a device, and fit a cost profile to them.",
    "profile": "List the cost profiles, or show one.",
    "replay": "Send a scenario's requests to a real server, and measure the answers.",
    "shadow": "Compare a live server with the simulation of its own traffic.",
    "validate": "Compare a live run, or measured runs of real servers, with their simulation.",
}
"""Each verb, in a file and function of its name, and its line of `headway --help`."""
ABOVE = {
    "conform": "headway.conformance.command:conform",
    "serve": "headway.twin.commands:serve",
    "tokenizer": "headway.twin.commands:tokenizer",
    "replay": "headway.twin.commands:replay",
    "shadow": "headway.twin.commands:shadow",
    "live": "calibration.commands:live",
    "calibrate": "calibration.commands:calibrate",
    "profile": "calibration.profile_commands:app",
    "validate": "calibration.commands:validate",
}
"""The verbs of packages that stand on the simulator, and where they are."""

app = App(
    name="headway",
    help="Simulate how an LLM server batches requests, and how long its users wait.",
    version=__version__,
    version_flags=["--version"],
    help_format="plaintext",  # markdown's parser takes longer to import than all the rest
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for verb, line in VERBS.items():
    place = ABOVE.get(verb, f"headway.cli.{verb}:{verb}")
    # `memory --version` is the engine's; what is an App by itself takes no flags here.
    flags: dict[str, Any] = {"version_flags": []} if verb == "memory" else {}
    app.command(place, name=verb, help=line, **flags)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Whatever the user did wrong is told on stderr."""
    READ_FILES.clear()
    WRITTEN_FILES.clear()
    no_own_code = os.environ.get(NO_OWN_CODE)
    try:
        with one_line_warnings():
            _refuse_empty(sys.argv[1:] if argv is None else argv)
            code = app(argv, exit_on_error=False, print_error=False)
            print(end="", flush=True)
    except HeadwayError as error:
        code = print_errors(error.messages)
        code = 1 if isinstance(error, NoAnswerError) else code
    except MemoryError as error:
        code = print_errors([f"not enough memory: {one_line(error) or 'no more is given to us'}"])
    except CycloptsError as error:
        from headway.cli.usage import usage_message

        return print_errors([usage_message(error)])
    except KeyboardInterrupt:
        return print_interrupt()
    except SystemExit as error:
        return _print_exit(error)
    except OSError as error:
        return print_os_error(error)
    finally:  # --no-own-code is for this command
        if no_own_code is None:
            os.environ.pop(NO_OWN_CODE, None)
    return code or 0


def _refuse_empty(argv: Sequence[str]) -> None:
    """Raise HeadwayError where a word is empty: a path would be the current folder."""
    for word, value in pairwise(["headway", *argv]):
        if not value or re.fullmatch(r"--[\w-]+=", value):
            raise HeadwayError(f"{value[:-1] or word}: needs a value, but got an empty one")


def _print_exit(error: SystemExit) -> int:
    """Say whose code asked Python to end; rich does where what we print to is closed."""
    if isinstance(error.__context__, BrokenPipeError):
        return print_os_error(error.__context__)
    return print_errors([exit_message(error)])
