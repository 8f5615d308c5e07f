"""The vocabulary that everybody shares: a request, a chunk of its tokens, a step."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

Segments = tuple[tuple[Hashable, int], ...]
"""A prompt's contents: runs of tokens (name, count); token k of a run is the pair (name, k)."""


State = Literal["waiting", "waiting_for_remote_kvs", "running", "preempted", "swapped", "finished"]
"""Where a request is: vLLM's `RequestStatus`, of which V0 has `swapped`."""


class Media(NamedTuple):
    """The name of a run of tokens that an encoder makes: of an image, or a clip."""

    modality: str
    name: Hashable  # the same for the same contents: vLLM's mm_hash


class Item(NamedTuple):
    """An image, or a clip, in a prompt."""

    media: Media
    start: int  # its first token
    end: int  # the token behind its last


def items_of(prompt: Segments | None) -> tuple[Item, ...]:
    """Return where the images and the like of a prompt are."""
    items, start = [], 0
    for name, count in prompt or ():
        if isinstance(name, Media):
            items.append(Item(name, start, start + count))
        start += count
    return tuple(items)


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One user's request and how far it has come.

    `output_tokens` is known to the world, not to the engine: a policy must not read it, nor
    `output_limit` and `last_tick`, which follow from it. What a policy may know of it is `hint`,
    and `max_tokens`, which the client declares.
    """

    id: int
    arrival: float  # seconds
    prompt_tokens: int
    output_tokens: int  # the length at which it ends by itself
    _: KW_ONLY
    client: str = ""
    priority: int = 0
    segments: Segments | None = None  # None: a prompt shared with nobody
    hint: int | None = None  # output tokens that a predictor expects; None: there is none
    max_tokens: int | None = None  # output tokens that the client allows; None: it does not say
    ignore_eos: bool = False  # it ends with the last token that the client allows (SGLang)
    model: str = ""  # the adapter, or of several models the one, that it asks for; "": none
    blocks: list[int] | None = None  # its block table, where blocks have names

    # The engine's side.
    # Images and clips in its prompt, for an engine's encoder.
    items: Sequence[Item] = field(default=(), init=False)
    # Tokens after which the engine ends it, whatever it still had to say.
    output_limit: int = field(default=0, init=False)
    # Tokens that it may bring out for all the engine knows (SGLang).
    allowed: int = field(default=0, init=False)
    computed: int = field(default=0, init=False)  # tokens whose KV is in the cache
    # Tokens that have come out, kept over a preemption.
    generated: int = field(default=0, init=False)
    # Tokens whose KV waits on the host, after a preemption.
    swapped: int = field(default=0, init=False)
    # Tokens put before the prompt to even out a static batch.
    padding: int = field(default=0, init=False)
    # Waits for more than room: see kv_roles.py and pipeline.py.
    remote: int = field(default=0, init=False)
    # Of its full blocks, as far as asked for.
    hashes: list[int] | None = field(default=None, init=False)
    # Of `generated`, tokens that are still on their way (async_scheduling).
    unknown: int = field(default=0, init=False)
    # Tokens were left at its last step (for held prefill).
    mid_prefill: bool = field(default=False, init=False)
    # The number of its admission: the order of the running list.
    admission: int = field(default=-1, init=False)
    # The tick at which it joined the decode set; -1: it is not in it.
    joined: int = field(default=-1, init=False)
    # The tick after which it ends, if it stays in the set until then.
    last_tick: int = field(default=-1, init=False)
    # When the first token of the current run of ticks came out.
    run_start: float = field(default=0.0, init=False)

    # What is written down about it.
    first_scheduled: float = field(default=-1.0, init=False)
    first_token: float = field(default=-1.0, init=False)
    finish: float = field(default=-1.0, init=False)
    preemptions: int = field(default=0, init=False)
    # Prompt tokens found in the prefix cache at the first admission.
    cached: int = field(default=0, init=False)
    received: int = field(default=0, init=False)  # tokens that its client had when it hung up
    again: "Request | None" = field(default=None, init=False)  # the same, sent once more

    def retry(self, now: float) -> "Request":
        """Return what its client sends once more: nothing that an engine has done is left."""
        self.again = replace(self, arrival=now, blocks=None)
        return self.again

    @property
    def state(self) -> State:
        """Where it is; it runs from its first computed token on."""
        if self.finish >= 0:
            return "finished"
        if self.remote:
            return "waiting_for_remote_kvs"
        if self.computed or self.joined >= 0:
            return "running"
        if self.swapped:
            return "swapped"
        return "preempted" if self.preemptions else "waiting"

    @property
    def contents(self) -> Segments:
        """What the prompt consists of: its segments, or one that nobody shares."""
        return self.segments or ((("in", self.id), self.prompt_tokens),)

    @property
    def known(self) -> int:
        """Tokens that are known: padding, prompt and what has come out."""
        return self.padding + self.prompt_tokens + self.generated

    @property
    def pending(self) -> int:
        """Tokens that must pass through the model before the next one comes out."""
        return self.padding + self.prompt_tokens + self.generated - self.computed


def by_admission(request: Request) -> int:
    """Sort key: the order of the running list."""
    return request.admission


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of one request's tokens that one step computes."""

    request: Request
    start: int  # tokens already in the cache
    tokens: int  # tokens to compute now


