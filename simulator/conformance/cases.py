"""Case files and recorded schedules: what `headway conform` compares.

A case is a JSON object: scheduler settings, a step-time model and requests, all times in integer
nanoseconds (`docs/conformance.md` has the fields). A file holds one case (.json) or one in each
line (.jsonl); either may be packed by gzip. Its schedule is a file of JSON lines.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError
from simulator.util.yaml_lines import Key, parse

Fault = tuple[Key, str]

CONFIG: dict[str, Any] = {
    "policy": "fcfs",
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "reserve_full_isl": True,
    "watermark": 0.0,
    "prefill_schedule_interval": 1,
    "async_scheduling": False,
    "block_size": 16,
    "num_gpu_blocks": 10000,
    "enable_prefix_caching": True,
    "hash_id_tokens": 512,
}
"""Settings of a case and their defaults: vLLM's names, but `reserve_full_isl` for
`scheduler_reserve_full_isl`."""
STEP_TIME = {
    "base_ns": 6_000_000,
    "per_token_ns": 40_000,
    "per_context_token_ns": 40,
    "empty_ns": 1_000_000,
}
"""A step takes base + per_token * tokens + per_context_token * context, an empty one empty_ns."""
_CASE = {"schema", "name", "about", "config", "step_time", "max_steps", "requests"}
_REQUEST = {
    "id", "arrival_ns", "prompt_len", "output_len", "priority", "segments", "hash_ids"
}  # fmt: skip
_LEAST = {"long_prefill_token_threshold": 0, "num_gpu_blocks": 2}
_LIMIT = 2**53  # integers up to here are exact in a float


@dataclass(slots=True, frozen=True)
class CaseRequest:
    """One request of a case."""

    id: int
    arrival_ns: int
    prompt_len: int
    output_len: int
    priority: int
    segments: Segments | None


@dataclass(slots=True, frozen=True)
class Case:
    """One case, with all defaults filled in."""

    name: str
    config: dict[str, Any]
    step_time: dict[str, int]
    requests: list[CaseRequest]
    max_steps: int | None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, plain or packed; HeadwayError says what is in the way."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        return raw.decode().split("\n")
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise HeadwayError(f"{path}:{line}: is not UTF-8 text") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HeadwayError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None


def read_cases(path: Path) -> list[Case]:
    """Read a file of one case or of many; HeadwayError lists all mistakes with their lines."""
    lines = read_lines(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        text = "\n".join(lines)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise HeadwayError(f"{path}:{getattr(error, 'lineno', 1)}: bad JSON: {error}") from None
        case, wrong = _case(raw)
        if case is None:
            raise HeadwayError(_told(path, text, wrong))
        return [case]
    cases, messages = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            case, wrong = _case(parse_line(path, number, line))
            messages += [_message(f"{path}:{number}", fault) for fault in wrong]
            if case is not None:
                cases.append(case)
    if messages or not cases:
        raise HeadwayError(messages or f"{path}: holds no case")
    return cases


def parse_line(path: Path, number: int, line: str) -> Any:
    """Parse one line of JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HeadwayError(f"{path}:{number}: bad JSON: {error}") from None


def _told(path: Path, text: str, wrong: list[Fault]) -> Iterator[str]:
    """Give each mistake the line on which it stands."""
    try:
        lines = parse(text, str(path))[1]
    except HeadwayError:
        lines = {}  # JSON that is not YAML: a key twice, a tab
    for key, what in wrong:
        near = key
        while near and near not in lines:
            near = near[:-1]
        yield _message(f"{path}:{lines.get(near, 1)}", (key, what))


def _message(place: str, fault: Fault) -> str:
    key, what = fault
    return ": ".join([place, *([".".join(key)] if key else []), what])


def _case(raw: object) -> tuple[Case | None, list[Fault]]:
    """Check a case; return it, or None and what is wrong."""
    if not isinstance(raw, dict):
        return None, [((), "not a JSON object")]
    wrong = _unknown(raw, _CASE, ())
    if raw.get("schema") != 1:
        wrong.append((("schema",), f"must be 1, not {raw.get('schema')!r}"))
    if not isinstance(raw.get("name"), str):
        wrong.append((("name",), "must be a string"))
    config = _settings(raw.get("config", {}), CONFIG, "config", wrong)
    step_time = _settings(raw.get("step_time") or {}, STEP_TIME, "step_time", wrong)
    max_steps = raw.get("max_steps")
    if max_steps is not None and not _whole(max_steps, 1):
        wrong.append((("max_steps",), f"must be a whole number >= 1, not {max_steps!r}"))
    listed = raw.get("requests")
    if not isinstance(listed, list):
        wrong.append((("requests",), "must be a list"))
    if not wrong:
        _check_config(config, wrong)
    if wrong or not isinstance(listed, list):
        return None, wrong
    requests = [_request(k, row, config, wrong) for k, row in enumerate(listed)]
    if wrong:
        return None, wrong
    good = [request for request in requests if request is not None]
    return Case(raw["name"], config, step_time, good, max_steps), []


