"""Whole columns of requests become a table: lengths, times, what prompts share, and notes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import nan
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from simulator.core.request import Segments
from simulator.util.errors import TraceError, warn
from simulator.workload.prefixes import prefix_columns, read_prefixes
from simulator.workload.select import is_output, renumbered
from simulator.workload.traces.fields import NOTED, SPANS, plain_words
from simulator.workload.traces.format import Measured, Table, no_times
from simulator.workload.traces.ledger import AT_THEIR_TIMES, Ledger, is_told
from simulator.workload.traces.outcomes import Flags
from simulator.workload.traces.values import NEAREST, is_plain
from simulator.workload.workload import Floats, Ints

UNTOLD = {"client": "unknown", "conversation": "unknown"}
"""What a request that names none has there, where others do."""
LONG = {"ttft": 30.0, "tpot": 1.0, "e2el": 120.0, "decode": 120.0}
"""s that half of the requests take, hardly in the unit that was meant."""
APART = 1e-11  # s: between turns that were sent at once
ROUNDING = 2.5e-9  # s: of an arrival, the wait at the client and a latency, added up
Columns = dict[str, Any]  # arrays of numbers, lists of words


def make_table(
    path: Path,
    columns: Columns,
    units: dict[str, float],
    place: Ints,
    ledger: Ledger,
    *,
    failed: Flags,
    unread: int,
) -> Table:
    """Make a table of whole columns, by field; clocks in their units, the rest in s and tokens.

    A request without output tokens, or that is said to have failed, is left out and counted, as
    are `unread` others; the latter is one of `lost`, where its arrival is told. One that broke off
    in a run of Headway's stays: it says what was asked for. TraceError where times contradict
    each other; `place` has the requests' lines.
    """
    both = {"arrival", "end", "e2el"} <= columns.keys() and units["arrival"] == units["end"]
    if both and (columns["arrival"] == columns["end"]).all() and (columns["e2el"] > 0).any():
        ledger.note(f"{ledger.name_of['arrival']}: the ends of requests, which came before them")
        del columns["arrival"]
    if "arrival" not in columns and {"end", "e2el"} <= columns.keys():
        columns["arrival"] = columns["end"] - columns["e2el"] * units["end"]
        units["arrival"] = units["end"]
        if (lacking := np.flatnonzero(np.isnan(columns["arrival"]))).size:
            raise TraceError(path, "how long it took is missing", int(place[lacking[0]]), "end")
    asked = _asked(columns, failed)
    output = columns["output"] + columns.get("thoughts", 0)  # Gemini's API counts them apart
    columns["output"] = output = np.where(asked > 0, asked, output)
    plain = columns["prompt"] + output
    columns["prompt"] = _whole_prompts(columns, plain, ledger)
    reasoning = _noted(columns, "reasoning")
    columns["output"] = output + _left_out(columns, plain, ledger, of="output", part=reasoning)
    _add_apart(columns, plain, ledger)
    output = columns["output"]
    broken, failed = failed & (asked > 0), failed & (asked <= 0)
    answered = np.flatnonzero((output > 0) & ~failed)
    kept = _each_answer(columns, answered, ledger)
    part = _part(columns, kept)
    if "several" in columns:
        _share_output(part, kept)
    table = _rows(part, units)
    table.ledger, table.rows, table.line = ledger, kept, place[kept]
    if empty := int((table.prompt < 1).sum()):
        warn(f"{path}: {empty} prompts of no tokens are taken as of one")
        table.prompt = np.maximum(table.prompt, 1)
    table.failed = unread + len(output) - len(answered)
    if table.measured is not None:
        for k, problem in _measure(table, table.measured, part, units):
            raise TraceError(path, problem, int(place[kept[k]]))
        if "client_queue" in columns:
            _send_with_answers(table, part, columns["prompt"])
        for values in (table.measured.ttft, table.measured.tpot, table.measured.e2el):
            values[broken[kept]] = nan
    _add_contents(path, table, columns, kept)
    _add_notes(table, part)
    _add_cuts(table, part)
    if "arrival" in columns and failed.any():
        lost = _part(columns, np.flatnonzero(failed))
        table.lost = _rows(lost, units)
        ended = _since("end", table.lost, lost, units)
        table.lost.cancel_after = np.fmax(_span_of("e2el", lost), ended)
    return table


def _asked(columns: Columns, failed: Flags) -> Ints:
    """Return the tokens that requests asked for, where it is told or their client hung up; else 0.

    An answer that a client cut off would have been longer by a token at least.
    """
    output = columns["output"]
    asked: Ints = output * 0 + columns.get("asked", 0)
    if "cancel_after" in columns:
        longer = np.maximum(output + (output > 0), columns.get("max_tokens", 0))
        hung_up = failed & ~np.isnan(columns["cancel_after"]) & (asked <= 0)
        asked = np.where(hung_up, longer, asked)
    return asked


def _each_answer(columns: Columns, kept: Ints, ledger: Ledger) -> Ints:
    """Return the rows, one as often as it asks for answers to its prompt.

    vLLM sends each answer through its scheduler as a request of its own. A column that counts up by
    one is a number of rows, whatever its name.
    """
    asked = np.asarray(columns.get("samples", np.ones(len(columns["output"]), np.int64)))
    rows = len(asked) > 2 and bool((np.diff(asked) == 1).all())
    if rows or (several := int((asked[kept] > 1).sum())) == 0:
        return kept
    columns["several"] = asked
    told = "requests that ask for several answers, each played as a request of that prompt"
    text = ", with its share of the output tokens"
    ledger.note(f"{ledger.name_of['samples']}: {told}{text}", several)
    return np.repeat(kept, np.clip(asked, 1, np.maximum(columns["output"], 1))[kept])


def _share_output(columns: Columns, kept: Ints) -> None:
    """Share out the tokens of several answers evenly, the first ones a token more."""
    _, first, count = np.unique(kept, return_index=True, return_counts=True)
    share, place = np.repeat(count, count), np.arange(len(kept)) - np.repeat(first, count)
    columns["output"] = columns["output"] // share + (place < columns["output"] % share)


def pick(values: Sequence[Any], kept: Sequence[int]) -> list[Any]:
    """Return some of a list."""
    return [values[k] for k in kept]


def _part(columns: Columns, rows: Ints) -> Columns:
    """Return some rows of each column."""
    return {
        field: pick(column, rows.tolist()) if isinstance(column, list) else column[rows]
        for field, column in columns.items()
    }


def _send_with_answers(table: Table, columns: Columns, prompts: Ints) -> None:
    """Put what a client sent when an answer came just before that answer.

    A table of Headway's has nanoseconds: rounded up, such a request would miss the next step, and
    of two that were sent at once the second might come first. Of turns that were, the one came
    first that was served first. `prompts`: of all rows.
    """
    assert table.measured is not None
    order = np.argsort(table.time, kind="stable")
    times = table.time[order]
    apart = np.diff(times, prepend=-1.0) > ROUNDING
    table.time[order] = times[apart][np.cumsum(apart) - 1]
    ends = np.sort(table.time + table.measured.e2el)  # NaN last
    near = ends[np.minimum(np.searchsorted(ends, table.time - ROUNDING), len(ends) - 1)]
    ties = np.abs(near - table.time) <= ROUNDING
    table.time = np.where(ties, np.maximum(table.time - 2 * ROUNDING, 0.0), table.time)
    if {"prefix_request", "prefix_tokens"} <= columns.keys():
        before = prompts.take(columns["prefix_request"], mode="clip")
        turns = (columns["prefix_request"] >= 0) & (columns["prefix_tokens"] > before)
        order = np.lexsort((table.measured.ttft, table.time))
        behind = np.arange(len(order)) - np.searchsorted(table.time[order], table.time[order])
        table.time[order] += APART * behind * turns[order]


def _whole_prompts(columns: Columns, plain: Ints, ledger: Ledger) -> Ints:
    """Return the tokens of prompts with what some logs count apart: prefixes, and what was cached.

    BLIS counts a prefix apart from `input_tokens`, its server does not; Anthropic's API counts what
    its cache had, and what went into it.
    """
    prompt = columns["prompt"]
    if "whole_prompt" in columns:
        whole = columns["whole_prompt"]
        return np.asarray(np.where(whole > 0, whole, prompt + columns.get("prefix_tokens", 0)))
    names = {k: plain_words(name.rpartition(".")[2]) for k, name in ledger.name_of.items()}
    cached = _beside(columns)
    apart = "uncached" in names.get("prompt", "")
    if names.get("cached", "").startswith("cache_read") or "cache_write" in columns:
        apart |= names.get("prompt") in {"input_tokens", "input_token_count"}
    lacking = cached if apart else _left_out(columns, plain, ledger, of="prompt", part=cached)
    return np.asarray(prompt + lacking)


def _left_out(columns: Columns, plain: Ints, ledger: Ledger, *, of: str, part: Ints) -> Ints:
    """Return the tokens of a part that lengths lack: if one is shorter than its part, of each.

    Not where the total of a request, `plain`, has its part in, as far as totals have such parts.
    """
    more = part > columns[of]
    if not more.any():
        return part * 0
    total = _noted(columns, "total")
    naive = (more & (total == plain)).any()
    lacking = np.where(naive | (total != plain), part, 0)
    field = "reasoning" if of == "output" else "cached" if "cached" in columns else "cache_write"
    what = f"tokens added to each {of} that lacks them, as some have fewer tokens than these"
    ledger.note(f"{ledger.name_of[field]}: {what}", int(lacking.sum()))
    columns.pop("reasoning" if of == "output" else "", None)  # which is told by this
    return np.asarray(lacking)


def _beside(columns: Columns) -> Ints:
    """Return the tokens that an engine's cache had, or took in."""
    found: Ints = columns["prompt"] * 0 + columns.get("cached", 0) + columns.get("cache_write", 0)
    return found


