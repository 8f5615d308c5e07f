"""Make a workload out of a few numbers, in the words of `vllm bench serve` and with its meaning.

Arrivals, input lengths, output lengths, prefixes, sessions, clients and `max_tokens` have a random
stream each, all from one seed: to change one of them leaves the others as they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor
from typing import Annotated

import numpy as np

from simulator.util.config import Count, NonNegativeFinite, Share
from simulator.util.errors import FieldError, at_key
from simulator.util.from_mapping import (
    Check,
    Field,
    parse_faults,
    parse_number,
    raise_if,
    read,
    short_repr,
)
from simulator.workload import distributions as laws
from simulator.workload import sessions as talks
from simulator.workload.arrivals import ArrivalProcess, Things
from simulator.workload.multimodal import MultimodalDraws, Multimodals
from simulator.workload.workload import MAX_KEPT_REQUESTS, MAX_REQUESTS, Ints, Workload

STREAMS = (
    "arrivals",
    "input",
    "output",
    "prefixes",
    "sessions",
    "clients",
    "max_tokens",
    "models",
    "multimodal",
)
INPUT_LEN, OUTPUT_LEN = 1024, 128  # tokens, vLLM's defaults


Ratio = Annotated[float, Field(ge=0, lt=1)]


@dataclass(slots=True)
class RangeRatio:
    """How far lengths range: n from floor(n (1 - r)) to ceil(n (1 + r))."""

    input: Ratio
    output: Ratio


def _range_ratio(given: float | Mapping[str, float] | RangeRatio) -> float | RangeRatio:
    """Read {input: r, output: r}, or one number for both."""
    kind = RangeRatio if isinstance(given, Mapping | RangeRatio) else Ratio
    found: float | RangeRatio = read(kind, parse_number(given))
    return found


Clients = Things | list[laws.Weight] | dict[str, laws.Weight]
"""Their number, a list of weights, or weights by name."""


@dataclass(slots=True, eq=False)
class TraceLengths:
    """The input and the output length of a trace's requests, drawn together."""

    path: str
    format: str | None = None


