"""The scenario's keys for people and for editors, made from the code: reference page, JSON Schema.

`python -m simulator.scenario.reference_page > docs/scenario.md` writes the page.
"""

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from simulator.cluster.routers import ROUTERS
from simulator.core.engine_config import DTYPES
from simulator.costs.linear import Fitted
from simulator.costs.profile import FORMS
from simulator.policies.predictor import KINDS as PREDICTORS
from simulator.scenario.policy_table import POLICIES
from simulator.scenario.scenario import Scenario
from simulator.scenario.validate import UNSUPPORTED_KEYS, block_class
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.yaml_lines import Key
from simulator.workload.distributions import KINDS
from simulator.workload.generate import Generator, PrefixGroups, Sessions
from simulator.workload.workload import FRONTENDS

PAGE_HEAD = """# Scenario reference

A scenario is one YAML file; `headway run FILE` simulates it. Every key may be left out. An unknown
key or a wrong value is refused with its line. `--set dotted.key=value` overrides a key. Relative
paths are looked up beside the scenario file, then in the folder that the environment variable
`HEADWAY_DATA` names. `1e-3` and `inf` are numbers; anchors (`&`, `*`) are not supported.
A scenario may name code (`module:Class`): do not run a stranger's
([SECURITY.md](../SECURITY.md)).

This page is made by `python -m simulator.scenario.reference_page`.
"""
GENERATOR_KEYS = {
    "request_rate": "requests (with sessions: sessions) per second; inf: all at once",
    "burstiness": "shape of the Gamma distribution of the gaps: 1 Poisson, less is burstier",
    "rescale": "stretch the gaps so that the last arrival is at num_prompts / request_rate",
    "ramp_up_strategy": "linear or exponential; in place of request_rate",
    "ramp_up_start_rps": "rate at the beginning, requests per second",
    "ramp_up_end_rps": "rate at the end, requests per second",
    "diurnal": "{period: s, amplitude: share}: a load that swings about request_rate, from its "
    "lowest at the start; period 86400 and amplitude 0.5 if left out",
    "num_prompts": "requests; with sessions, their turns",
    "max_concurrency": "requests sent and unfinished, at most; null: no limit; also beside trace",
    "input_len": "tokens of a prompt: a number or a distribution; null: 1024",
    "output_len": "tokens of an answer: a number or a distribution; null: 128",
    "range_ratio": "r makes a length n uniform from n (1 - r) to n (1 + r); a number, or "
    "{input: r, output: r}",
    "lengths": "{path, format}: draw prompt and answer lengths together from a trace",
    "prefix_len": "tokens that all prompts begin with, before input_len",
    "prefix_groups": "prompts that begin with one of a few prefixes, see below",
    "sessions": "conversations of several turns, see below",
    "clients": "how many clients, or a list with the weight of each; null: nobody is named; also "
    "beside trace",
    "priorities": "a whole number for each client, the smaller the more urgent; also beside trace",
    "max_tokens": "output tokens that each request's client allows, tokens or a distribution: the "
    "answer is cut there, with finish_reason length; null: nobody says; also beside trace",
}
PREFIX_GROUP_KEYS = {
    "num_prefixes": "prefixes that there are",
    "prefix_len": "tokens of a prefix: a number or a distribution",
    "zipf": "popularity of the k-th is k ** -zipf; 0: all alike",
}
SESSION_KEYS = {
    "turns": "turns of a session: a number or a distribution",
    "think_time": "seconds from an answer to the next turn: a number or a distribution",
}
POLICIES_HEAD = """## engine.scheduling_policy

A name, or `{policy: NAME, argument: value}`; defaults of the arguments are in brackets. A class of
your own, `{policy: package.module:Class, ...}`, takes those of its constructor.
"""
POLICY_TEXTS = {
    "fcfs": "First come, first served; a preempted request goes to the front.",
    "preemptive": "As priority, but a waiting request displaces a running one whose number is "
    "larger by more than `threshold`; numbers fall by `ageing` per second since the arrival.",
    "deadline": "Earliest deadline first: token n is due `ttft` + n `tpot` ms after the arrival; "
    "`clients` gives some their own, {name: {ttft: 200, tpot: 30}}. A waiting request displaces a "
    "running one whose next token is due more than `slack` ms later than its own.",
    "srpt": "The shortest remaining predicted length first; displaces a running request with more "
    "than `margin` tokens more to go, unless that has said `limit` times its prediction.",
    "hrrn": "The highest response ratio, (waited + size) / size, first; `by` as in sjf.",
    "mlfq": "Skip-join feedback queues: level l has a quantum of `quantum` `ratio` ** l steps, "
    "`prefill_rate` prompt tokens count as one; displaces running requests of lower levels; who "
    "has waited `starvation` seconds goes to the highest.",
    "boost": "First come, first served by arrival times that are earlier for small requests, "
    "which bounds the tail: `by` as in sjf, `token_time` seconds per token, a large `gamma` (1/s) "
    "is close to fcfs.",
    "priority": "The smaller priority of the trace first, among equals the earlier arrival.",
    "sjf": "The shortest first, by its prompt, `by: hint` its predicted answer, `by: total` both; "
    "a second of waiting counts as `ageing` tokens less.",
    "static": "Static batching: a batch starts when `batch_size` requests wait (null: "
    "max_num_seqs, which is also the most), or `timeout` seconds after the oldest of them came, "
    "and runs until its longest member ends. `deliver: each` gives an answer as it is computed, "
    "`batch` whole when the batch is over: then TTFT is E2EL.",
    "hf-static": "Hugging Face `generate` in a loop: static batching, 8 at a time if "
    "null, without a timeout, each batch of prompts in one pass; `deliver` as for static.",
    "orca": "Orca: whole prompts and decodes in one step, without a token budget; memory reserved "
    "for the longest answer.",
    "fcfs-v0": "vLLM 0.4 to 0.6: steps of whole prompts before steps of decodes, a swapped queue.",
    "sarathi": "Sarathi-Serve: decodes first, then chunks of prompts, within the budget.",
    "sglang": "SGLang 0.5.23: steps of prompts first, in `order`: fcfs, lof, random, lpm, "
    "dfs-weight, hrrn, shortest-prefill-first; retraction of decodes. With priorities the higher "
    "is the more urgent, unless `schedule_low_priority_values_first`. `max_num_batched_tokens` "
    "is its chunked_prefill_size, `block_size` its page_size, `async_scheduling` its overlap.",
    "trtllm": "TensorRT-LLM: GUARANTEED_NO_EVICT, MAX_UTILIZATION or STATIC_BATCH.",
    "tgi": "Text Generation Inference 2: prompts interrupt decodes by the waiting-served ratio.",
    "fastgen": "DeepSpeed-FastGen: Dynamic SplitFuse.",
    "fair": "Virtual Token Counter: the client that has received the fewest tokens first. A token "
    "of a prompt counts `input_weight`, one of an answer `output_weight`, divided by the client's "
    "weight: {policy: fair, weights: {a: 2, b: 1}}; it is 1 for clients not named.",
    "wfq": "Weighted fair queueing: the smallest virtual finish time first, `boost` tokens sooner "
    "for each second of waiting; weights as for fair.",
    "virtual-finish-time": "Weighted fair queueing with each request by itself: the smallest "
    "virtual time + remaining tokens / weight first, of which up to the share `starvation_boost` "
    "does not count for who waits; the largest of those who run is preempted. Weights as for fair.",
    "drr": "Deficit round robin: in each round a client may spend `quantum` tokens times its "
    "weight; weights as for fair.",
}
PREDICTORS_HEAD = """## predictor

A kind, or `{kind: ..., ...}`; defaults of the fields are in brackets. Predictions are whole output
tokens; `requests.csv` has them in the column `predicted_output_tokens`. Errors depend on `seed` and
on the request's number alone.
"""
GENERATOR_HEAD = """Without `trace` the requests are generated, with the words and meanings of
`vllm bench serve`.
"""
INTRODUCTIONS = {
    "workload.trace": """\
A trace whose columns no format knows is read by `workload.columns`, beside `trace`: which column
holds `arrival`, `prompt`, `output` and the like, as a mapping or `arrival=t:ms,prompt=n,output=m`
([workloads.md](workloads.md)).""",
    "workload.frontend": """\
What a request passes before the scheduler, with or without `trace`; by default (null)
nothing. `frontend: client` is what vLLM's clients see, `frontend: server` what the server's own
clock does ([accuracy.md](accuracy.md)). `client_latency`, in seconds, in place of `frontend` is its
`latency` alone.
""",
    "cluster": """\
Several replicas of the engine, see [fleet.md](fleet.md).
""",
}
ROUTERS_HEAD = """### Routers

What each takes besides `router`, with the default in brackets:
"""
COSTS_HEAD = """## cost

`{profile: NAME}` takes a shipped profile, `{profile: PATH}` your own. What the engine adds to
its kernels comes on top (`simulator/costs/overheads.yaml`, by `engine.version`);
`overhead: vllm` beside it adds that to a profile that does not ask for it,
`overhead: {host_per_sequence: 2e-5}` changes terms of it. `{kind: ...}` writes the
cost model down, its terms in seconds; defaults are in brackets. T is the number of tokens in a
step, n that of its sequences, S the cached tokens that its decodes read.
"""
COST_TEXTS = {
    "linear": "Seconds = base + per_token T + per_context S + per_sequence n.",
    "piecewise": "The form of the shipped profiles, explained in `simulator/costs/piecewise.py`; "
    "`dense` is a list of [tokens, seconds], `cudagraph_capture_sizes` one of the batches "
    "that have a CUDA graph: a step that only decodes costs what the next of them costs. A step "
    "with prompts costs what the next row of `graph_mixed`, by tokens, does, where there is one.",
    "piecewise-split": "Beside the terms of `piecewise`: every step that decodes waits `per_key` "
    "for each key of its longest sequence or, of few sequences, for a share of all keys, "
    "explained in `simulator/costs/piecewise.py`: B200 from vLLM 0.14 on.",
    "roofline": "From the sizes of the model and the data sheet of the GPU, at the efficiency that "
    "kernels were measured to reach there, or reach elsewhere.",
}
DISTRIBUTIONS_HEAD = """## Distributions

A length or a time is a number, or `{kind: ..., ...}` with the fields of the kind:
"""
UNSUPPORTED_HEAD = """## Keys of vLLM that are not here
"""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""Of JSON Schema."""


def page() -> str:
    """Make the page."""
    parts = [
        PAGE_HEAD,
        _table("Top level", _block_rows(())),
        _block_tables("gpu", "gpu.power", "engine"),
        _block_tables("engine.speculative_config", "engine.speculative_config.draft", "host"),
        _list(POLICIES_HEAD, _policies()),
        _list(PREDICTORS_HEAD, _kinds(PREDICTORS)),
        _block_tables("goodput", "workload.trace"),
        _table("workload", _dataclass_rows(Generator, GENERATOR_KEYS), GENERATOR_HEAD),
        _block_tables("workload.frontend"),
        _table("workload.prefix_groups", _dataclass_rows(PrefixGroups, PREFIX_GROUP_KEYS)),
        _table("workload.sessions", _dataclass_rows(Sessions, SESSION_KEYS)),
        _block_tables("cluster", "cluster.groups.NAME", "cluster.kv_transfer", "cluster.admission"),
        _block_tables("cluster.client", "cluster.failures", "cluster.failures.outages"),
        _block_tables("cluster.autoscaling"),
        _list(ROUTERS_HEAD, _routers()),
        _block_tables("plan", "sweep", "sweep.random", "sweep.random.keys"),
        _list(COSTS_HEAD, _costs()),
        _list(DISTRIBUTIONS_HEAD, _kinds(KINDS)),
        _list(UNSUPPORTED_HEAD, (f"- `{name}`: {why}" for name, why in UNSUPPORTED_KEYS.items())),
    ]
    return "\n".join(parts)


def _list(head: str, items: Iterator[str]) -> str:
    return "\n".join([head, *items, ""])


def _table(title: str, rows: Iterator[tuple[str, ...]], words: str = "") -> str:
    head = [f"## {title}", "", *([words] if words else [])]
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _block_tables(*names: str) -> str:
    """Make the tables of blocks; of one item, where there is a list or a mapping of them."""
    return "\n".join(
        _table(name, _block_rows(tuple(name.split("."))), INTRODUCTIONS.get(name, ""))
        for name in names
    )


def _block_rows(key: Key) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the block at a key: key, values, default, meaning."""
    block = block_class(key) or block_class((*key, "each"))
    assert block is not None
    for name, field in block.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"`{name}`", "mapping", "", "see below"
            continue
        bounds = [text for item in field.metadata if (text := _bound(item))]
        values = ", ".join([_values(kind), *bounds])
        missing = field.default is PydanticUndefined
        default = "required" if missing else f"`{_yaml(field.default)}`"
        yield f"`{name}`", values, default, (field.description or "").replace("|", r"\|")


