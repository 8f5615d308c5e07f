"""python -m headway.vllm [CLASS]: say what would run, or in one line why it cannot."""

import sys

from headway.vllm.interface import check_vllm
from headway.vllm.policy import CLASSES, make_policy
from simulator.schedulers.vllm.rules import write_release
from simulator.util.errors import HeadwayError, one_line


def main(arguments: list[str]) -> int:
    """Run the command; return the exit code."""
    name = arguments[0].removeprefix("headway.vllm.") if arguments else "HeadwayScheduler"
    try:
        if name in ("-h", "--help"):
            print(f"usage: python -m headway.vllm [CLASS]; one of {', '.join(CLASSES)}")
            return 0
        if len(arguments) > 1 or name not in CLASSES:
            given = " ".join(arguments)
            raise HeadwayError(f"headway.vllm: {given}: must be one class of {', '.join(CLASSES)}")
        policy = make_policy(CLASSES[name])
        found = write_release(check_vllm("headway.vllm"))
        import headway.vllm.scheduler  # noqa: F401  it can be imported
    except ImportError as error:
        what = f"headway.vllm: vLLM cannot be imported in this Python: {one_line(error)}"
        print(f"error: {what}", file=sys.stderr)
        return 2
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"vLLM {found} with {type(policy).__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
