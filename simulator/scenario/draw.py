"""From a scenario to its requests: a trace is read, and what it leaves open is drawn."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from simulator.models.load import shipped_name
from simulator.scenario.scenario import Scenario
from simulator.scenario.workload_config import TraceConfig
from simulator.util.errors import HeadwayError, MappingError
from simulator.util.files import resolve
from simulator.workload.distributions import TraceReader
from simulator.workload.generate import (
    draw_clients,
    draw_max_tokens,
    draw_names,
    generate,
    random_streams,
)
from simulator.workload.multimodal import MultimodalDraws, insert
from simulator.workload.select import select, select_pieces
from simulator.workload.unused import (
    has_media,
    warn_of_adapters,
    warn_of_images,
    warn_of_limits,
    warn_of_models,
)
from simulator.workload.workload import Workload

TRACE_OPTION = "--set workload.columns="  # by which columns of a trace are given


def make_workload(scenario: Scenario) -> Workload:
    """Read the trace or generate the requests; HeadwayError names what is wrong."""
    config = scenario.workload
    if config.trace is None:
        with _blaming(scenario, "workload"):
            workload = generate(config.generator, scenario.seed, trace_reader(scenario))
    else:
        workload = _read(scenario, config.trace)
    workload.frontend = config.make_frontend()
    settle_models(scenario, workload)
    for own in scenario.groups.values():
        warn_of_limits(workload, own.engine)
    return workload


def trace_reader(scenario: Scenario) -> TraceReader:
    """Return what reads the traces that the workload of a scenario names."""

    def read(path: str, form: str | None, **options: Any) -> Workload:
        from simulator.workload.traces import read_trace  # many formats, for nothing elsewhere

        place = resolve(path, scenario.folder)
        with _blaming(scenario, "workload.trace"):
            return read_trace(place, form, **options, option=TRACE_OPTION)

    return read


def settle_models(scenario: Scenario, workload: Workload) -> None:
    """Let requests for an engine's own model ask for no adapter; none where there are none."""
    if served := scenario.models:
        asked = workload.model or [""]
        if unknown := [name for name in asked if name not in served]:
            what = f"a request asks for {unknown[0] or 'no model'}"
            wrong = f"{what}; the groups serve {', '.join(dict.fromkeys(served))}"
            raise scenario.error_at("workload.models", MappingError("", wrong))
        return
    _given(scenario, "models", "needs cluster.groups of different models")
    if workload.model is None:
        return
    source, known = workload.source, scenario.known_model
    if any(own.engine.enable_lora for own in scenario.groups.values()):
        names = {known, getattr(scenario.model, "name", scenario.model), "base"}
        if shipped := shipped_name(known):
            names |= {name for name in {*workload.model} if shipped_name(name) == shipped}
        workload.model = ["" if name in names else name for name in workload.model]
        config = scenario.workload
        drawn = config.generator.adapters or config.generator.models
        if config.trace is not None and drawn is None:
            warn_of_adapters(source, workload.model, known)
    else:
        _given(scenario, "adapters", "needs engine.enable_lora: true")
        warn_of_models(source, workload.model)
        workload.model = None


def trace_pieces(scenario: Scenario) -> Callable[[], Iterator[Workload]] | None:
    """Return what reads the trace a piece at a time; None where it is to be read whole."""
    config = scenario.workload
    trace = config.trace
    if trace is None or config.generator.multimodal is not None:
        return None
    from simulator.workload.traces.read import comes_in_pieces, read_pieces

    path, form, reading = resolve(trace.path, scenario.folder), trace.format, config.reading
    with _blaming(scenario, "workload.trace"):
        if not comes_in_pieces(path, form, reading, TRACE_OPTION):
            return None
    return lambda: select_pieces(lambda: read_pieces(path, form, reading, TRACE_OPTION), trace)


