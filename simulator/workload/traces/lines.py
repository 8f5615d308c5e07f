"""The ground under every trace reader: lines of a plain or packed file, and what is wrong in them.

A reader turns lines into a `Table`; a line that it cannot read becomes a problem, and the problems
of a file come out as one error that names each line and column.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from simulator.core.request import Segments
from simulator.util.errors import HeadwayError
from simulator.workload.workload import Floats, Ints

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 22  # bytes read at a time, so that a long file costs its columns and no more
NAMED = 20  # problems told one by one; the rest are counted

AZURE = (
    "of the Microsoft Azure Public Dataset ({}), licence CC-BY-4.0: get {} from the repository "
    "Azure/AzurePublicDataset on GitHub"
)
SPLITWISE = "Patel et al., Splitwise, ISCA'24"
SOURCES = (  # parts of well-known names in lower case, and whose file it is
    (
        ("_1week", "azure_llm_2024"),
        "the Azure LLM inference trace 2024 "
        + AZURE.format(
            "Stojkovic et al., DynamoLLM, HPCA'25", "the link in AzureLLMInferenceDataset2024.md"
        ),
    ),
    (
        ("azurellminferencetrace_code", "azure_llm_2023_code"),
        "the Azure LLM inference trace 2023 (code) "
        + AZURE.format(SPLITWISE, "data/AzureLLMInferenceTrace_code.csv"),
    ),
    (
        ("azurellminferencetrace_", "azure_llm_2023"),
        "the Azure LLM inference trace 2023 (conversation) "
        + AZURE.format(SPLITWISE, "data/AzureLLMInferenceTrace_conv.csv"),
    ),
    (
        ("mooncake", "conversation_trace", "toolagent_trace", "synthetic_trace"),
        "a Mooncake trace (Qin et al., FAST'25), licence Apache-2.0: get it from the folder "
        "FAST25-release/traces of the repository kvcache-ai/Mooncake on GitHub",
    ),
    (
        ("burstgpt",),
        "BurstGPT (Wang et al., KDD'25), licence CC-BY-4.0: get it from the releases of the "
        "repository HPMLL/BurstGPT on GitHub",
    ),
)


Numbers = npt.NDArray[np.int64 | np.float64]


@dataclass(slots=True)
class Table:
    """What a file says, in its own unit of time and its own order of lines."""

    time: Numbers  # NaN: `delay` after the end of the request `after`
    per_second: float  # units of `time` in a second
    prompt: Ints
    output: Ints
    segments: list[Segments | None] | None = None
    after: Ints | None = None
    delay: Floats | None = None  # s
    failed: int = 0  # requests left out because the file marks them as failed


class Problems:
    """What is wrong in one file, in the order of its lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.messages: list[str] = []

    def add(self, line: int, column: str, wrong: str) -> int:
        """Note a problem and give its number from 0 on; past the first few it is only counted."""
        self.count += 1
        if self.count <= NAMED:
            self.messages.append(f"{self.path}:{line}: {column}: {wrong}")
        return self.count - 1

    def extend(self, number: int, more: str) -> None:
        """Add to what a problem says, if it is one of those that are told."""
        if number < len(self.messages):
            self.messages[number] += more

    def stop(self) -> None:
        """Raise HeadwayError with all problems, if there are any."""
        if self.count > NAMED:
            self.messages.append(f"{self.path}: ... and {self.count - NAMED} more")
        if self.count:
            raise HeadwayError(self.messages)


def missing_trace(path: Path) -> HeadwayError:
    """Say that the file is missing and, of a well-known trace, whose it is and how to get it."""
    name = path.name.lower()
    for parts, whose in SOURCES:
        if any(part in name for part in parts):
            return HeadwayError(
                f"{path}: no such file. It is {whose}, and put it, plain or packed by gzip, as "
                f"{path.name} under traces/ in the folder that HEADWAY_DATA names"
            )
    return HeadwayError(f"{path}: no such file")


def blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines, some megabytes at a time, each time with the number of the first line.

    A gzip file is known by its first bytes, not by its name. Every block ends with a newline,
    even where the file does not.
    """
    number = 1
    begun: list[bytes] = []  # the pieces of a line whose end has not been read yet
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            start = True
            while data := file.read(BLOCK):
                data, start = data.removeprefix(BOM) if start else data, False
                cut = data.rfind(b"\n") + 1
                if cut:
                    block = b"".join([*begun, data[:cut]])
                    begun.clear()
                    yield number, block
                    number += block.count(b"\n")
                begun.append(data[cut:])
    except FileNotFoundError:
        raise missing_trace(path) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HeadwayError(f"{path}:{number}: gzip: cut short or damaged: {error}") from None
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be read: {error.strerror}") from None
    if rest := b"".join(begun):
        yield number, rest + b"\n"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, each with its number and without its end."""
    for number, block in blocks(path):
        text = block.decode("utf-8", errors="replace")
        for i, line in enumerate(text.split("\n"), number):
            if line := line.strip():
                yield i, line


def first_line(path: Path) -> tuple[int, str]:
    """Give the first line that is not blank and its number, or raise HeadwayError."""
    for number, block in blocks(path):
        if body := block.lstrip():
            blank = block[: len(block) - len(body)].count(b"\n")
            line = body[: body.find(b"\n")]
            return number + blank, line.decode("utf-8", errors="replace").strip()
    raise HeadwayError(f"{path}:1: line: the file is empty")
