"""Case files: what `headway conform` lets a scheduler decide.

A case is a JSON object: scheduler settings, a step-time model and requests, all times in integer
nanoseconds (`docs/conformance.md` has the fields). Its settings tell whether it is for vLLM's
scheduler or SGLang's. A file holds one case (.json) or one in each line (.jsonl); either may be
packed by gzip.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.conformance.case_model import Case, SglangCase, SglangConfig, VllmConfig
from simulator.util.errors import FieldError, HeadwayError, field_errors
from simulator.util.files import check_regular, write_atomic
from simulator.util.json_text import parse_json
from simulator.util.yaml_lines import SourceMap, parse


def read_cases(path: Path) -> list[Case]:
    """Read a file of one case or of many; HeadwayError lists all mistakes with their lines."""
    lines = read_lines(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        text = "\n".join(lines)
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise HeadwayError(f"{path}:{getattr(error, 'lineno', 1)}: bad JSON: {error}") from None
        return [_check(raw, lambda: _source_map(path, text))]
    cases, messages = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                raw = parse_line(path, number, line)
                cases.append(_check(raw, partial(SourceMap, f"{path}:{number}", {})))
            except HeadwayError as error:
                messages += error.messages
    if messages or not cases:
        raise HeadwayError(messages or f"{path}: has no case")
    return cases


def _source_map(path: Path, text: str) -> SourceMap:
    """Find the line of every key."""
    try:
        lines = parse(text, str(path))[1]
    except HeadwayError:
        lines = {}  # JSON that is not YAML: a key twice, a tab
    return SourceMap(str(path), {(): 1} | lines)


def _check(raw: object, source_map: Callable[[], SourceMap]) -> Case:
    """Make a case of plain values, or raise HeadwayError with everything that is wrong."""
    config = raw.get("config") if isinstance(raw, dict) else None
    own = SglangConfig.model_fields.keys() - VllmConfig.model_fields.keys()
    kind = SglangCase if isinstance(config, dict) and own & config.keys() else Case
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        wrong = [fault for one in error.errors(include_url=False) for fault in _faults(one)]
        raise HeadwayError(map(source_map().message, wrong)) from None


def _faults(details: Any) -> Iterator[FieldError]:
    """Put one of pydantic's errors into our words."""
    key = tuple(map(str, details["loc"]))
    option = key[:1] in (("config",), ("step_time",))
    words = {
        "missing": "missing",
        "extra_forbidden": "an option that Headway does not know"
        if option
        else "Headway does not know this key",
        "model_type": "must be an object" if key else "not a JSON object",
        "list_type": "must be a list",
        "string_type": "must be a string",
    }
    if details["type"] == "value_error":
        yield from field_errors(key, details["ctx"]["error"])
    else:
        yield FieldError(key, words.get(details["type"], details["msg"]))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, plain or packed; HeadwayError says what is in the way."""
    check_regular(path)
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        return raw.decode().split("\n")
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file; a case is a file such as case.json") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise HeadwayError(f"{path}:{line}: is not UTF-8 text") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HeadwayError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None


def parse_line(path: Path, number: int, line: str) -> Any:
    """Parse one line of JSON."""
    try:
        return parse_json(line)
    except ValueError as error:
        raise HeadwayError(f"{path}:{number}: bad JSON: {error}") from None


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text, packed if the file's name ends in .gz."""
    data = "".join([f"{line}\n" for line in lines]).encode()
    packed = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    write_atomic(path, packed)