def _values(kind: Any) -> str:
    """Name what a type takes in YAML's words."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in {Union, UnionType}:
        inner = (part for part in get_args(kind) if part is not type(None))
        return " or ".join(_values(part) for part in inner)
    if get_origin(kind) in {Sequence, list, tuple}:
        return "list"
    if hasattr(kind, "__metadata__"):
        items = (part for item in kind.__metadata__ for part in getattr(item, "metadata", [item]))
        bounds = [text for item in items if (text := _bound(item))]
        return ", ".join([_values(kind.__origin__), *bounds])
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return words.get(kind, "mapping")


def _bound(item: Any) -> str:
    """Write down a bound, unless it is only there to fit a machine's integers."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for name, sign in signs.items():
        limit = getattr(item, name, None)
        if limit is not None and limit < 2**31 - 1:
            return f"{sign} {limit:,}"
    return ""


def _dataclass_rows(cls: type, meanings: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a dataclass: key, values, default, meaning."""
    for field in dataclasses.fields(cls):
        missing = field.default is dataclasses.MISSING
        default = "required" if missing else f"`{_yaml(field.default)}`"
        yield f"`{field.name}`", _values(field.type), default, meanings[field.name]


def _policies() -> Iterator[str]:
    """List the policies with the arguments that are not keys of the engine."""
    engine = set(inspect.signature(Scheduler).parameters)
    for name, cls in POLICIES.items():
        yield f"- `{name}`: {_arguments(cls, engine)}. {POLICY_TEXTS[name]}"


def _routers() -> Iterator[str]:
    """List the routers with their arguments."""
    for name, cls in ROUTERS.items():
        words = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        yield f"- `{name}`: {_arguments(cls)}. {words}"


def _arguments(cls: type, without: Collection[str] = ()) -> str:
    """List the arguments of a constructor, with their defaults in brackets."""
    defaults = {
        name: "the scenario's" if one.default is inspect.Parameter.empty else _yaml(one.default)
        for name, one in inspect.signature(cls).parameters.items()
        if name not in without
    }
    return ", ".join(f"`{key}` ({text})" for key, text in defaults.items()) or "no arguments"


def _costs() -> Iterator[str]:
    """List the kinds of cost models with the terms that a scenario may give."""
    given = {field.name for field in dataclasses.fields(Fitted)}
    for name, meaning in COST_TEXTS.items():
        keys = _keys(FORMS[name], given) if name in FORMS else "no terms"
        if name == "piecewise":  # the next one has these, too
            given |= {field.name for field in dataclasses.fields(FORMS[name])}
        yield f"- `{name}`: {keys}. {meaning}"


def _kinds(kinds: Mapping[str, type]) -> Iterator[str]:
    """List the kinds of distributions, or of predictors."""
    for name, cls in kinds.items():
        fields = _keys(cls, set()) or "no fields"
        yield f"- `{name}`: {fields}. {(cls.__doc__ or '').splitlines()[0]}"


def _keys(cls: type, without: set[str]) -> str:
    """List the fields of a dataclass, with their defaults in brackets."""
    fields = [f for f in dataclasses.fields(cls) if f.init and f.name not in without]
    return ", ".join(
        f"`{f.name}`" + ("" if f.default is dataclasses.MISSING else f" ({_yaml(f.default)})")
        for f in fields
    )


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def json_schema() -> dict[str, Any]:
    """Make the schema (JSON Schema 2020-12) of a scenario file.

    It knows every key and the plain types and bounds; what keys must be to one another, only
    loading a scenario tells.
    """
    schema = Scenario.model_json_schema()
    _loosen(schema)
    workload = schema["$defs"]["WorkloadConfig"]
    for field in dataclasses.fields(Generator):
        workload["properties"].setdefault(field.name, {"description": GENERATOR_KEYS[field.name]})
    workload["properties"]["frontend"]["anyOf"].append({"enum": [*FRONTENDS]})
    workload["additionalProperties"] = False
    group = schema["$defs"]["GroupConfig"]
    for key, what in (("engine", "a named engine, such as vllm"), ("gpu", "a GPU, such as L4")):
        for block in (schema, group):
            named = {"type": "string", "description": what}
            block["properties"][key]["anyOf"].insert(1, named)
    return {"$schema": DIALECT, "title": "Headway scenario", **schema}


def _loosen(node: Any) -> None:
    """Let any block be null, which stands for its defaults, and a short dtype for a long one."""
    if isinstance(node, list):
        for item in node:
            _loosen(item)
    if not isinstance(node, dict):
        return
    if "bfloat16" in node.get("enum", ()):
        node["enum"] = [*node["enum"], *DTYPES]
    for value in node.values():
        _loosen(value)
    for name, value in node.get("properties", {}).items():
        if "$ref" in value:
            rest = {key: value[key] for key in value if key != "$ref"}
            kinds = [{"$ref": value["$ref"]}, {"type": "null"}]
            node["properties"][name] = rest | {"anyOf": kinds}


if __name__ == "__main__":
    print(page(), end="")