def _unknown(raw: dict[str, Any], known: set[str], at: Key) -> list[Fault]:
    return [((*at, key), "Headway does not know this key") for key in raw if key not in known]


def _settings(raw: object, defaults: dict[str, Any], at: str, wrong: list[Fault]) -> dict[str, Any]:
    """Fill in the defaults; each value must be of its default's type and in range."""
    if not isinstance(raw, dict):
        wrong.append(((at,), "must be an object"))
        return dict(defaults)
    wrong += [
        ((at, key), "an option that Headway does not know") for key in set(raw) - set(defaults)
    ]
    for key, value in raw.items():
        default = defaults.get(key)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                wrong.append(((at, key), f"must be true or false, not {value!r}"))
        elif isinstance(default, int):
            least = _LEAST.get(key, 1 if defaults is CONFIG else 0)
            if not _whole(value, least):
                wrong.append(((at, key), f"must be a whole number >= {least}, not {value!r}"))
        elif isinstance(default, float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < 1:
                wrong.append(((at, key), f"must be a number from 0 to below 1, not {value!r}"))
        elif key == "policy" and value not in {"fcfs", "priority"}:
            wrong.append(((at, key), f"must be fcfs or priority, not {value!r}"))
    return {key: raw.get(key, default) for key, default in defaults.items()}


def _check_config(config: dict[str, Any], wrong: list[Fault]) -> None:
    """Refuse what vLLM refuses."""
    tokens = config["max_num_batched_tokens"]
    if tokens < config["max_num_seqs"]:
        what = f"must be >= max_num_seqs ({config['max_num_seqs']}), not {tokens}"
        wrong.append((("config", "max_num_batched_tokens"), what))
    if not config["enable_chunked_prefill"] and tokens < config["max_model_len"]:
        what = f"without chunked prefill must be >= max_model_len, not {tokens}"
        wrong.append((("config", "max_num_batched_tokens"), what))


def _whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _LIMIT


def _request(
    index: int, raw: object, config: dict[str, Any], wrong: list[Fault]
) -> CaseRequest | None:
    """Check one request; append what is wrong."""
    at = ("requests", str(index))
    if not isinstance(raw, dict):
        wrong.append((at, "must be an object"))
        return None
    before = len(wrong)
    wrong += _unknown(raw, _REQUEST, at)
    if raw.get("id") != index:
        wrong.append(((*at, "id"), f"must be {index}, its position, not {raw.get('id')!r}"))
    for key, least in (("arrival_ns", 0), ("prompt_len", 1), ("output_len", 1)):
        if not _whole(raw.get(key), least):
            what = (
                f"must be a whole number >= {least}, not {raw[key]!r}" if key in raw else "missing"
            )
            wrong.append(((*at, key), what))
    priority = raw.get("priority") or 0
    if type(priority) is not int:
        wrong.append(((*at, "priority"), f"must be a whole number, not {priority!r}"))
    if len(wrong) > before:
        return None
    if raw["prompt_len"] >= config["max_model_len"]:
        what = f"must be less than max_model_len ({config['max_model_len']})"
        wrong.append(((*at, "prompt_len"), what))
    try:
        segments = _segments(raw, config["hash_id_tokens"])
    except ValueError as error:
        key, _, what = str(error).partition(": ")
        wrong.append(((*at, key), what))
        return None
    return CaseRequest(
        index, raw["arrival_ns"], raw["prompt_len"], raw["output_len"], priority, segments
    )


def _segments(raw: dict[str, Any], hash_id_tokens: int) -> Segments | None:
    """Name the prompt's tokens; ValueError is `key: what is wrong`."""
    length = raw["prompt_len"]
    if (pieces := raw.get("segments")) is not None:
        if raw.get("hash_ids") is not None:
            raise ValueError("segments: give segments or hash_ids, not both")
        try:
            named = [(_name(name), count) for name, count in pieces]
        except (TypeError, ValueError):
            raise ValueError("segments: must be a list of [name, tokens]") from None
        if not all(_whole(count, 1) for _, count in named):
            raise ValueError("segments: tokens must be whole numbers >= 1")
        if sum(count for _, count in named) != length:
            raise ValueError(f"segments: must add up to prompt_len ({length})")
        return tuple(named)
    if (ids := raw.get("hash_ids")) is None:
        return None
    if not isinstance(ids, list) or not all(type(key) is int for key in ids):
        raise ValueError("hash_ids: must be a list of whole numbers")
    if len(ids) * hash_id_tokens < length:
        raise ValueError(f"hash_ids: stand for fewer tokens than prompt_len ({length})")
    full, rest = divmod(length, hash_id_tokens)
    whole = [(("h", key), hash_id_tokens) for key in ids[:full]]
    return tuple(whole + ([(("h", ids[full]), rest)] if rest else []))


def _name(name: object) -> tuple[str, int] | str:
    """Translate a segment's name: `in:3` and `out:3` are request 3's prompt and answer."""
    if not isinstance(name, str):
        raise TypeError(name)
    kind, _, number = name.partition(":")
    if kind in {"in", "out"} and number.isdecimal() and str(int(number)) == number:
        return kind, int(number)
    return name
