"""JSON, without the ways in which a text can bring Python's reader to its knees."""

import json
import re
import sys
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Read JSON; raise json.JSONDecodeError, also for what is too deep or too long a number."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", str(text[:80]), 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads no longer whole numbers, or the bytes are no UTF-8
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        limit = sys.get_int_max_str_digits()
        long = re.search(rf"[0-9]{{{limit + 1}}}", words) if limit else None
        if long is None:
            raise
        what = f"a number of more than {limit} digits"
        raise json.JSONDecodeError(what, words, long.start()) from None
