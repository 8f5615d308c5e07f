"""A text that a schema, a regular expression or a grammar allows, byte by byte as llguidance says,
which is one of vLLM's backends for structured outputs.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from random import Random
from typing import Any

from headway.twin.api.bodies import BadRequestError, refuse

WORDS = b"words " * 700
"""What a string takes that takes any words, and one with a usual `maxLength` does not."""
MOST, TRIES = 1500, 3  # bytes that are chosen; texts that are begun before none is found
DEEP = 4  # brackets; within more what is optional is left out: a schema may name itself
ANY = 90  # bytes, of 256: where so many may come next, any printable one may
QUOTE = ord('"')


@lru_cache(256)
def guided_text(kind: str, source: str) -> tuple[tuple[str, str] | None, list[str]]:
    """Return what comes before and behind any words, and keywords that the text may not obey.

    All comes before where there is no room for words. None: no text is found. `kind` is one of
    llguidance's `grammar_from`. Raises BadRequestError, in vLLM's words, for what is no grammar.
    """
    grammar, notes = _compiled(kind, source)
    ignored = [key for note in notes for key in re.findall('"(.*?)"', note) or ["format"]]
    walks: list[tuple[str, int | None]] = [(grammar, None)]
    patterns = [source]
    if kind == "json_schema":
        walks, patterns = [(grammar, DEEP), (grammar, 0)], []

        def closed(schema: dict[str, Any]) -> dict[str, Any]:
            patterns.append(str(schema.get("pattern", "")))
            if schema.pop("patternProperties", None) or "properties" in schema:
                schema["additionalProperties"] = False
            return schema

        with suppress(BadRequestError):  # all properties that have names first, and no others
            all_named = json.dumps(json.loads(source, object_hook=closed))
            walks.insert(0, (_compiled(kind, all_named)[0], DEEP))
    literals = re.findall(r"\w+|[^\w\s]", " ".join(patterns).replace("\\", ""))
    for number in range(TRIES * len(walks)):
        walk = _Walk(*walks[number // TRIES], literals, number)
        if walk.ends():
            at = walk.words or len(walk.text)
            return (walk.text[:at].decode(), walk.text[at:].decode()), ignored
    return None, ignored


def _compiled(kind: str, source: str) -> tuple[str, list[str]]:
    """Return a grammar, and what of it is not understood; raise BadRequestError."""
    from llguidance import LLMatcher, LLTokenizer, grammar_from

    try:
        if kind == "json_schema":
            json.loads(source)
            rules: Any = {"whitespace_flexible": False, "lenient": True}
            grammar = LLMatcher.grammar_from_json_schema(source, overrides=rules)
        else:
            grammar = grammar_from(kind, source)  # type: ignore[arg-type]
    except ValueError as error:
        is_torn = isinstance(error, json.JSONDecodeError)
        refuse({"json text": is_torn, "grammar text": True}, error=error)
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(grammar, LLTokenizer("byte"))
    refuse({"grammar": is_wrong}, error=notes and notes[0])
    return grammar, notes


class _Walk:
    """One text, from byte to byte; of JSON, with what is optional within so many brackets."""

    def __init__(self, grammar: str, deep: int | None, literals: Sequence[str], seed: int) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self.matcher = LLMatcher(LLTokenizer("byte"), grammar)
        self.literals, self.random, self.deep = literals, Random(seed), deep
        self.text, self.words = bytearray(), 0
        self._before: set[int] = set()  # bytes that could have been the last one

    def ends(self) -> bool:
        """Go on to the end; say whether there is one."""
        matcher = self.matcher
        for _ in range(MOST):
            if not (new := bytes(matcher.compute_ff_bytes())):
                mask = int.from_bytes(matcher.compute_bitmask(), "little")
                allowed = {byte for byte in range(256) if mask >> byte & 1}
                if not allowed or (self.text and matcher.is_accepting()):
                    return matcher.is_accepting() or matcher.is_stopped()
                in_text = self.deep is None or (self.text.count(b'"') - self.text.count(b'\\"')) % 2
                new = self._in_text(allowed) if in_text else bytes([self._between(allowed)])
                self._before = allowed
            matcher.consume_tokens([*new])
            self.text += new
        return False

    def _takes(self, text: bytes) -> bool:
        return self.matcher.validate_tokens([*text]) == len(text)

    def _between(self, allowed: set[int]) -> int:
        """Choose what comes between strings: items and names before the end of what has them."""
        count, last = self.text.count, self.text[-1:]
        depth = count(b"[") + count(b"{") - count(b"]") - count(b"}")
        ends = allowed & {*b"]}"}
        name = b'"' if last == b"{" else b',"'
        is_more = ends == {*b"}"} and self._takes(name) and not self._takes(name + b'":')
        if last == b"[":
            is_more = bool(allowed - ends)
        if ends and (depth > (self.deep or 0) or not is_more):
            return min(ends)
        return next((one for one in b',"' if one in allowed), None) or self._character(allowed)

    def _in_text(self, allowed: set[int]) -> bytes:
        """End a string that may end, or add to it."""
        is_empty, is_name = self.text.endswith(b'"'), self._takes(b'":')
        if self.deep is not None and QUOTE in allowed and not (is_empty and is_name):
            if is_empty and not self.words and self._takes(WORDS):
                self.words = len(self.text)
            return b'"'
        if len(allowed) > ANY and self.literals:
            literal = self.random.choice(self.literals).encode()
            if self._takes(literal):
                return literal
        return bytes([self._character(allowed)])

    def _character(self, allowed: set[int]) -> int:
        """Choose a byte by chance: one that could not come before, or a letter or a digit."""
        seen = allowed & {*range(33, 127)} - {*b"\\-]}"} or allowed
        fresh = seen - self._before if self.text[-1:].isalnum() else set()
        found = fresh or {byte for byte in seen if chr(byte).isalnum()} or seen
        return self.random.choice(sorted(one for one in found if one - 32 not in found or one < 65))
