"""What the host keeps of each request, in numpy rows that last from step to step.

A row holds the request's block table and its token ids. A step's inputs are then gathered from
them with a handful of numpy calls, and only what has changed is written: at most one block per
request and step, once in `block_size` steps. After a forward pass the caches are cold, and a look
at every request would cost more than all else: those that decode on are known by their rows, and
their tokens go into the texts many steps together.

No text of a prompt is known, so each token's name, its segment and its place in it, decides which
one it is: its id is a hash of both. So prompts that the scheduler takes for equal are equal, and
the KV blocks that it shares hold the same numbers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from gpu_backend.staging import aligned
from simulator.core.request import Chunk, Request

Ids = npt.NDArray[np.int32]
RowIndices = npt.NDArray[np.intp]
Tokens = tuple[RowIndices, npt.NDArray[np.integer]]
"""Rows, and the token that has come out of each."""
NO_ROWS: RowIndices = np.zeros(0, np.intp)
ROWS, WIDTH, TOKENS = 64, 16, 256  # of the arrays, at the beginning
MOST_HELD = 32  # steps whose tokens are not in the texts yet


@dataclass(slots=True)
class _Entry:
    """Whose row it is, and what of its block table has been written."""

    row: int
    request: Request
    padding: int
    table: list[int] | None = None
    written: int = 0  # blocks


class RequestStates:
    """Block tables and token ids of the requests that have been seen and not been retired."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.block_tables: Ids = np.zeros((ROWS, WIDTH), np.int32)
        self.token_ids: Ids = np.zeros((ROWS, TOKENS), np.int32)  # padding, prompt and answer
        self.num_computed: Ids = np.zeros(ROWS, np.int32)  # tokens in the cache after the last step
        self._newest: Ids = np.zeros(ROWS, np.int32)  # the token that came out last
        self._latest: Tokens = NO_ROWS, NO_ROWS  # of the last step, not yet in `_newest`
        self._num_tokens: npt.NDArray[np.int64] = np.zeros(ROWS, np.int64)
        self._held: list[Tokens] = []  # not yet in the texts
        self._rows: dict[Request, int] = {}
        self._entries: dict[int, _Entry] = {}  # by request
        self._by_row: dict[int, Request] = {}
        self._free = list(range(ROWS - 1, -1, -1))
        self._answers: dict[int, Ids] = {}  # of requests that are over

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def requests(self) -> list[Request]:
        """Requests that have a row."""
        return [entry.request for entry in self._entries.values()]

    def find(self, chunks: Sequence[Chunk]) -> RowIndices:
        """Return each chunk's row, its block table brought up to date; new requests get one."""
        entries = self._entries
        found = []
        for chunk in chunks:
            request = chunk.request
            entry = entries.get(request.id)
            if entry is None or entry.request is not request:
                entry = self._add(request)
            blocks = request.blocks
            if entry.table is not blocks or entry.written != len(blocks):  # type: ignore[arg-type]
                self._write_blocks(entry)
            found.append(entry.row)
        return np.array(found, np.intp)

    def rows_of(self, requests: Sequence[Request]) -> RowIndices:
        """Return the rows of requests that have one; their block tables are not looked at."""
        rows = map(self._rows.__getitem__, requests)
        return np.fromiter(rows, np.intp, len(requests))

    def add_blocks(self, rows: RowIndices, numbers: npt.NDArray[np.integer]) -> Ids:
        """Write down the block that each of the rows' requests has just got; give those blocks.

        `numbers` are their places in the block tables.
        """
        of, places = self._by_row, numbers.tolist()
        pairs = zip(rows.tolist(), places, strict=True)
        found: Ids = np.array([of[row].blocks[place] for row, place in pairs], np.int32)  # type: ignore[index]
        self._widen(max(places) + 1)
        self.block_tables[rows, numbers] = found
        return found

    def newest(self, rows: RowIndices) -> npt.NDArray[np.integer]:
        """Return the tokens that came out of rows last; those of the last step's as they are."""
        if rows is self._latest[0]:
            return self._latest[1]
        self._note_latest()
        return self._newest[rows]

    def _note_latest(self) -> None:
        rows, tokens = self._latest
        self._newest[rows] = tokens
        self._latest = NO_ROWS, NO_ROWS

    def _add(self, request: Request) -> _Entry:
        """Return a new request a row with its prompt, and what it has answered elsewhere."""
        self._drop(request.id)  # another run's request of the same name
        if not self._free:
            self._add_rows()
        entry = _Entry(self._free.pop(), request, request.padding)
        self._entries[request.id] = entry
        self._by_row[entry.row] = request
        self._rows[request] = entry.row
        answered = token_ids(("out", request.id), 0, request.generated, self.vocab_size)
        prompt = prompt_ids(request, self.vocab_size, self.answer)
        self._write_ids(entry, np.concatenate((prompt, answered)))
        return entry

    def _write_ids(self, entry: _Entry, ids: Ids) -> None:
        """Write a request's prompt and answer behind its padding."""
        padding, row = entry.padding, entry.row
        self._num_tokens[row] = end = padding + len(ids)
        self._reserve(end + 1)
        self.token_ids[row, :padding] = 0
        self.token_ids[row, padding:end] = ids

    def _write_blocks(self, entry: _Entry) -> None:
        """Write a request's block table, from where it was not written yet."""
        request, blocks = entry.request, entry.request.blocks
        if blocks is None:
            raise ValueError(f"request {request.id} has no blocks: live runs need a BlockManager")
        self._widen(len(blocks))
        first = entry.written if entry.table is blocks and entry.written <= len(blocks) else 0
        self.block_tables[entry.row, first : len(blocks)] = blocks[first:]
        entry.table, entry.written = blocks, len(blocks)
        if entry.padding != request.padding:  # a static batch is evened out anew each time
            ids = self._ids(entry)
            entry.padding = request.padding
            self._write_ids(entry, ids)

    def _widen(self, blocks: int) -> None:
        """Make room for so many blocks in a table."""
        width = self.block_tables.shape[1]
        if blocks > width:
            more = max(2 * width, aligned(blocks)) - width
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, more)))

    def append(self, rows: RowIndices, tokens: npt.NDArray[np.integer]) -> None:
        """Let each of the rows' texts go on by a token."""
        if rows is not self._latest[0]:
            self._note_latest()
        self._latest = rows, tokens
        self._held.append(self._latest)
        if len(self._held) > MOST_HELD:
            self.write_texts()

    def write_texts(self) -> None:
        """Write the tokens held back into the texts, which are `token_ids` and `num_tokens`."""
        for rows, tokens in self._held:
            ends = self._num_tokens[rows]
            if len(ends):
                self._reserve(int(ends.max()) + 2)
            self.token_ids[rows, ends] = tokens
            self._num_tokens[rows] = ends + 1
        self._held.clear()

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each row's text; `token_ids` holds all of them once this was asked for."""
        if self._held:
            self.write_texts()
        return self._num_tokens

    def _ids(self, entry: _Entry) -> Ids:
        """Copy a request's prompt and answer so far."""
        end = self.num_tokens[entry.row]
        return self.token_ids[entry.row, entry.padding : end].copy()

    def tokens(self, request_id: int) -> Ids:
        """Return the text of a request that has a row: prompt and answer so far."""
        return self._ids(self._entries[request_id])

    def answer(self, request_id: int) -> Ids | None:
        """Return what a request has answered so far, None where that is not known."""
        entry = self._entries.get(request_id)
        if entry is None:
            return self._answers.get(request_id)
        return self._ids(entry)[entry.request.prompt_tokens :]

    def retire(self, request_id: int) -> None:
        """Free a row but keep the answer, which a later turn's prompt may quote."""
        answer = self.answer(request_id)
        if answer is not None:
            self._answers[request_id] = answer
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """Let others have a request's row, if it has one."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._note_latest()
            self.write_texts()
            del self._by_row[entry.row], self._rows[entry.request]
            self._free.append(entry.row)

    def _reserve(self, tokens: int) -> None:
        width = self.token_ids.shape[1]
        if tokens > width:
            self.token_ids = np.pad(self.token_ids, ((0, 0), (0, max(tokens - width, width))))

    def _add_rows(self) -> None:
        """Double the number of rows."""
        count = len(self._num_tokens)
        self.block_tables = np.pad(self.block_tables, ((0, count), (0, 0)))
        self.token_ids = np.pad(self.token_ids, ((0, count), (0, 0)))
        self.num_computed = np.pad(self.num_computed, (0, count))
        self._newest = np.pad(self._newest, (0, count))
        self._num_tokens = np.pad(self._num_tokens, (0, count))
        self._free += range(2 * count - 1, count - 1, -1)


def token_ids(name: Hashable, first: int, count: int, vocab_size: int) -> Ids:
    """Return the ids of tokens `first` to `first + count` of the segment `name`.

    The same in every process: names are hashed by what `repr` makes of them, places by splitmix64.
    """
    seed = int.from_bytes(blake2b(repr(name).encode(), digest_size=8).digest(), "little")
    place = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed = place * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(vocab_size)).astype(np.int32)


def prompt_ids(
    request: Request, vocab_size: int, answer: Callable[[int], Ids | None] = lambda _: None
) -> Ids:
    """Return the ids of a request's prompt, int32 [prompt_tokens].

    A segment ("out", i) is what request i has answered: `answer(i)`, as far as that is known.
    """
    parts = []
    for name, count in request.segments or ((("in", request.id), request.prompt_tokens),):
        ids = token_ids(name, 0, count, vocab_size)
        if isinstance(name, tuple) and len(name) == 2 and name[0] == "out":
            said = answer(name[1])
            if said is not None:
                ids[: len(said)] = said[:count]
        parts.append(ids)
    return np.concatenate(parts)