@dataclass(slots=True, eq=False)
class Adapters:
    """Requests that ask for adapters (LoRA): the k-th most popular in proportion to k ** -zipf.

    A share `base` of them asks for the model itself. Turns of a session ask for the same.
    """

    num_adapters: Annotated[int, Field(ge=1, le=1_000_000), "adapters, the most popular first"]
    zipf: Annotated[NonNegativeFinite, "weight of the k-th: k ** -zipf"] = 1.0
    base: Annotated[Share, "share of requests, or sessions, for the model itself"] = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each by name; "": the model itself."""
        popularity = np.arange(1.0, self.num_adapters + 1) ** -self.zipf
        shares = (1 - self.base) * popularity / popularity.sum()
        return {"": self.base} | {f"adapter-{k}": w for k, w in enumerate(shares.tolist(), 1)}


@dataclass(slots=True, kw_only=True, eq=False)
class Generator(ArrivalProcess):
    """What is to be generated; the constructor raises ValueError, one line for each wrong key.

    With sessions `num_prompts` counts their turns (the last session may be cut short), and
    rates are those of sessions' starts. `range_ratio` r makes a length n uniform in whole numbers
    from floor(n (1 - r)) to ceil(n (1 + r)), in one number or as {input: r, output: r}.
    """

    num_prompts: Annotated[int, Field(ge=1, le=MAX_REQUESTS), "requests or session turns"] = 1000
    n: Annotated[int, Field(ge=1, le=100_000), "samples of each prompt, sent together"] = 1
    max_concurrency: Annotated[Count | None, "requests sent and unfinished, at most"] = None
    input_len: Annotated[laws.Length | None, "tokens of a prompt; null: 1024"] = None
    output_len: Annotated[laws.Length | None, "tokens of an answer; null: 128"] = None
    range_ratio: Annotated[
        float | RangeRatio,
        _range_ratio,
        "a length n is uniform from n (1 - r) to n (1 + r): r, or {input: r, output: r}",
    ] = 0.0
    lengths: Annotated[TraceLengths | None, "{path, format}: draw both lengths from a trace"] = None
    prefix_len: Annotated[int, Field(ge=0, lt=laws.MAX_TOKENS), "tokens that begin all prompts"] = 0
    prefix_groups: Annotated[
        talks.PrefixGroups | None, "prompts begin with one of a few prefixes"
    ] = None
    sessions: Annotated[talks.Sessions | None, "conversations of several turns"] = None
    clients: Annotated[
        Clients | None,
        "their number, a list of weights, or {name: weight}; null: requests name no client",
    ] = None
    priorities: Annotated[
        list[Annotated[int, Field(gt=-(2**31), lt=2**31)]] | None,
        "one per client; smaller is more urgent",
    ] = None
    max_tokens: Annotated[laws.Lengths | None, "most output tokens; null: the answer's own"] = None
    adapters: Annotated[Adapters | None, "adapters (LoRA) that requests ask for; null: none"] = None
    models: Annotated[dict[str, laws.Weight] | None, "{name: weight}; null: the trace's"] = None
    multimodal: Annotated[Multimodals | None, "{image: {...}}, or video, audio; null: none"] = None

    def __post_init__(self) -> None:
        raise_if(
            *self.check_rates(),
            *self._check_names(),
            (self.n > 1 and self.sessions is not None, "n", "cannot be used with sessions"),
            others=self._wrong_lengths(),
        )

    def _check_names(self) -> list[Check]:
        """Check who sends requests, and for which model."""
        clients, urgent, models = self.clients, self.priorities, self.models
        weights = clients.values() if isinstance(clients, Mapping) else clients
        count = clients if isinstance(clients, int) else len(clients or ())
        two = models is not None and self.adapters is not None
        what = f"{short_repr(urgent)} is not a list with a whole number for each client"
        lone = "needs clients: how urgent the requests of each are"
        return [
            laws.check_weights("clients", None if isinstance(weights, int) else weights),
            (urgent is not None and clients is None, "priorities", lone),
            (None not in (urgent, clients) and len(urgent or ()) != count, "priorities", what),
            laws.check_weights("models", None if models is None else models.values()),
            (two, "models", "cannot be used with adapters"),
        ]

    @property
    def range_ratios(self) -> RangeRatio:
        """The range ratio of inputs and that of outputs."""
        given = self.range_ratio
        return given if isinstance(given, RangeRatio) else RangeRatio(given, given)

    def _wrong_lengths(self) -> list[FieldError]:
        if self.lengths is None:
            wrong = parse_faults("input_len", input_lengths, self)
            return wrong + parse_faults("output_len", output_lengths, self)
        given = {"input_len": self.input_len, "output_len": self.output_len}
        names = [key for key, value in given.items() if value is not None]
        names += ["range_ratio"] if self.range_ratio else []
        return [FieldError((name,), "cannot be given with lengths") for name in names]


def _weights(clients: Clients) -> Mapping[str, float]:
    """Return the weight of each client by its name."""
    if isinstance(clients, Mapping):
        return {str(name): weight for name, weight in clients.items()}
    given = [1.0] * clients if isinstance(clients, int) else clients
    return {f"client-{k}": weight for k, weight in enumerate(given)}


def input_lengths(spec: Generator) -> laws.Distribution:
    """Return the distribution of the new tokens of a prompt; 0 are enough where it has a prefix."""
    least = 0 if spec.prefix_len or spec.prefix_groups else 1
    length = INPUT_LEN if spec.input_len is None else spec.input_len
    return _range_around(length, spec.range_ratios.input, least)


def shortest_prompt(spec: Generator) -> int:
    """Return the least tokens that a prompt may have, all that begin alike included."""
    return spec.prefix_len + int(laws.shortest_length(input_lengths(spec)))


def output_lengths(spec: Generator) -> laws.Distribution:
    """Return the distribution of the output lengths; as in vLLM, a range ends at 1 token."""
    length = OUTPUT_LEN if spec.output_len is None else spec.output_len
    around = _range_around(length, spec.range_ratios.output, 0)
    if isinstance(around, laws.Uniform):
        raise_if((around.high < 1, "", f"{length} is less than 1 token"))
        return laws.Uniform(max(around.low, 1), around.high)
    return around


def _range_around(n: float | laws.Distribution, ratio: float, least: int) -> laws.Distribution:
    if not isinstance(n, int | float):
        raise_if((ratio != 0, "", "must be a number where there is a range_ratio"))
        return n
    low, high = floor(n * (1 - ratio)), ceil(n * (1 + ratio))
    raise_if(
        (n != int(n), "", f"{n} is not a whole number"),
        (low < least, "", f"{low} tokens would be possible, but {least} is the least"),
    )
    return laws.Uniform(low, high)


def generate(spec: Generator, seed: int = 0, load: laws.TraceReader | None = None) -> Workload:
    """Make the workload that `spec` asks for.

    `load` reads the traces that lengths are drawn from. Raises ValueError, a line
    `field: what is wrong` for each fault.
    """
    many = f"{spec.num_prompts} requests do not fit into memory together, "
    many += f"{MAX_KEPT_REQUESTS:,} may; headway run --no-tables generates them as they come"
    raise_if((spec.num_prompts * spec.n > MAX_KEPT_REQUESTS, "num_prompts", many))
    if spec.n > 1:
        return _sample(spec, seed, load)
    return next(generate_parts(spec, seed, load, spec.num_prompts))


def generate_parts(
    spec: Generator, seed: int, load: laws.TraceReader | None, size: int
) -> Iterator[Workload]:
    """Make the same requests, whole sessions, some `size` at a time.

    `after` and `segments` name requests by their numbers in the whole.
    """
    sessions = partial(talks.session_parts, spec.sessions, spec.num_prompts, size)
    counts = [len(starts) for starts, _ in sessions(random_streams(seed)["sessions"])]
    rng = random_streams(seed)
    heads, groups = talks.prefix_parts(spec.prefix_len, spec.prefix_groups, counts, rng["prefixes"])
    times = spec.arrival_parts(sum(counts), lambda: random_streams(seed)["arrivals"], counts)
    draws, media = None, None
    if spec.multimodal is not None:
        draws = MultimodalDraws(spec.multimodal, rng["multimodal"], load)
    first = 0
    for (starts, delay), group, time in zip(sessions(rng["sessions"]), groups, times, strict=True):
        work, answer, text = _requests(replace(spec, num_prompts=len(delay)), rng, load)
        new = text
        if draws is not None:
            media, more = draws.draw(first, len(text), None)
            new = text + more
        session = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(new)))
        before = np.cumsum(new + answer) - (new + answer)
        head = np.array([sum(count for _, count in parts) for parts in heads])[group]
        work.prompt_tokens = head[session] + before - before[starts][session] + new
        work.arrival[starts] = time
        follows = np.isnan(work.arrival)
        if spec.sessions is not None:
            work.after = np.where(follows, np.arange(first - 1, first + len(new) - 1), -1)
            work.delay = np.where(follows, delay, 0.0)
        if spec.sessions is not None or heads != [()] or media is not None:
            what = heads, group[session], follows, text, answer
            work.segments = talks.write_segments(*what, first=first, media=media)
        if spec.clients is not None:
            draw_clients(work, session, spec.clients, spec.priorities, rng["clients"])
        if (names := spec.adapters.weights if spec.adapters else spec.models) is not None:
            work.model = draw_names(session, names, rng["models"])
        work.source = f"generated, seed {seed}"
        first += len(new)
        yield work


def _requests(
    spec: Generator, rng: "dict[str, np.random.Generator]", load: laws.TraceReader | None
) -> tuple[Workload, Ints, Ints]:
    """Draw lengths; give each answer as the next turn of a session finds it, and the new tokens."""
    new, output = draw_lengths(spec, rng, load)
    most, answer = None, output
    if spec.max_tokens is not None:
        most = draw_max_tokens(spec.max_tokens, len(new), rng["max_tokens"], load)
        answer = np.minimum(output, most)
    work = Workload(
        np.full(len(new), np.nan),
        prompt_tokens=new,
        output_tokens=output,
        max_tokens=most,
        max_concurrency=spec.max_concurrency,
        request_rate=float(spec.request_rate),
        burstiness=float(spec.burstiness),
    )
    return work, answer, new


def _sample(spec: Generator, seed: int, load: laws.TraceReader | None) -> Workload:
    """Send each prompt `n` times at once; each sample's answer is drawn by itself.

    As vLLM's `ParentRequest` fans a request out: the samples share their prompt's KV by the prefix
    cache alone.
    """
    prompts = generate(replace(spec, n=1), seed, load)
    numbers = np.repeat(np.arange(len(prompts)), spec.n)
    if prompts.segments is None:
        tokens = prompts.prompt_tokens.tolist()
        prompts.segments = [((("in", i), count),) for i, count in enumerate(tokens)]
    work = prompts.rows(numbers)
    many = replace(spec, n=1, num_prompts=len(numbers))
    work.output_tokens = draw_lengths(many, random_streams(seed), load)[1]
    work.prompt = numbers
    return work


def draw_clients(
    work: Workload,
    session: Ints,
    clients: Clients,
    priorities: Sequence[int] | None,
    rng: "np.random.Generator",
) -> None:
    """Assign each session a client by weight, and the client's priority."""
    weights = _weights(clients)
    work.client = draw_names(session, weights, rng)
    if priorities is not None:
        urgent = dict(zip(weights, priorities, strict=True))
        work.priority = np.array([urgent[name] for name in work.client], np.int64)