@dataclass(slots=True)
class Swap:
    """KV blocks of one request that a step copies to the host, or back, before it computes."""

    request: Request
    count: int  # blocks
    first: int = 0  # the number of the first in the request's block table
    blocks: list[int] | None = None  # their names, where blocks have names


@dataclass(slots=True)
class Load:
    """Blocks of a prompt's prefix that a step copies from the host tier before it computes.

    Or that have been copied beside the steps before it, or are while it computes, layer by layer.
    """

    request: Request
    count: int  # blocks
    fresh: bool  # at the request's first admission
    fetched: tuple[int, int] = (0, 0)  # of these, from each tier behind it
    beside: bool = False
    layerwise: bool = False


@dataclass(slots=True)
class Copies:
    """What a step copies between GPU and host before it computes: few steps do."""

    outgoing: list[Swap] = field(default_factory=list)  # to the host, done first
    incoming: list[Swap] = field(default_factory=list)  # and back, done next
    loads: list[Load] = field(default_factory=list)  # prefixes from the host tier

    @property
    def swapped_out(self) -> int:
        """Blocks copied to the host."""
        return sum(swap.count for swap in self.outgoing)

    @property
    def swapped_in(self) -> int:
        """Blocks copied back from the host."""
        return sum(swap.count for swap in self.incoming)


class Work(Protocol):
    """What a feature of an engine has to do with a step."""

    def amounts(self, seconds: float, own: float) -> Mapping[str, float]:
        """Return what it adds to figures of the summary, of a step of so many s, `own` its own."""


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """One forward pass: what every executor receives, and all it receives.

    The sequences that decode are given as sums, since a cost needs no more, and a step must not
    cost the simulator anything per running request.
    """

    prefills: list[Chunk]
    decodes: int = 0  # sequences that advance by one token, a static batch's ghosts too
    context: int = 0  # KV entries that they read in all, each one's new tokens included
    _: KW_ONLY
    drafts: int = 0  # draft tokens that the decodes verify, beside a token each
    copies: Copies | None = None  # KV blocks that move between GPU and host
    # Of the prefill tokens, those that only even out a static batch.
    padding: int = field(default=0, init=False)
    # Of the decodes, those whose request has already ended.
    ghosts: int = field(default=0, init=False)
    # Of the decodes, those scheduled one by one.
    singles: list[Chunk] | None = field(default=None, init=False)
    # Draft tokens for each sequence made after it; -1: the usual number.
    drafting: int = field(default=-1, init=False)
    # KV entries that one decode reads at most, where the executor asks.
    longest: int = field(default=0, init=False)
    # Of features, by their keys; None: of none.
    work: dict[str, Work] | None = field(default=None, init=False)

    def add_copies(self) -> Copies:
        """Return what it copies, to be added to."""
        if self.copies is None:
            self.copies = Copies()
        return self.copies

    def add_work(self, key: str, work: Work) -> None:
        """Note what the feature of a key has to do with it."""
        self.work = {**(self.work or {}), key: work}

    def without_copies(self) -> "Step":
        """Return the same step, but that it copies nothing."""
        other = Step(self.prefills, self.decodes, self.context, drafts=self.drafts)
        other.padding, other.ghosts, other.singles = self.padding, self.ghosts, self.singles
        other.longest, other.work = self.longest, self.work
        return other

    @property
    def outgoing(self) -> Sequence[Swap]:
        """Copies to the host."""
        return self.copies.outgoing if self.copies else ()

    @property
    def incoming(self) -> Sequence[Swap]:
        """Copies back from the host."""
        return self.copies.incoming if self.copies else ()

    def add_single(self, request: Request, start: int, tokens: int = 1) -> None:
        """Let a request outside the decode set decode; all but one of its tokens are drafts."""
        if self.singles is None:
            self.singles = []
        self.singles.append(Chunk(request, start, tokens))
        self.decodes += 1
        self.drafts += tokens - 1
        self.context += start + tokens

    def remove(self, request: Request) -> int:
        """Take back what a request was to compute; return its tokens."""
        for chunk in self.prefills:
            if chunk.request is request:
                self.prefills.remove(chunk)
                return chunk.tokens
        for chunk in self.singles or ():
            if chunk.request is request:
                self.singles.remove(chunk)  # type: ignore[union-attr]
                self.decodes -= 1
                self.drafts -= chunk.tokens - 1
                self.context -= chunk.start + chunk.tokens
                return chunk.tokens
        return 0

    @property
    def tokens(self) -> int:
        """Tokens that pass through the model."""
        return self.decodes + self.drafts + sum(chunk.tokens for chunk in self.prefills)
