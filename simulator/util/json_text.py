"""JSON, without what brings Python's reader to its knees, and without keys given twice."""

import json
import re
import sys
from typing import Any


class _GivenTwiceError(Exception):
    """A key of an object that has it before."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys and values, of which Python would take the last of a name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise _GivenTwiceError(next(key for key in found if names.count(key) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
BLANK = re.compile(r"[ \t\r\n]*")


def parse_json(text: str | bytes) -> Any:
    """Read JSON; raise json.JSONDecodeError, also for what is too deep, too long a number, twice.

    Twice is a key that one object has two times: who wrote it meant one of its values.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    value, end = parse_value(text, 0)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def parse_value(text: str, at: int) -> tuple[Any, int]:
    """Read the value at a place, or after blanks there; give where the next one may begin."""
    try:
        value, end = _DECODER.raw_decode(text, skip_blanks(text, at))
    except _GivenTwiceError as error:
        key = re.escape(json.dumps(error.args[0]))
        places = [found.start() for found in re.finditer(rf"{key}\s*:", text)]
        what = f"the key {error.args[0]} is given twice"
        raise json.JSONDecodeError(what, text, max(places, default=0)) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text[:80], 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads no longer whole numbers
        limit = sys.get_int_max_str_digits()
        long = re.search(rf"[0-9]{{{limit + 1}}}", text) if limit else None
        if long is None:
            raise
        what = f"a number of more than {limit} digits"
        raise json.JSONDecodeError(what, text, long.start()) from None
    return value, skip_blanks(text, end)


def skip_blanks(text: str, at: int) -> int:
    """Return where a text goes on after blanks."""
    blank = BLANK.match(text, at)
    return blank.end() if blank else at
