"""headway completion: let a shell complete verbs and options."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from simulator.util.errors import HeadwayError


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"] | None,
        Parameter(name="SHELL", help="bash, zsh or fish", show_default=False),
    ] = None,
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(help="write the script here, and change no other file", show_default=False),
    ] = None,
) -> int:
    """Install completion of verbs and options for a shell, by default for that which calls.

    Writes a script to the place where the shell looks for it, and a line into its startup file.
    """
    from cyclopts.completion import ShellDetectionError

    from headway.cli.main import app
    from simulator.util.files import check_file, write_atomic

    try:
        if out is not None:
            check_file("--out", out)
            write_atomic(out, app.generate_completion(shell=shell).encode())
            print(f"written to {out}")
            return 0
        path = app.install_completion(shell=shell)
    except ShellDetectionError:
        raise HeadwayError("completion: which shell is it: bash, zsh or fish?") from None
    except (RuntimeError, ValueError) as error:
        raise HeadwayError(f"completion: {error}") from None
    print(f"written to {path}; begins with the next shell")
    return 0
