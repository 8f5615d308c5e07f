"""Whether a request was answered by the engine, by the words that logs have for it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from simulator.workload.traces.fields import NAMES

Flags = npt.NDArray[np.bool_]
Words = Mapping[str, Sequence[str]]  # of each request, by field
JUDGED = ("error", "success", "finish", "status", "status_code", "cancelled")
"""Fields that say whether a request failed."""
YES = r"true|t|yes|y|on|1|1\.0"
NO = r"false|f|no|n|off|0|0\.0"
UNSAID = r"none|null|nan|n/?a|-|\[\]|\{\}|"
"""How columns write yes, no and nothing, in lower case."""
NO_ERROR = rf"{UNSAID}|ok|success(ful)?|no.?errors?"
NO_GENERATION, UNFINISHED, ENDED = (
    "|".join(NAMES[name].split()) for name in ("no_generation", "unfinished", "finished")
)
FINISHED = re.compile(rf"{YES}|{UNSAID}|({ENDED}).*")
CALLED = re.compile(rf"^((get|post|put|head) )?[^\s{{\"]*/({'|'.join(NAMES['called'].split())})\b")
CANCELLED = re.compile(r"cancel|abort|disconnect|closed|^499\b|^dc$")
UUID = "[0-9a-f]{8}-[0-9a-f-]{27}"
"""Of the answer that Helicone's cache gave; of zeros where it gave none."""
HIT = re.compile(rf"^({YES}|.*\bhit\b.*|cached|(?!0{{8}}-){UUID})$")
MISSED = re.compile(rf"{NO}|{UNSAID}|(0{{8}}-|no|.*miss|bypass|disabled|expired|refresh).*")
KNOWN = {
    **dict.fromkeys(("finish", "status"), (re.compile(UNFINISHED), FINISHED)),
    "status_code": (re.compile(rf"{UNFINISHED}|^0$"), FINISHED),
    "error": (re.compile(rf"^(?!({NO}|{NO_ERROR})$)"), re.compile(rf"{NO}|{NO_ERROR}")),
    "success": (re.compile(rf"^({NO})$|{UNFINISHED}"), FINISHED),
    "cancelled": (re.compile(rf"^({YES}|cancell?ed|aborted)$"), re.compile(rf"{NO}|{UNSAID}")),
    "cache_hit": (HIT, MISSED),
}
"""Words of fields that say that a request was not answered by the engine, and that it was; others
are named.
"""


CLASS = f"{NAMES['only']['modality']}|batch|agent|file"
APART = {
    "cache_hit": HIT.search,
    "call_type": re.compile(NO_GENERATION).search,
    "modality": re.compile(f"^(?!.*({CLASS})).*({NO_GENERATION})").search,
    "called": CALLED.search,
}
"""What says of a field that no engine had to generate text; a type may be a request's class."""


def unknown_words(words: Words) -> dict[str, Counter[str]]:
    """Count the requests that have a word which is not understood, by its field and the word."""
    found: dict[str, Counter[str]] = {}
    for field in KNOWN.keys() & words.keys():
        bad, good = KNOWN[field]
        for word, count in Counter(words[field]).items():
            plain = _plain(word)
            if not bad.search(plain) and not good.fullmatch(plain):
                found.setdefault(field, Counter())[word] = count
    return found


def failures(words: Words, size: int) -> Flags:
    """Return which requests failed, by what is said of errors, success, finish and status."""
    return _any(words, {field: KNOWN[field][0].search for field in JUDGED}, size)


def cancelled(words: Words, size: int) -> Flags:
    """Return which requests their clients gave up, by what is said in the same fields."""
    checks = dict.fromkeys(JUDGED, CANCELLED.search)
    return _any(words, checks | {"cancelled": KNOWN["cancelled"][0].search}, size)


def apart(words: Words, size: int) -> dict[str, Flags]:
    """Return which requests no engine had to generate text for, by the field that says so."""
    found: dict[str, Flags] = {}
    for field, check in APART.items():
        others = [~mask for mask in found.values()]
        found[field] = np.logical_and.reduce([_any(words, {field: check}, size), *others])
    return {name: mask for name, mask in found.items() if mask.any()}


def _plain(word: str) -> str:
    """Return a word in lower case, also the one of a list, as Python or JSON write it."""
    return word.strip(" []\"'").lower()


def _any(words: Words, checks: Mapping[str, Callable[[str], object]], size: int) -> Flags:
    """Return of which requests one of some fields says a word that a check takes."""
    found = np.zeros(size, np.bool_)
    for name in checks.keys() & words.keys():
        known = {word: bool(checks[name](_plain(word))) for word in set(words[name])}
        found |= np.array([known[word] for word in words[name]], np.bool_)
    return found
