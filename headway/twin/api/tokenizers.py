"""Tokens of prompts, and words to answer with, each of which is one token to the client, too."""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.twin.api.tables import table
from simulator.util.environment import need_package
from simulator.util.errors import HeadwayError

if TYPE_CHECKING:
    from headway.twin.api.chat_template import ChatTemplate

WORDS = 1000  # that answers are made of
CONFIGS: dict[str, dict[str, Any]] = table("trained_tokenizer")
"""The files beside the tokenizer.json of one that is trained."""
TORN, LONGEST_CHARACTER = "\ufffd", 4  # what bytes of an unfinished character read as; its bytes
TRIAL = 64  # words of a text that must come out as so many tokens


class TokenCounter:
    """Counts tokens as the client does; this one takes each word between spaces for a token."""

    template: "ChatTemplate | None" = None
    """What makes prompts of chats; None: they are estimated."""
    vocab_size = 2**31
    """Tokens of words are below it: the model's, once it is known."""

    def __init__(self) -> None:
        self.words = [f" w{number}" for number in range(WORDS)]
        """Each a token, also behind any other."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        most = self.vocab_size
        return [zlib.crc32(word.encode("utf-8", "replace")) % most for word in text.split()]

    def pieces(self, told: str | Sequence[int]) -> list[str]:
        """Return what each token of a text adds to it, or each of tokens that can be read back.

        As in vLLM's detokenizer a character comes with the token that has its last byte.
        """
        return re.findall(r"\s*\S+", told) if isinstance(told, str) else []

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Return the text of tokens; None: they cannot be read back."""
        return None

    def names(self, tokens: Sequence[int], text: str | None) -> list[str] | None:
        """Return what the vocabulary has for tokens, those of a `text` if it was one."""
        return None if text is None else text.split()


class BpeTokens(TokenCounter):
    """The tokenizer of a model, from its tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        need_package("--tokenizer", "serve", "tokenizers")
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise HeadwayError(f"--tokenizer: {path}: {error} (see headway tokenizer)") from None
        self.words = [*islice(self._single_words(), WORDS)]
        text = "".join(self.words[:TRIAL])
        if not self.words or len(self.encode(text)) != min(TRIAL, len(self.words)):
            raise HeadwayError(f"--tokenizer: {path}: has no words that stay one token in a text")

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def pieces(self, told: str | Sequence[int]) -> list[str]:
        tokens = self.encode(told) if isinstance(told, str) else told
        found, begin, read = list[str](), 0, 0
        for end in range(1, len(tokens) + 1):
            text = self.decode(tokens[begin:end])
            is_torn = text.endswith(TORN) and end < min(len(tokens), read + LONGEST_CHARACTER)
            found.append("" if is_torn else text[len(self.decode(tokens[begin:read])) :])
            if not is_torn:
                begin, read = read, end  # some decoders need the token before
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def names(self, tokens: Sequence[int], text: str | None) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def _single_words(self) -> Iterator[str]:
        """Yield words of letters, behind a space, that are one token."""
        for number in range(self._tokenizer.get_vocab_size()):
            word = f" {self.decode([number]).strip()}"
            if re.fullmatch(" [A-Za-z]{2,}", word) and self.encode(word) == [number]:
                yield word


def train(folder: Path, size: int = 4000) -> tuple[int, list[str]]:
    """Write a byte-level BPE trained on Python's own sources; return its tokens' number, and files.

    Any text survives it. A model's config.json that is there already stays as it is. Raises
    HeadwayError where the package tokenizers is missing.
    """
    import os

    need_package("headway tokenizer", "serve", "tokenizers")
    from tokenizers import ByteLevelBPETokenizer

    from simulator.util.files import write_together

    tokenizer = ByteLevelBPETokenizer()
    sources = sorted(str(path) for path in Path(os.__file__).parent.glob("*.py"))
    tokenizer.train(sources, size, 0, show_progress=False, special_tokens=["<s>", "</s>"])
    count: int = tokenizer.get_vocab_size()
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    sized = {**CONFIGS, "config.json": CONFIGS["config.json"] | {"vocab_size": count}}
    if (folder / "config.json").exists():
        del sized["config.json"]
    files |= {name: json.dumps(keys, indent=2).encode() for name, keys in sized.items()}
    write_together(folder, files)
    return count, [*files]