def _add_apart(columns: Columns, plain: Ints, ledger: Ledger) -> None:
    """Add to lengths what a log counts apart from them, as its totals show: cached, reasoning.

    Langfuse does so, and some servers of models that reason.
    """
    total, reasoning = _noted(columns, "total"), _noted(columns, "reasoning")
    for name in ("image_tokens", "audio", "video"):
        if ledger.name_of.get(name, "").lower().endswith("tokens"):
            media = _noted(columns, name)  # in the prompt, if it has as many
            columns["prompt"] = columns["prompt"] + np.where(media > columns["prompt"], media, 0)
    cached = _beside(columns)
    more = total - columns["prompt"] - columns["output"]
    for prompt, output in ((cached, 0), (0, reasoning), (cached, reasoning)):
        apart = (more > 0) & (more == prompt + output)
        columns["prompt"] = columns["prompt"] + apart * prompt
        columns["output"] = columns["output"] + apart * output
        more = np.where(apart, 0, more)
    odd = (total > 0) & (more != 0) & (total != plain) & (columns["output"] > 0)
    if odd.any():
        what = "requests whose tokens are not its sum, taken as they are"
        ledger.note(f"{ledger.name_of['total']}: {what}", int(odd.sum()))


def _noted(columns: Columns, name: str) -> Ints:
    """Return the whole numbers of a column that is kept as texts; 0: none."""
    if name not in columns:
        return np.zeros(len(columns["output"]), np.int64)
    told = (float(word) if is_plain(word, whole=True) else 0.0 for word in columns[name])
    return np.fromiter(told, np.int64)


