"""python -m headway.sglang: say what would run, or in one line why it cannot."""

import os
import sys
from importlib.metadata import entry_points

from headway.sglang.policy import check_sglang, make_order
from simulator.util.errors import HeadwayError, one_line


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    try:
        if arguments in (["-h"], ["--help"]):
            print("usage: python -m headway.sglang; the policy is in HEADWAY_POLICY")
            return 0
        if arguments:
            raise HeadwayError(f"headway.sglang: takes no arguments, not {' '.join(arguments)}")
        policy = make_order()
        found = check_sglang()
        allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
        ours = [one for one in entry_points(group="sglang.srt.plugins") if one.name == "headway"]
        if not ours:
            raise HeadwayError(
                "headway.sglang: is not installed: pip install Headway beside SGLang"
            )
        if allowed and "headway" not in allowed:
            raise HeadwayError(
                "SGLANG_PLUGINS: leaves headway out: SGLang would run without the policy"
            )
    except ImportError as error:
        print(f"error: headway.sglang: {one_line(error)}", file=sys.stderr)
        return 2
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"SGLang {found} with {type(policy).__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
