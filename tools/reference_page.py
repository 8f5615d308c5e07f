"""The page of a scenario's keys, made from the code.

`python -m tools.reference_page > docs/scenario.md` writes the page.
"""

import dataclasses
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from simulator.build.policy_table import POLICIES, signature
from simulator.cluster.routers import ROUTERS
from simulator.costs.profile import FORMS
from simulator.policies.predictor import KINDS as PREDICTORS
from simulator.scenario.validate import block_class
from simulator.schedulers.vllm.scheduler import Scheduler
from simulator.util.config import Named
from simulator.util.errors import Key
from simulator.util.from_mapping import as_plain, keys_of
from simulator.workload.distributions import KINDS, Distribution, Fixed
from simulator.workload.generate import Adapters, Generator
from simulator.workload.multimodal import Multimodal
from simulator.workload.sessions import PrefixGroups, Sessions

GOODPUT_TAIL = """
`goodput: {ttft: 1000, client batch: {e2el: 600000}}`: a key `client NAME`, `priority N` or `model
NAME` replaces the general bounds for these requests; of several keys the first counts. If
there is no `slo`, 99 % of each must keep them.
"""
PAGE_HEAD = """# Scenario reference

Which keys may a scenario file have? All below, each as `key: default` (values): meaning.
No number may be negative, and 0 only if 0 makes sense. A count is whole. `null`
means none, or no limit, unless the key says more.

A GB is 10^9 bytes. `1e-3` and `inf` are numbers; anchors (`&`, `*`) are not supported. A scenario
may name code: do not run a stranger's ([SECURITY.md](../SECURITY.md)).
[Commands](commands.md#scenarios-on-the-command-line) says how paths are found.
"""
NOTHING = re.compile(r"(, see below)?; null: (none|no limit)(?= \(|$)|, see below(?=;|$)")
POLICIES_HEAD = """## engine.scheduling_policy

A name, or `{policy: NAME, argument: value}`, with defaults in brackets; or a class of your own,
`{policy: package.module:Class, ...}`.
"""
PREDICTORS_HEAD = """## predictor

A kind, or `{kind: ..., ...}`, with defaults in brackets. Errors depend on `seed` and the request's
number alone.
"""
GENERATOR_HEAD = """Headway generates requests, in the words of `vllm bench serve`, if there is
no `trace`.
A trace also takes `max_concurrency`, `clients`, `priorities`, `max_tokens`, `models`, `adapters`
and `multimodal`.
"""
INTRODUCTIONS = {
    "workload.trace": """\
`workload.columns`, beside `trace`, names the columns of a format of your own
([workloads.md](workloads.md)).
""",
    "workload.frontend": """\
The delay of a request before the scheduler. `frontend: client` is as vLLM's clients see it,
`frontend: server` by the server's own clock. `client_latency`, in s, is `latency` alone.
""",
    "cluster": """\
Several replicas of the engine ([fleet.md](fleet.md)).
""",
}
ROUTERS_HEAD = """### Routers

Arguments have their default in brackets:
"""
COSTS_HEAD = """## cost

`{profile: NAME}` takes a shipped profile, `{profile: PATH}` your own. The engine's overheads
(`simulator/costs/overheads.yaml`, by `engine.version`) come on top. `overhead: vllm` adds them to a
profile that lacks them; `overhead: {host_per_sequence: 2e-5}` changes terms, in s.
`{kind: ...}` defines a cost model by its terms in seconds, 0 by default; `base` and `dense` are
required. A step has T tokens and n sequences, and its decodes read S cached tokens.
"""
COST_TEXTS = {
    "linear": "Seconds = base + per_token T + per_context S + per_sequence n.",
    "piecewise": "The [form](cost-models.md#the-form) of the shipped profiles, which `headway "
    "profile show NAME` prints. `dense` is a list of [tokens, seconds]. A step of decodes costs "
    "what the next of `cudagraph_capture_sizes` costs, one with prompts that of `graph_mixed`.",
    "piecewise-split": "Besides, a step that decodes waits `per_key` for each key of its longest "
    "sequence, or of an even share of all keys; on RTX GPUs for keys `beyond_mean` "
    "(`simulator/costs/split.py`).",
    "roofline": "From the model's sizes and the GPU's data sheet, at the efficiency of measured "
    "kernels.",
}
DISTRIBUTIONS_HEAD = """## Distributions

A length or a time is a number, or `{kind: ..., ...}` with the fields of the kind:
"""


def page() -> str:
    """Make the page."""
    parts = [
        PAGE_HEAD,
        _section("Top level", _block_keys(())),
        _blocks("gpu", "gpu.power", "engine"),
        _blocks("engine.speculative_config", "engine.speculative_config.draft"),
        _blocks("engine.multimodal_config", "host"),
        _list(POLICIES_HEAD, _policies()),
        _list(PREDICTORS_HEAD, _kinds(PREDICTORS)),
        _blocks("goodput") + GOODPUT_TAIL,
        _blocks("workload.trace"),
        _section("workload", _dataclass_keys(Generator), GENERATOR_HEAD),
        _blocks("workload.frontend"),
        _section("workload.prefix_groups", _dataclass_keys(PrefixGroups)),
        _section("workload.sessions", _dataclass_keys(Sessions)),
        _section("workload.adapters", _dataclass_keys(Adapters)),
        _section("workload.multimodal.image", _dataclass_keys(Multimodal)),
        _blocks("cluster", "cluster.groups.NAME"),
        _blocks("cluster.kv_transfer", "cluster.ec_transfer", "cluster.admission"),
        _blocks("cluster.client", "cluster.failures", "cluster.failures.outages"),
        _blocks("cluster.autoscaling"),
        _list(ROUTERS_HEAD, _routers()),
        _blocks("plan", "sweep", "sweep.random", "sweep.random.keys", "rollouts"),
        _list(COSTS_HEAD, _costs()),
        _list(DISTRIBUTIONS_HEAD, _kinds(KINDS)),
    ]
    return "\n".join(parts)