def _add_contents(path: Path, table: Table, columns: Columns, kept: Ints) -> None:
    """Add what prompts share, where columns tell it; names of answers go by the table's rows."""
    prompts = np.maximum(columns["prompt"], 1)
    try:
        found = read_prefixes(columns, prompts.tolist(), columns["output"].tolist())
    except ValueError as error:
        raise TraceError(path, str(error), None, "prefix") from None
    if found is None and "several" in columns:
        table.segments = [((("in", k), int(prompts[k])),) for k in kept.tolist()]
    if found is not None:
        place = np.full(len(found) + 1, -1)
        place[kept] = np.arange(len(kept))
        if {"prefix", "prefix_tokens"} <= columns.keys():
            short = columns["prefix_tokens"] > prompts
        else:
            short = np.array([*map(_adds_nothing, found, range(len(found)))])
        if "prefix" in columns and short[kept].any():
            text = "prompts that are no longer than what they are to begin with, and all of it"
            table.ledger.note(f"{table.ledger.name_of['prefix']}: {text}", int(short[kept].sum()))
        table.segments = renumbered([found[k] for k in kept.tolist()], place)
        table.has_sessions = True
        if turns := sum(any(is_output(n) for n, _ in parts or ()) for parts in table.segments):
            name = table.ledger.name_of.get("prefix_request", table.ledger.name_of.get("prefix"))
            table.ledger.note(f"{name}: requests that {NOTED['parent'][1]}", turns)