def draw_names(
    session: Ints, weights: Mapping[str, float], rng: "np.random.Generator"
) -> list[str]:
    """Draw a name for each session, numbered from 0 on, in proportion to the weights."""
    u = rng.random(int(session.max(initial=-1)) + 1)
    drawn = laws.weighted_choice(np.array([*weights.values()], np.float64), u)
    names = [*map(str, weights)]  # YAML reads a 1 as a number
    return [names[k] for k in drawn[session].tolist()]


def draw_max_tokens(
    spec: laws.Distribution, count: int, rng: "np.random.Generator", load: laws.TraceReader | None
) -> Ints:
    """Draw the output tokens that the client of each of `count` requests allows."""
    with at_key("max_tokens"):
        return laws.token_counts(spec, rng.random(count), load)


def random_streams(seed: int) -> "dict[str, np.random.Generator]":
    """Make the random streams of a workload, by name."""
    spawned = np.random.SeedSequence(seed).spawn(len(STREAMS))
    return {name: np.random.default_rng(s) for name, s in zip(STREAMS, spawned, strict=True)}


def draw_lengths(
    spec: Generator, rng: "dict[str, np.random.Generator]", load: laws.TraceReader | None
) -> tuple[Ints, Ints]:
    """Draw each request's new prompt tokens and its output tokens."""
    u = rng["input"].random(spec.num_prompts)
    if spec.lengths is not None:
        with at_key("lengths"):
            trace = laws.read_lengths(spec.lengths.path, spec.lengths.format, load)
        row = (u * len(trace)).astype(np.int64)
        return trace.prompt_tokens[row], trace.output_tokens[row]
    with at_key("input_len"):
        new = laws.token_counts(input_lengths(spec), u, load)
    u = rng["output"].random(spec.num_prompts)
    with at_key("output_len"):
        return new, laws.token_counts(output_lengths(spec), u, load)
