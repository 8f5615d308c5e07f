"""JSON, without the ways in which a text can bring Python's reader to its knees."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Read JSON; raise json.JSONDecodeError, also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", str(text[:80]), 0) from None