def _adds_nothing(parts: Segments | None, k: int) -> bool:
    """Return whether the prompt of request `k` ends within what another one had."""
    name = parts[-1][0] if parts else None
    return isinstance(name, tuple) and name[0] in ("in", "out") and name[1] != k


def _add_notes(table: Table, columns: Columns) -> None:
    """Tell of what changes the load, and cannot be simulated; of several answers once."""
    names, segments = table.ledger.name_of, table.segments
    own = table.ledger.is_own
    if "several" in columns:
        once = np.unique(table.rows, return_index=True)[1]
        columns = _part(columns, once)
        segments = segments and pick(segments, once.tolist())
    alone = _alone(segments, len(columns["output"]))
    for field in sorted(NOTED.keys() & columns.keys() & names.keys()):
        count = sum(is_told(field, word) for word in columns[field])
        differ = "model" not in columns and len({*columns[field]}) > 1
        if count and (differ or field != "group"):
            table.ledger.note(f"{names[field]}: requests that {NOTED[field][1]}", count)
    cached = columns.get("cached")
    if cached is not None and cached.any():
        share = f"{cached.sum() / columns['prompt'].sum():.1%} of input tokens"
        table.ledger.facts.append(("cached in log", share))
        found = prefix_columns(segments or (), columns["output"].tolist())
        shared = np.array(found.get("prefix_tokens", 0))
        elsewhere = own or "warm" in columns or (segments is None and "prefix" in names)
        if not elsewhere and (unshared := int(np.maximum(cached - shared, 0).sum())):
            table.ledger.note(
                f"{names['cached']}: input tokens that the engine's cache had when it was recorded",
                unshared,
                "; nothing says which prompts share them, so none do here: name prefix=, or "
                f"cached={names['cached']} lets all begin alike",
            )
    for field, long in LONG.items() if table.measured is not None and not own else ():
        spent = _span_of(field, columns)
        spent = spent[~np.isnan(spent)]
        if field in names and len(spent) and np.median(spent) > long:
            name = names[field]
            table.ledger.note(
                f"{name}: half of the requests take more than {long:g} s, if it counts seconds; "
                f"{field}={name}:ms says that it does not"
            )
    by_group = "prefix_tokens" in columns and "prefix_request" not in columns
    if by_group and "prefix" not in columns and (begun := (columns["prefix_tokens"] > 0).sum()):
        text = "requests whose prefix has no name, so they share none here (prefix= names it)"
        table.ledger.note(f"{names['prefix_tokens']}: {text}", int(begun))
    if "conversation" in columns:
        name, every = names["conversation"], zip(columns["conversation"], alone, strict=True)
        told = f"; they come at their recorded times, and share nothing but with prefix={name}"
        lone = (one for one, lone in every if one != UNTOLD["conversation"] and (by_group or lone))
        table.ledger.note_repeats(f"{name}: requests that continue a conversation", lone, told)
    if (waited := columns.get("client_queue")) is not None and (waited > 0).any():
        text = f"{names['client_queue']}: requests that waited at their client, {AT_THEIR_TIMES}"
        table.ledger.note(text, int((waited > 0).sum()))
    if sums := _sums(columns):
        text = "requests that are the sum of the requests that name them, played beside these"
        table.ledger.note(f"{names['parent']}: {text}", sums)
    if "request_id" in columns:
        text = f"{names['request_id']}: requests whose id came before, played all the same"
        table.ledger.note_repeats(text, filter(None, columns["request_id"]))


def _sums(columns: Columns) -> int:
    """Count the requests whose tokens are the sum of the requests that name them their parent."""
    within, tokens = Counter[str](), (columns["prompt"] + columns["output"]).tolist()
    for parent, count in zip(columns.get("parent", ()), tokens, strict=False):
        within[parent] += count * bool(parent)
    return sum(map(eq, map(within.get, columns.get("request_id", ())), tokens))


def _alone(segments: Sequence[Segments | None] | None, size: int) -> Flags:
    """Return which prompts begin as no other one does."""
    begins = [parts[0][0] if parts else None for parts in segments or [None] * size]
    count = Counter(begins)
    return np.array([one is None or count[one] == 1 for one in begins], np.bool_)


