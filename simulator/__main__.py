"""Where the command `headway` begins, also `python -m simulator`.

Ctrl-C is told in one line even while the command line itself is still being imported; see
`simulator/cli/console.py` for later.
"""

import sys


def main() -> int:
    """Import the command line and run it; return the exit code."""
    try:
        from simulator.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("headway: interrupted; no file was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
