"""YAML with the line of every key."""

import pickle
from math import inf
from pathlib import Path
from time import process_time

import pytest
import yaml

from simulator.util import yaml_lines
from simulator.util.errors import (
    FieldError,
    HeadwayError,
    MappingError,
    ScenarioError,
    field_errors,
)
from simulator.util.yaml_lines import SourceMap, dump_yaml, parse, read_text


def test_every_key_and_item_has_its_line():
    """Keys are told by the path that leads to them; an item of a list by its index."""
    value, lines = parse("a: 1\nb:\n  c: {d: 2}\n  e:\n  - 3\n  - 4\n", "x")
    assert value == {"a": 1, "b": {"c": {"d": 2}, "e": [3, 4]}}
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", "d"): 3,
        ("b", "e"): 4,
        ("b", "e", "0"): 5,
        ("b", "e", "1"): 6,
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5e3", 1500),
        ("2e6", 2_000_000),
        ("-1E-2", -0.01),
        ("inf", inf),
        ("-inf", -inf),
        (".inf", inf),
        ("10", 10),
        ("1.0", 1.0),
        ("infinite", "infinite"),
        ("1e", "1e"),
        ("'1e3'", "1e3"),
        ("", None),
    ],
)
def test_numbers_are_read_as_written(text, value):
    """YAML 1.1 takes 1e-3 and inf for words; a whole number stays one in any notation."""
    read, _ = parse(text, "x")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.many
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x:3: a: given before, on line 1"),
        (
            "a:\n  b: 1\n  b: 2\n1: 2",
            "x:3: a.b: given before, on line 2\nx:4: a key must be a word",
        ),
        ("? [a]\n: 1", "x:1: a key must be a word"),
        ("a: &one 1\nb: 2", "x:1: not YAML: anchors and aliases (&, *) are not supported"),
        ("a: 1\nb: *one", "x:2: not YAML: anchors and aliases (&, *) are not supported"),
        (
            "a: [1\nb: 2",
            "x:2: not YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        (
            "a: 1\n\tb: 2",
            "x:2: not YAML: while scanning for the next token, found character '\\t' that cannot "
            "start any token",
        ),
        ("a: 1\nb: \x07", "x:2: not YAML: special characters are not allowed"),
        (
            "a: 1\n---\nb: 2",
            "x:2: not YAML: expected a single document in the stream, but found another document",
        ),
        ("a: !!python/name:os.system", None),
        ("a: 2024-13-01", "x: not YAML: month must be in 1..12"),
        (
            "a: 010\nb: [-0_17, 08, 0, 10, 0x10, '010']",
            "x:1: a: YAML 1.1 reads 010 as 8; write 8, or 10 for the decimal number\n"
            "x:2: b.0: YAML 1.1 reads -0_17 as -15; write -15, or -17 for the decimal number",
        ),
        (
            "a: yes\nb: {c: Off, d: True, e: 'yes', f: y}",
            'x:1: a: YAML 1.1 reads yes as true; write true, or "yes" in quotes for the text\n'
            'x:2: b.c: YAML 1.1 reads Off as false; write false, or "Off" in quotes for the text',
        ),
        (
            "- 1:30\n- 1:30.5\n- 1.5",
            'x:1: 0: YAML 1.1 reads 1:30 as 90; write "1:30" in quotes for the text '
            "(a ratio, a time), or 90\n"
            'x:2: 1: YAML 1.1 reads 1:30.5 as 90.5; write "1:30.5" in quotes for the text '
            "(a ratio, a time), or 90.5",
        ),
        ("[" * 5000, None),
    ],
)
def test_bad_yaml_is_told_with_its_line(text, message):
    """Nothing but plain YAML is read, and every mistake has its place."""
    with pytest.raises(HeadwayError) as caught:
        parse(text, "x")
    assert str(caught.value).startswith("x:")
    assert message is None or str(caught.value) == message