def _add_cuts(table: Table, columns: Columns) -> None:
    """Tell of answers that are longer than what their clients allow."""
    if table.max_tokens is None or "asked" in columns:
        return
    over = np.where(table.max_tokens > 0, table.output - table.max_tokens, 0)
    if cut := int((over > 0).sum()):
        name = table.ledger.name_of["max_tokens"]
        table.ledger.note(f"{name}: answers longer than it allows, cut there", cut)
        table.ledger.note(f"{name}: output tokens that this cuts off", int(over[over > 0].sum()))


def _rows(columns: Columns, units: Mapping[str, float]) -> Table:
    """Make a table of rows as they stand; the times that each took are not worked out."""
    names = ("client", "priority", "model", "images", "max_tokens", "hint", "cancel_after")
    told: dict[str, Any] = {name: columns.get(name) for name in names}
    for name in ("max_tokens", "hint"):
        told[name] = told[name] if told[name] is not None and told[name].any() else None
    per_second, size = units.get("arrival", 1.0), len(columns["output"])
    arrival = columns.get("arrival", np.zeros(size))
    if "arrival" in columns and "client_queue" in columns:
        waited = np.nan_to_num(columns["client_queue"]) * per_second
        fine = arrival.dtype == np.int64 and per_second > 1
        arrival = arrival + (np.rint(waited).astype(np.int64) if fine else waited)
    told["rows"] = np.arange(size)
    table = Table(arrival, per_second, columns["prompt"], columns["output"], **told)
    timed = {*SPANS, "first", "end"} - {"client_queue", "cancel_after"}
    if (timed | {"conversation", "prompt_id"}) & columns.keys():
        table.measured = no_times(size)
        for name in ("conversation", "turn", "prompt_id"):
            setattr(table.measured, name, columns.get(name))
    return table


def _since(name: str, table: Table, columns: Columns, units: Mapping[str, float]) -> Floats:
    """Return how long after each arrival a clock was read, s."""
    read = _span_of(name, columns) / units.get(name, 1.0)
    return np.asarray(read - table.time / table.per_second)


def _span_of(name: str, columns: Columns) -> Floats:
    return np.asarray(columns.get(name, np.full(len(columns["output"]), nan)))


def _measure(
    table: Table, measured: Measured, columns: Columns, units: Mapping[str, float]
) -> Iterator[tuple[int, str]]:
    """Work out what a layout leaves to be worked out; yield what is impossible, and of which."""
    since = partial(_since, table=table, columns=columns, units=units)
    told = partial(_span_of, columns=columns)
    gaps = table.output - 1
    several = gaps > 0
    ttft, tpot, e2el = (told(name) for name in ("ttft", "tpot", "e2el"))
    ttft = np.where(np.isnan(ttft), since("first"), ttft)
    e2el = np.where(np.isnan(e2el), since("end"), e2el)
    e2el = np.where(np.isnan(e2el), ttft + told("decode"), e2el)
    at_once = several & (ttft == e2el) & (not table.ledger.is_own)  # not streamed
    if whole := int(at_once.sum()):
        text = "requests whose first token came with the last, so nothing tells their TTFT"
        table.ledger.note(f"{table.ledger.name_of.get('first', 'ttft')}: {text}", whole)
        ttft = np.where(at_once, nan, ttft)
    worked_out = np.where(several, (e2el - ttft) / np.where(several, gaps, 1), nan)
    tpot = np.where(several & np.isnan(tpot), worked_out, np.where(several, tpot, nan))
    e2el = np.where(np.isnan(e2el), ttft + np.where(several, tpot * gaps, 0.0), e2el)
    for name, values in (("first token", ttft), ("last token", e2el)):
        for k in np.flatnonzero(values < -NEAREST).tolist():
            yield k, f"the {name} comes {-values[k]:g} s before the arrival: impossible"
    for k in np.flatnonzero(e2el < ttft - 1e-3).tolist():
        ends = f"the last token comes {e2el[k]:g} s after the arrival, the first one {ttft[k]:g} s"
        yield k, f"{ends}: impossible"
    measured.ttft, measured.tpot, measured.e2el = ttft, tpot, e2el
