"""What an engine adds to its kernels: one model per engine version, from `overheads.yaml`.

A step keeps the GPU waiting for `step` seconds whatever happens: the launch of its graph, sampled
tokens on their way back. The host's own work, `host` and its terms per sequence, per prompt in the
step and per token of prompts, is waited for too, unless the engine schedules asynchronously: then
it is hidden behind the kernels, and only what is longer than these shows.

vLLM launches pure decodes as CUDA graphs of certain batch sizes, 1, 2, 4, then every 8 and from 256
on every 16 (0.11 on), and pads smaller batches; `captured` is the largest of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import yaml

from simulator.fields import build, inside, refuse
from simulator.linear import check_terms
from simulator.piecewise import HOST_TERMS, LONGEST_TABLE, PiecewiseCost

FILE = Path(__file__).parent / "overheads.yaml"
DEFAULT = "vllm"
TERMS = ("step", *HOST_TERMS)


@dataclass(frozen=True)
class Overhead:
    """Seconds that an engine adds to a step's kernels; zero where nobody knows."""

    step: float = 0.0
    host: float = 0.0
    host_per_sequence: float = 0.0
    host_per_prefill: float = 0.0
    host_per_prefill_token: float = 0.0
    captured: int = 0  # 0: no CUDA graphs

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The batches of pure decodes that have a CUDA graph."""
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, self.captured + 1, 16)]
        return tuple(size for size in sizes if size <= self.captured)

    def on(self, cost: PiecewiseCost, *, overlapped: bool) -> PiecewiseCost:
        """Put it on top of a cost of kernels alone."""
        return replace(
            cost,
            overhead=cost.overhead + self.step,
            host=self.host,
            host_per_sequence=self.host_per_sequence,
            host_per_prefill=self.host_per_prefill,
            host_per_prefill_token=self.host_per_prefill_token,
            overlapped=overlapped,
            cudagraph_capture_sizes=self.capture_sizes,
        )


@lru_cache(maxsize=1)
def overheads() -> dict[str, Overhead]:
    """Read the models that come with the package, by engine version."""
    known = {field.name for field in fields(Overhead)}
    raw = yaml.safe_load(FILE.read_text())
    return {
        name: Overhead(**{key: value for key, value in terms.items() if key in known})
        for name, terms in raw.items()
    }


def choose_overhead(given: object, own: str | None) -> Overhead | None:
    """Find what `cost.overhead` stands for; None where neither it nor `own` names an engine.

    `given` is a name, a mapping of terms that replace those of the engine `own` (without one: those
    that are left out are 0), or None: `own` itself. ValueError says which term is wrong.
    """
    known = overheads()
    base = known.get(own) if own is not None else None
    if given is None:
        return base
    if isinstance(given, str):
        if wrong := unknown_overhead(given):
            raise ValueError(f"overhead: {wrong}")
        return known[given]
    try:
        terms = build(Overhead, given)
        refuse(
            *check_terms(terms, TERMS),
            (terms.captured < 0, f"captured: must be at least 0, not {terms.captured}"),
            (terms.captured > LONGEST_TABLE, f"captured: must be at most {LONGEST_TABLE:,}"),
        )
    except ValueError as error:
        raise inside("overhead", error) from None
    assert isinstance(given, Mapping)  # else `build` has refused it
    return replace(base or Overhead(), **{key: getattr(terms, key) for key in given})


def unknown_overhead(name: str) -> str:
    """Say which names there are, for one that is none; "" for one that is."""
    known = overheads()
    return "" if name in known else f"no engine {name!r}; there are {', '.join(known)}"
