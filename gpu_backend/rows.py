"""What the host keeps of each request, in numpy rows that last from step to step.

A row holds the request's page table and its text. A step's metadata are then gathered from them
with a handful of numpy calls, and only what has changed is written: at most one page per request
and step, once in `block_size` steps.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu_backend.tokens import Ids, prompt_ids, token_ids
from simulator.core.request import Chunk, Request

Rows_ = npt.NDArray[np.intp]
T = TypeVar("T", bound=np.generic)
GRAIN = 16  # the width of the page table is a multiple of this


class Rows:
    """Page tables and texts of the requests that have been seen and not been retired."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.pages: Ids = np.zeros((64, GRAIN), np.int32)
        self.text: Ids = np.zeros((64, 256), np.int32)
        self.length: npt.NDArray[np.int64] = np.zeros(
            64, np.int64
        )  # tokens known: padding, prompt and answer
        self._row_of: dict[int, int] = {}
        self._requests: list[Request | None] = [None] * 64
        self._tables: list[list[int] | None] = [None] * 64  # as last written
        self._written: list[int] = [0] * 64  # pages of them
        self._padding: list[int] = [0] * 64
        self._free = list(range(63, -1, -1))
        self._answers: dict[int, Ids] = {}  # of requests that are over

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def requests(self) -> list[Request]:
        """Requests that have a row."""
        return [request for request in self._requests if request is not None]

    def find(self, chunks: Sequence[Chunk]) -> Rows_:
        """Give each chunk's row, its page table brought up to date; new requests get one."""
        row_of, requests = self._row_of, self._requests
        tables, written = self._tables, self._written
        found = []
        for chunk in chunks:
            request = chunk.request
            row = row_of.get(request.id, -1)
            if row < 0 or requests[row] is not request:
                row = self._take(request)
            blocks = request.blocks
            if tables[row] is not blocks or written[row] != len(blocks):  # type: ignore[arg-type]
                self._write(row, request)
            found.append(row)
        return np.array(found, np.intp)

    def add_pages(self, rows: Rows_, numbers: npt.NDArray[np.integer]) -> Ids:
        """Write down the page that each of the rows' requests has just got; give those pages.

        `numbers` are their places in the page tables.
        """
        for row in rows.tolist():
            request = self._requests[row]
            assert request is not None
            self._write(row, request)
        return self.pages[rows, numbers]

    def _take(self, request: Request) -> int:
        """Give a new request a row with its prompt, and what it has answered elsewhere."""
        old = self._row_of.pop(request.id, None)
        if old is not None:  # another run's request of the same name
            self._clear(old)
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        self._row_of[request.id] = row
        self._requests[row] = request
        self._padding[row] = request.padding
        said = token_ids(("out", request.id), 0, request.generated, self.vocab_size)
        prompt = prompt_ids(request, self.vocab_size, self.answer)
        text = np.concatenate((np.zeros(request.padding, np.int32), prompt, said))
        self._reach(len(text) + 1)
        self.text[row, : len(text)] = text
        self.length[row] = len(text)
        return row

    def _write(self, row: int, request: Request) -> None:
        """Write a request's page table, from where it was not written yet."""
        blocks = request.blocks
        if blocks is None:
            raise ValueError(f"request {request.id} has no blocks: live runs need a BlockManager")
        if len(blocks) > self.pages.shape[1]:
            width = max(2 * self.pages.shape[1], -(-len(blocks) // GRAIN) * GRAIN)
            self.pages = _grown(self.pages, 1, width)
        first = self._written[row] if self._tables[row] is blocks else 0
        if first > len(blocks):
            first = 0
        self.pages[row, first : len(blocks)] = blocks[first:]
        self._tables[row] = blocks
        self._written[row] = len(blocks)
        if self._padding[row] != request.padding:
            self._pad(row, request.padding)

    def _pad(self, row: int, padding: int) -> None:
        """Put other padding before a text: a static batch is evened out anew each time."""
        own = self.text[row, self._padding[row] : self.length[row]].copy()
        self._reach(padding + len(own) + 1)
        self.text[row, :padding] = 0
        self.text[row, padding : padding + len(own)] = own
        self.length[row] = padding + len(own)
        self._padding[row] = padding

    def append(self, rows: Rows_, tokens: npt.NDArray[np.integer]) -> None:
        """Let each of the rows' texts go on by a token."""
        ends = self.length[rows]
        if len(ends):
            self._reach(int(ends.max()) + 2)
        self.text[rows, ends] = tokens
        self.length[rows] = ends + 1

    def tokens(self, request_id: int) -> Ids:
        """Give the text of a request that has a row: prompt and answer so far."""
        row = self._row_of[request_id]
        return self.text[row, self._padding[row] : self.length[row]].copy()

    def answer(self, request_id: int) -> Ids | None:
        """Give what a request has answered so far, None where that is not known."""
        row = self._row_of.get(request_id)
        if row is None:
            return self._answers.get(request_id)
        request = self._requests[row]
        assert request is not None
        first = self._padding[row] + request.prompt_tokens
        return self.text[row, first : self.length[row]].copy()

    def retire(self, request_id: int) -> None:
        """Give a row up but keep the answer, which a later turn's prompt may quote."""
        answer = self.answer(request_id)
        if answer is not None:
            self._answers[request_id] = answer
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._clear(row)

    def _clear(self, row: int) -> None:
        self._requests[row] = None
        self._tables[row] = None
        self._written[row] = 0
        self._free.append(row)

    def _reach(self, tokens: int) -> None:
        if tokens > self.text.shape[1]:
            self.text = _grown(self.text, 1, max(tokens, 2 * self.text.shape[1]))

    def _grow_rows(self) -> None:
        count = len(self.length)
        self.pages = _grown(self.pages, 0, 2 * count)
        self.text = _grown(self.text, 0, 2 * count)
        self.length = _grown(self.length, 0, 2 * count)
        self._requests += [None] * count
        self._tables += [None] * count
        self._written += [0] * count
        self._padding += [0] * count
        self._free += range(2 * count - 1, count - 1, -1)


def _grown(array: npt.NDArray[T], axis: int, size: int) -> npt.NDArray[T]:
    """Copy an array into a larger one."""
    shape = [*array.shape]
    shape[axis] = size
    grown = np.zeros(shape, array.dtype)
    grown[tuple(slice(n) for n in array.shape)] = array
    return grown
