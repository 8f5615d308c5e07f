"""JSON that is refused where Python would take it, or fall over it."""

import json

import pytest

from simulator.util.json_text import parse_json


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1,\n "a": 1}', "the key a is given twice: line 2 column 2 (char 10)"),
        (
            b'{"b": {"a": 1, "c": 2, "a": 3}}',
            "the key a is given twice: line 1 column 24 (char 23)",
        ),
        (
            '[{"a": 1}, {"\\"q": 1, "\\"q": 2}]',
            'the key "q is given twice: line 1 column 23 (char 22)',
        ),
        ("[" * 100_000, "nested too deeply: line 1 column 1 (char 0)"),
        ("[1, " + "9" * 5000 + "]", "a number of more than 4300 digits: line 1 column 5 (char 4)"),
    ],
)
def test_refused(text: str | bytes, what: str) -> None:
    """With the line and column."""
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json(text)
    assert str(caught.value) == what


def test_read() -> None:
    """The same key of several objects, texts and bytes."""
    assert parse_json('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]
    assert parse_json(b"\xef\xbb\xbf{}") == {}