def test_files_that_are_no_text_are_told(tmp_path: Path):
    """A missing file, a folder and bytes that are not UTF-8; a byte order mark does no harm."""
    with pytest.raises(HeadwayError, match=r"nothing\.yaml: no such file$"):
        read_text(tmp_path / "nothing.yaml")
    with pytest.raises(HeadwayError, match=r"cannot be read: Is a directory$"):
        read_text(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(HeadwayError, match=r"latin.yaml:2: is not UTF-8 text$"):
        read_text(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_text(path) == "a: 1\n"


def test_a_fault_is_told_at_the_nearest_place():
    """The key's own line, or that of the block it should be in, or just the file."""
    source_map = SourceMap("f.yaml", {("a",): 3, ("a", "b"): 4})
    assert source_map.message(FieldError(("a", "b"), "is bad")) == "f.yaml:4: a.b: is bad"
    assert source_map.message(FieldError(("a", "c", "d"), "is bad")) == "f.yaml:3: a.c.d: is bad"
    assert source_map.message(FieldError(("z",), "is bad")) == "f.yaml: z: is bad"
    source_map.override(("a",), "--set a={}")
    assert source_map.message(FieldError(("a", "b"), "is bad")) == "--set a={}: a.b: is bad"
    assert [source_map.line(key) for key in [("a", "b"), ("z",)]] == [inf, 0]


def test_an_error_is_taken_apart_into_faults():
    """Keys of a mapping are below its own, those of a scenario whole; others blame the value."""
    whole = FieldError((), "must be a mapping", "value")
    error = MappingError([FieldError(("low", "0"), "is bad"), whole])
    assert field_errors(("a",), error) == [
        (("a", "low", "0"), "is bad", "unsupported"),
        (("a",), "must be a mapping", "value"),
    ]
    assert str(error) == "low.0: is bad\n: must be a mapping"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    (inside,) = field_errors(("a",), ScenarioError("b.c", "is bad", "model"))
    assert inside == (("b", "c"), "is bad", "model")
    assert [fault[:2] for fault in field_errors(("a",), ValueError("low: is bad\nall"))] == [
        (("a",), "low: is bad"),
        (("a",), "all"),
    ]


GOOD = (
    "",
    "a: 1e-3",
    "a: [2e3, inf, -inf, yes, 0x1F, 1_000, 2024-01-01]\nb: {c: |\n  d}",
    "é: ß\n",
)
BAD = (
    "a: [",
    "a: 1\na: 2",
    "a: &x 1",
    "a: *x",
    "\ta: 1",
    "a: \x07",
    "a: 2024-13-01",
    "- &x",
    "a: !x y",
)


@pytest.mark.many
@pytest.mark.parametrize("text", [*GOOD, *BAD, "x: '" + "\n" * 50, "a: \ud800", "[" * 3000])
def test_with_and_without_libyaml_all_is_the_same(monkeypatch, text):
    """Values, lines and messages."""
    found = []
    for fast in (yaml_lines._FAST, []):
        monkeypatch.setattr(yaml_lines, "_FAST", fast)
        try:
            found.append(repr(parse(text, "s.yaml")))
        except HeadwayError as error:
            found.append(error.messages)
    assert found[0] == found[1]


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML is without libyaml")
def test_a_long_line_takes_no_time():
    """10 MB of text in one value: without libyaml they take five seconds."""
    begin = process_time()
    values, _ = parse(f"name: {'word ' * 2_000_000}\n", "s.yaml")
    assert len(values["name"]) == 9_999_999
    assert process_time() - begin < 2


def test_words_that_look_like_numbers_are_quoted() -> None:
    """A scenario in inf.yaml is named `inf`, and its written form is read again."""
    value = {"name": "inf", "other": "1e3", "number": 1e3, "rate": float("inf"), "word": "info"}
    assert "name: 'inf'" in dump_yaml(value)
    assert parse(dump_yaml(value), "x")[0] == value