def finish_parts(scenario: Scenario, parts: Iterator[Workload]) -> Iterator[Workload]:
    """Yield the parts of a trace with what `make_workload` adds to the whole."""
    rng, frontend = random_streams(scenario.seed), scenario.workload.make_frontend()
    for part in parts:
        part.frontend = frontend
        _fill_in(scenario, part, rng)
        yield part


def _fill_in(scenario: Scenario, part: Workload, rng: Mapping[str, np.random.Generator]) -> None:
    """Say of a trace, or of a part of one, what can be drawn request by request."""
    part.max_concurrency = scenario.workload.max_concurrency
    _draw_clients(scenario, part, rng["clients"])
    _draw_max_tokens(scenario, part, rng["max_tokens"])


def _read(scenario: Scenario, trace: TraceConfig) -> Workload:
    """Read the part of the trace that is asked for, and draw what it does not say."""
    config, read = scenario.workload, trace_reader(scenario)
    workload = select(read(trace.path, trace.format, **config.reading), trace)
    rng = random_streams(scenario.seed)
    _fill_in(scenario, workload, rng)
    _draw_adapters(scenario, workload, rng["models"])
    _draw_multimodal(scenario, workload, rng["multimodal"])
    return workload


def _given(scenario: Scenario, key: str, wrong: str, *, refused: bool = True) -> Any:
    """Return what `workload` has under a key, or None; HeadwayError where that is refused."""
    value = getattr(scenario.workload.generator, key)
    if value is not None and refused:
        raise scenario.error_at(f"workload.{key}", MappingError("", wrong))
    return value


@contextmanager
def _blaming(scenario: Scenario, key: str) -> Iterator[None]:
    """Say of what is wrong with values that are drawn where the block at a key is."""
    try:
        yield
    except HeadwayError:
        raise
    except ValueError as error:
        raise scenario.error_at(key, error) from None


def _draw_clients(scenario: Scenario, workload: Workload, rng: np.random.Generator) -> None:
    """Name the clients of a trace that names none; HeadwayError if it does."""
    wrong = "the trace names the client of each request itself"
    clients = _given(scenario, "clients", wrong, refused=workload.client is not None)
    if clients is not None:
        priorities = scenario.workload.generator.priorities
        draw_clients(workload, workload.sessions(), clients, priorities, rng)


def _draw_adapters(scenario: Scenario, workload: Workload, rng: np.random.Generator) -> None:
    """Draw the adapters that requests of a trace ask for; HeadwayError if it names them."""
    key = "adapters" if scenario.workload.generator.models is None else "models"
    wrong = "the trace names the model of each request itself"
    given = _given(scenario, key, wrong, refused=workload.model is not None)
    if given is not None:
        weights = getattr(given, "weights", given)
        workload.model = draw_names(workload.sessions(), weights, rng)


def _draw_multimodal(scenario: Scenario, workload: Workload, rng: np.random.Generator) -> None:
    """Draw the images and clips of a trace's prompts; its tokens are those of the texts."""
    wrong = "the trace tells the images of each request itself"
    _given(scenario, "multimodal", wrong, refused=has_media(workload))
    wrong = "needs a trace whose requests do not continue one another"
    given = _given(scenario, "multimodal", wrong, refused=workload.after is not None)
    if given is None:
        warn_of_images(workload.source, workload.images)
        return
    draws = MultimodalDraws(given, rng, trace_reader(scenario))
    with _blaming(scenario, "workload.multimodal"):
        media, more = draws.draw(0, len(workload), workload.images)
    insert(workload, media, more)


def _draw_max_tokens(scenario: Scenario, workload: Workload, rng: np.random.Generator) -> None:
    """Say how long the answers of a trace may be that does not; HeadwayError if it does."""
    wrong = "the trace says the max_tokens of its requests itself"
    given = _given(scenario, "max_tokens", wrong, refused=workload.max_tokens is not None)
    if given is not None:
        with _blaming(scenario, "workload"):
            read = trace_reader(scenario)
            workload.max_tokens = draw_max_tokens(given, len(workload), rng, read)