def _list(head: str, items: Iterator[str]) -> str:
    return "\n".join([head, *items, ""])


def _section(title: str, keys: Iterator[str], words: str = "") -> str:
    return "\n".join([f"## {title}", "", *([words] if words else []), *keys, ""])


def _blocks(*names: str) -> str:
    """List the keys of blocks; of one item, where there is a list or a mapping of them."""
    return "\n".join(
        _section(name, _block_keys(tuple(name.split("."))), INTRODUCTIONS.get(name, ""))
        for name in names
    )


def _block_keys(key: Key) -> Iterator[str]:
    """List the keys of the block at a key."""
    block = block_class(key) or block_class((*key, "each"))
    assert block is not None
    for name, field in block.model_fields.items():
        if not hasattr(field.annotation, "model_fields"):
            values = " ".join(filter(None, [_values(field.kind), _bounds(field.limits)]))
            yield _key(name, field.default, values, field.description or "")


def _key(name: str, default: object, values: str, meaning: str) -> str:
    """Show a key as YAML has it, with its default, and what it takes and means."""
    required = default is dataclasses.MISSING
    shown = name if required else f"{name}: {_yaml(as_plain(default))}"
    plain = "boolean|integer|list|mapping|number|text"
    values = re.sub(rf"^({plain})( (?=[≥>\d])|$)", "", values)
    named = re.findall(r"`([^`]+)`", values)
    if len(named) > 12 or (named and all(n == default or f"{n}:" in meaning for n in named)):
        values = ""
    taken = ", ".join(filter(None, [values, "required" if required else ""]))
    return f"- `{shown}`{taken and f' ({taken})'}: {NOTHING.sub('', meaning)}"


def _values(kind: Any) -> str:
    """Name what a type takes in YAML's words."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) in {Union, UnionType}:
        inner = (part for part in get_args(kind) if part is not type(None))
        both = " or ".join(_values(part) for part in inner)
        return " or ".join(dict.fromkeys(both.split(" or ")))
    if get_origin(kind) in {Sequence, list, tuple}:
        return "list"
    if hasattr(kind, "__metadata__"):
        limits = (_bounds(note.limits) for note in kind.__metadata__ if hasattr(note, "limits"))
        return " ".join(filter(None, [_values(kind.__origin__), *limits]))
    words: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "boolean"}
    words |= {Distribution: "distribution", Named: ""}
    return words.get(kind, "mapping")


def _bounds(limits: Mapping[str, Any]) -> str:
    """Write down the bounds, but for 0 and 1 below, and for large ones, which refuse slips."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    at = {k: f"{v:,}" for k, v in limits.items() if k in signs and v < 100_000}
    if {*at} <= {"ge", "gt"} and all(limits[k] <= 1 for k in at):
        return ""
    if "ge" in at and "le" in at:
        return f"{at['ge']} to {at['le']}".replace(".0", "")
    return ", ".join(f"{signs[name]}{limit}" for name, limit in at.items())


def _dataclass_keys(cls: type) -> Iterator[str]:
    """List the fields of a dataclass as keys."""
    for name, field in keys_of(cls).items():
        default = field.default.value if isinstance(field.default, Fixed) else field.default
        yield _key(name, default, _values(field.kind), field.description)


def _policies() -> Iterator[str]:
    """List the policies with the arguments that are not keys of the engine."""
    engine = {*inspect.signature(Scheduler).parameters}
    for name, cls in POLICIES.items():
        yield f"- `{name}`{_arguments(cls, engine)}: {_first_paragraph(cls)}"


def _routers() -> Iterator[str]:
    """List the routers with their arguments."""
    for name, cls in ROUTERS.items():
        yield f"- `{name}`{_arguments(cls)}: {_first_paragraph(cls)}"


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def _arguments(cls: type, without: Collection[str] = ()) -> str:
    """List the arguments of a constructor, with their defaults in brackets."""
    defaults = {
        name: "the scenario's" if one.default is inspect.Parameter.empty else _yaml(one.default)
        for name, one in signature(cls).parameters.items()
        if name not in without
    }
    return "".join(f", `{key}` ({text})" for key, text in defaults.items())


def _costs() -> Iterator[str]:
    """List the kinds of cost models with the terms that a scenario may give."""
    piecewise = {field.name for field in dataclasses.fields(FORMS["piecewise"])}
    for name, meaning in COST_TEXTS.items():
        keys = _keys(FORMS[name], piecewise).replace(" (0.0)", "") if name in FORMS else ""
        yield f"- `{name}`{keys}: {meaning}"


def _kinds(kinds: Mapping[str, type]) -> Iterator[str]:
    """List the kinds of distributions, or of predictors."""
    for name, cls in kinds.items():
        yield f"- `{name}`{_keys(cls, set())}: {(cls.__doc__ or '').splitlines()[0]}"


def _keys(cls: type, without: set[str]) -> str:
    """List the fields of a dataclass, needed ones first, with their defaults in brackets."""
    fields = [f for f in dataclasses.fields(cls) if f.init and f.name not in without]
    texts = {
        f.name: "" if f.default is dataclasses.MISSING else f" ({_yaml(f.default)})" for f in fields
    }
    return "".join(
        f", `{name}`{texts[name]}" for name in sorted(texts, key=lambda n: texts[n] != "")
    )


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


if __name__ == "__main__":
    print(page(), end="")
