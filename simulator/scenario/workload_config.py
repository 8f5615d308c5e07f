"""The block `workload` of a scenario: a trace or a generator, and the way to the scheduler."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from simulator.util.config import Config, Count, PositiveFloat
from simulator.util.errors import FieldError, MappingError
from simulator.util.from_mapping import Field, as_plain, from_mapping
from simulator.util.yaml_lines import Block
from simulator.workload.generate import Generator
from simulator.workload.select import Selection
from simulator.workload.workload import FRONTENDS, Frontend

TRACES = Path(__file__).parents[1] / "workload" / "traces"
BESIDE_TRACE = ("clients", "priorities", "max_tokens", "adapters", "models", "multimodal")
"""Keys of a generator that may stand beside a trace, too."""

READ_OPTIONS = {"time_unit", "hash_block_size", "session_turns", "chars_per_token"}
READ_OPTIONS |= {"lanes", "encoding", "result"}
"""Keys of a trace that say how to read it; the others say which part to take."""

FORMATS = tuple(re.findall(r"(?m)^(\w+):", (TRACES / "formats.yaml").read_text("utf-8")))
"""The names of its rows alone take 0.2 ms of CPU, the whole table 6 ms, in each start."""

Milliseconds = Annotated[float, Field(ge=0, le=1e9)]


class TraceConfig(Selection):
    """A published trace, and the part of it to play."""

    path: str = Field(description="the file, plain or packed (gzip, bz2, xz, zip, zstd)")
    format: Literal[FORMATS] | None = Field(  # type: ignore[valid-type]
        None, description="a format of workloads.md; null: by how the file begins"
    )
    time_unit: Literal["s", "ms"] | None = Field(
        None, description="of timestamps; null: ms for mooncake, s for timed_trace"
    )
    hash_block_size: Count | None = Field(
        None, description="tokens of a hash id; null: 512, timed_trace: 16"
    )
    session_turns: Literal["delta", "whole"] | None = Field(
        None, description="a later turn has its new tokens, or the whole prompt; null: delta"
    )
    chars_per_token: PositiveFloat | None = Field(
        None, description="characters of a token, for texts of custom and sharegpt"
    )
    encoding: str | None = Field(None, description="as cp1252; null: UTF-8, or by byte-order mark")
    result: Count | None = Field(
        None, description="which benchmark of several in a file, from 1 on"
    )
    lanes: Count | None = Field(
        None, description="agents at once (dynamo, weka, agentic_mooncake); null: as recorded"
    )


class FrontendConfig(Config):
    """Network, HTTP and tokenizer; a name stands for one that was measured."""

    latency: Milliseconds = Field(0.0, description="ms for each request, whatever others do")
    per_request: Milliseconds = Field(
        0.0, description="ms by which each request delays the next ones"
    )
    per_token: Milliseconds = Field(0.0, description="ms of the same delay for each prompt token")

    def _open(self, raw: Any) -> Any:
        if not isinstance(raw, str):
            return super()._open(raw)
        if raw not in FRONTENDS:
            what = f"no frontend {raw!r}; there are {', '.join(FRONTENDS)}, or give latency, "
            raise MappingError("", f"{what}per_request and per_token", "value")
        found = FRONTENDS[raw]
        return {key: getattr(found, key) * 1e3 for key in self.model_fields}

    def make(self) -> Frontend:
        """Return the frontend, in seconds."""
        return Frontend(self.latency / 1e3, self.per_request / 1e3, self.per_token / 1e3)


class WorkloadConfig(Config):
    """A trace, or else the keys of a generator (`simulator.workload.generate.Generator`)."""

    trace: TraceConfig | None = Field(None, description="a trace to play; null: generate")
    columns: str | dict[str, str] | None = Field(
        None,
        description="which column of the trace has what, where no format is known: arrival, "
        "prompt, output, client, model, priority, max_tokens; arrival=timestamp:ms,prompt=.. or a "
        "mapping",
    )
    max_concurrency: Count | None = Field(
        None, description="requests sent and unfinished, at most; null: no limit"
    )
    client_latency: Annotated[float, Field(ge=0, le=60)] = Field(
        0.0, description="s between a client and the scheduler, the way back included"
    )
    frontend: FrontendConfig | None = Field(
        None,
        description="in place of it: client, server (vLLM's, as timed by its clients or by itself) "
        "or a mapping; null: requests reach the scheduler as they are sent",
    )

    _given: Block
    _generator: Generator

    @property
    def given(self) -> Block:
        """The keys of a generator that were given."""
        return self._given

    def _read_others(self, values: Block) -> list[FieldError]:
        self._given = values
        return []

    def _check(self) -> None:
        if self.frontend is not None and self.client_latency:
            raise MappingError("client_latency", "give it as frontend.latency, in ms")
        if self.columns is not None:
            self._check_columns()
        others = [key for key in self.given if key not in BESIDE_TRACE]
        if self.trace is not None and others:
            known = ", ".join([*type(self).model_fields, *BESIDE_TRACE][1:])
            what = f"a trace has requests of its own; keys beside trace are {known}"
            if not others[1:]:
                raise MappingError(others[0], what)
            whole = f"--set 'workload={{trace: {{path: {self.trace.path}}}}}'"
            what = f"has requests of its own, without {', '.join(others)}"
            raise MappingError("trace", f"{what}; a command replaces these by {whole}")
        keys = self.given | {"max_concurrency": self.max_concurrency}
        self._generator = from_mapping(Generator, keys)

    def _check_columns(self) -> None:
        from simulator.workload.traces.fields import parse_columns

        if self.trace is None or self.trace.format is not None:
            raise MappingError("columns", "need a trace that names no format")
        assert self.columns is not None
        parse_columns(self.columns)

    @property
    def reading(self) -> dict[str, Any]:
        """What is said of how to read the trace, by option."""
        told = {key: value for key, value in self.trace or () if key in READ_OPTIONS}
        told["columns"] = self.columns
        return {key: value for key, value in told.items() if value is not None}

    def make_frontend(self) -> Frontend | None:
        """Return what requests pass before the scheduler."""
        if self.frontend is not None:
            return self.frontend.make()
        return Frontend(latency=self.client_latency) if self.client_latency else None

    @property
    def generator(self) -> Generator:
        """The generator that the keys describe; beside a trace, what `BESIDE_TRACE` says."""
        return self._generator

    def generator_keys(self) -> Block:
        """Return all keys of the generator with their values, blocks as they were given."""
        values = {field.name: getattr(self._generator, field.name) for field in fields(Generator)}
        words = {k: v for k, v in self.given.items() if not isinstance(values[k], int | float)}
        return {**values, **as_plain(words)}
