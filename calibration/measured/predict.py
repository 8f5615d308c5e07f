"""Simulate measured runs: on shipped costs, on some composed of tables, or by roofline."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite, nan, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from calibration.measured.compare import Outcome, compare, compare_gauges, completed_means
from calibration.measured.engine import (
    assumptions,
    check_supported,
    cluster_block,
    engine_block,
    expert_kernel,
    gpu_name,
    model_name,
)
from calibration.measured.requests import Requests, read_requests
from calibration.measured.runs import Run, parse_cells, read_runs, select_runs, unread_cells
from calibration.measured.workload import (
    ROUNDS,
    UNTOLD_RATIO,
    draw_from_pool,
    first_wave,
    frontend,
    generate,
    limit_patience,
    read_config,
    replay,
    tells_lengths,
)
from calibration.text_files import read_json, read_rows
from headway.planning.knee import find_knee
from headway.planning.sensitivity import (
    LESS_CACHE,
    changed_costs,
    greedy_cost,
    other_experts,
    sensitivities,
    unexplained,
)
from headway.report.whole_runs import judged
from headway.twin.measured_run import lateness_notes
from simulator.build.assemble_scheduler import make_scheduler
from simulator.build.engine_spec import EngineSpec
from simulator.core.alarm import FastEnvironment
from simulator.core.engine_config import EngineConfig
from simulator.costs.profile import shipped_profiles
from simulator.engine.replica import make_replica
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.results.run_info import engines_of
from simulator.scenario.load import check_scenario
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.simulation.result import Result
from simulator.simulation.run import play, run
from simulator.util.errors import HeadwayError, HeadwayWarning
from simulator.util.workers import WorkerDied, parallel_map
from simulator.util.yaml_lines import SourceMap
from simulator.workload.traces.fields import parse_columns
from simulator.workload.unused import warn_of_images, warn_of_models
from simulator.workload.workload import Frontend, Workload

ROOFLINE = "roofline"
SMALLER = "if it is smaller, requests wait or are preempted: kv_capacity_tokens has its own"
FOUR_BIT_SPEEDUP = 3.0  # over 8 bits: B300's data sheet; others' say 2 or none
EIGHT_BIT_SPEEDUP = 2.0  # over 16 bits
Compose = Callable[[EngineSpec, EngineConfig], EngineSpec]
"""Puts another cost in place of a run's own, as one of published tables in place of a roofline."""
POLLS = ("server.csv.gz", "timeseries.csv.gz", "metrics.csv")
"""Files of gauges beside a run's requests, the first that is there taken; the last is that of
`headway replay`, on the clock of its requests."""


def validate_measured(
    folder: Path,
    wanted: Sequence[str] = (),
    *,
    sensitivity: bool = False,
    profile: str | None = None,
    cells: Sequence[str] = (),
    compose: Compose | None = None,
    done: Callable[[int, int, Outcome], None] | None = None,
    **reading: Any,
) -> list[Outcome]:
    """Predict the runs of DIR/runs.csv, or those that are named; in the order of the file.

    `sensitivity` asks how far each moves with what is not known of it, up to ten more simulations;
    `reading` says how the files of requests are read, as `read_trace` does. `profile`, a shipped
    one's name, a path or ROOFLINE, is the cost of all of them, in place of their own; `cells`, as
    `prompt_pool=100`, stand in runs.csv where a row's own is empty. `compose` gives each run its
    cost anew.
    `done(runs done, runs in all, outcome)` is called as they get done. HeadwayError
    where runs.csv is at fault or does not have a run; what is wrong with one run alone is told in
    its `reason`.
    """
    if reading.get("columns") is not None:
        parse_columns(reading["columns"])
    runs = select_runs(read_runs(folder, parse_cells(cells)), list(wanted), folder)
    if profile is not None and profile not in (ROOFLINE, *shipped_profiles()):
        if not Path(profile).is_file():
            raise HeadwayError(f"--profile {profile}: no such file and no shipped profile")
        profile = str(Path(profile).resolve())
    one = partial(
        predict,
        folder=folder,
        sensitivity=sensitivity,
        reading=reading,
        profile=profile,
        compose=compose,
    )
    found = [Outcome(run) for run in runs]
    each = parallel_map(one, runs) if len(runs) > 1 else ((0, one(run)) for run in runs)
    for number, (index, outcome) in enumerate(each, 1):
        if isinstance(outcome, WorkerDied):
            found[index].reason = outcome.reason
        else:
            found[index] = outcome
        if done is not None:
            done(number, len(runs), found[index])
    return found


def predict(
    run: Run,
    folder: Path,
    *,
    sensitivity: bool = False,
    reading: Mapping[str, Any] = MappingProxyType({}),
    profile: str | None = None,
    compose: Compose | None = None,
) -> Outcome:
    """Simulate a run and compare; a run that cannot be simulated comes back with the reason.

    `profile` is a cost in place of the run's own, `compose` as in `validate_measured`.
    """
    outcome = Outcome(run, reason="; ".join(run.faults))
    if run.faults:
        return outcome
    outcome.notes += run.remarks
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _predict(outcome, folder, sensitivity, reading, profile=profile, compose=compose)
        outcome.notes += list(dict.fromkeys(str(warning.message) for warning in caught))
    except (HeadwayError, ValueError) as error:
        outcome.reason = "; ".join(str(error).split("\n"))
    except Exception as error:  # one run must not take the others with it
        outcome.reason = f"{type(error).__name__}: {error}"
    return outcome


def _predict(
    outcome: Outcome,
    folder: Path,
    sensitivity: bool,
    reading: Mapping[str, Any],
    *,
    profile: str | None,
    compose: Compose | None,
) -> None:
    run = outcome.run
    check_supported(run)
    outcome.notes += assumptions(run)
    path = find_requests_file(folder, run.word("per_request_file"))
    patience = run.number("timeout_s")
    requests = None
    if path is not None:
        requests = read_requests(path, failed=True, timeout=patience, **reading)
    workload, before = _make_workload(run, requests, path)
    outcome.notes += _told_beside(path)
    scenario, spec = assemble_run(run, folder, profile)
    if not _in_lock_step(scenario, spec):
        spec = (compose or _warn_of_roofline)(spec, scenario.engine)
    workload.frontend = _fitted_frontend(profile) or frontend(run)
    limit_patience(workload, patience)
    outcome.profile = spec.cost.name or "?"
    outcome.engine = _describe_rules(scenario, spec)
    result = _simulate(scenario, spec, workload)
    compare(outcome, result, requests, before)
    peak = max(log.steps["blocks_used"].max(initial=0) / log.num_blocks for log in result.logs)
    if run.count("kv_capacity_tokens") is None and peak > LESS_CACHE:
        outcome.notes.append(f"the KV cache is {peak:.0%} full by its computed size; {SMALLER}")
    if idle := unread_cells(run):
        outcome.notes.append(f"cells without effect on this run: {', '.join(idle)}")
    knee = find_knee(result, recorded=True)
    outcome.load = None if knee is None else knee.as_summary()
    cold = before + int(requests is not None and requests.timed)  # the first is not compared
    means = completed_means(result, cold)
    outcome.computed = means["computed"]
    measured = {row.metric: row.measured for row in outcome.rows if isfinite(row.measured)}
    if requests is None:
        rate = closed_loop_rate(run, measured, means["output"])
        measured["request_throughput"] = max(rate, measured.get("request_throughput", 0.0))
    outcome.impossible = why_impossible(
        measured,
        spec.model,
        spec.gpu,
        scenario.engine,
        servers=(run.count("replicas") or 1) * scenario.engine.data_parallel_size,
        clients=None if run.number("rate_rps") else run.count("concurrency"),
        computed=means["computed"],
        output=means["output"],
    )
    if sensitivity and not _in_lock_step(scenario, spec):
        other = None
        if requests is None:
            other = draw_from_pool(run, generate(run, seed=1, spread=UNTOLD_RATIO))
            other[0].frontend = workload.frontend
            limit_patience(other[0], patience)
        changed = _changed(run, scenario, spec, (workload, cold), other)
        metrics = [metric for metric in means if metric.endswith("_ms")]
        more = unexplained(
            means,
            spec,
            metrics,
            drawn=requests is None and workload.max_concurrency is not None,
            told=run.count("max_num_batched_tokens") is not None,
            alike=not tells_lengths(run),
            first=first_wave(workload),
        )
        outcome.sensitivity = sensitivities(means, changed, more, metrics)
        outcome.notes += _unjudged(scenario)
    if len(result.logs) > 1:
        return  # polls of several engines are not told apart
    polls = next((found for name in POLLS if (found := sibling_file(path, name))), None)
    if polls is not None:
        compare_gauges(outcome, result, polls, same_clock=polls.name.endswith(POLLS[-1]))


def _unjudged(scenario: Scenario) -> list[str]:
    """Return a note where no measured run has judged intervals of such a GPU or engine."""
    lacking = [name for name, errors in judged(engines_of(scenario)).items() if not errors]
    told = f"95 % intervals may be too narrow: none was judged with {'; '.join(lacking)}"
    return [told] * bool(lacking)


def _make_workload(run: Run, requests: Requests | None, path: Path | None) -> tuple[Workload, int]:
    """Return a run's requests, and how many of the first only fill the prefix cache."""
    if requests is None:
        workload, before = draw_from_pool(run, generate(run))
    else:
        before = 0
        workload = replay(run, requests, read_config(sibling_file(path, "config.json")))
    workload.check()
    warn_of_images(workload.source, workload.images)
    warn_of_models(workload.source, workload.model or ())
    workload.model = None  # the run's one serves all
    return workload, before


def _changed(
    run: Run,
    scenario: Scenario,
    spec: EngineSpec,
    load: tuple[Workload, int],
    other: tuple[Workload, int] | None,
) -> dict[str, dict[str, Any]]:
    """Return what a run's means become by each change of what is not known; see `sensitivities`.

    A load is a workload, and how many of its first requests are no part of the run; `other` is
    drawn anew.
    """
    costs = changed_costs(spec.cost) | greedy_cost(spec) | other_experts(scenario)
    specs = {name: replace(spec, cost=cost) for name, cost in costs.items()}
    if run.count("kv_capacity_tokens") is None:
        blocks = max(int(LESS_CACHE * spec.num_gpu_blocks), 1)
        specs["KV low"] = replace(spec, num_gpu_blocks=blocks)
    cases = {name: (one, *load) for name, one in specs.items()}
    if other is not None:
        cases["requests drawn"] = spec, *other
    return {
        name: completed_means(_simulate(scenario, one, workload), before)
        for name, (one, workload, before) in cases.items()
    }


def _warn_of_roofline(spec: EngineSpec, engine: EngineConfig) -> EngineSpec:
    """Warn where no profile is shipped of a run's engine."""
    if spec.cost.name.startswith(ROOFLINE):
        name = f"{spec.model.name} on {spec.gpu.name}, TP {engine.tensor_parallel_size}"
        warnings.warn(f"no profile of {name}; roofline", HeadwayWarning, stacklevel=2)
    return spec


def _simulate(scenario: Scenario, spec: EngineSpec, workload: Workload) -> Result:
    """Send the workload to the engine, or to the replicas of a data-parallel one."""
    if scenario.cluster is not None:
        cost = None if _in_lock_step(scenario, spec) else spec.cost
        return run(scenario, workload=workload, cost=cost).whole()
    scheduler = make_scheduler(spec, workload.segments is not None)
    replica = make_replica(FastEnvironment(), scheduler, spec.cost)
    return play(scenario, spec, workload, replica).whole()


def _in_lock_step(scenario: Scenario, spec: EngineSpec) -> bool:
    """Return whether ranks share experts: what that costs is put together with the ranks alone."""
    return scenario.engine.data_parallel_size > 1 and spec.model.num_experts > 0


def assemble_run(
    run: Run, folder: Path = Path(), profile: str | None = None
) -> tuple[Scenario, EngineSpec]:
    """Return the scenario and its parts for a run's model, GPU and engine."""
    gpu = gpu_name(run.word("gpu"))
    engine = engine_block(run, gpu)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    gpus = prod(engine[key] for key in sizes)
    raw = {
        "name": "measured",
        "model": model_name(run.word("model"), folder),
        "gpu": {"name": gpu, "count": gpus},
        "engine": engine,
    }
    if cluster := cluster_block(run):
        raw["cluster"] = cluster
    if profile is not None:
        raw["cost"] = {"kind": ROOFLINE} if profile == ROOFLINE else {"profile": profile}
    scenario = check_scenario(raw, SourceMap(run.run_id, {}))
    spec = resolve(scenario)
    if profile is None and (kernel := expert_kernel(run)) and spec.model.num_experts:
        cost = {"profile": spec.cost.name.partition(" ")[0], "experts": kernel}
        scenario = scenario.model_copy(update={"cost": cost})
        spec = resolve(scenario)
    return scenario, spec


def _fitted_frontend(profile: str | None) -> Frontend | None:
    """Return what lies between clients and the scheduler, where a profile was fitted to a log."""
    import yaml

    if profile is None or not Path(profile).is_file():
        return None
    raw = yaml.safe_load(Path(profile).read_text(encoding="utf-8"))
    try:
        return Frontend(latency=float(raw["fit"]["terms_s"]["client"]["fitted"]))
    except (LookupError, TypeError):
        return None


def _told_beside(path: Path | None) -> list[str]:
    """Return what `headway replay` wrote of a measurement's own faults."""
    notes = []
    if (wrong := sibling_file(path, "errors.csv")) is not None:
        count = len(read_rows(wrong))
        notes.append(f"failed requests, which are not compared: {count:,}; see {wrong}")
    if (told := sibling_file(path, "summary.json")) is not None:
        with suppress(HeadwayError):
            notes += lateness_notes(read_json(told))
    return notes


def _describe_rules(scenario: Scenario, spec: EngineSpec) -> str:
    engine = scenario.engine
    kind = "asynchronous" if engine.async_scheduling else "synchronous"
    cached = "on" if engine.enable_prefix_caching else "off"
    return (
        f"{kind}, max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens "
        f"{engine.max_num_batched_tokens}, KV {spec.num_gpu_blocks * engine.block_size:,} tokens, "
        f"prefix cache {cached}"
    )


def find_requests_file(folder: Path, name: str) -> Path | None:
    """Find a file that runs.csv names: from the folder, from the one above it, or beside it."""
    if not name:
        return None
    places = (folder / name, folder.parent / name, folder / Path(name).name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise HeadwayError(f"per_request_file: no file {places[0]}")
    return found


def sibling_file(path: Path | None, ending: str) -> Path | None:
    """Find `RUN__ENDING` beside `RUN__requests.csv.gz`."""
    if path is None or "requests" not in path.name:
        return None
    other = path.with_name(path.name[: path.name.rindex("requests")] + ending)
    return other if other.is_file() else None


# Measurements that cannot be: more FLOP/s than the GPUs have, decodes faster than their bytes.


def closed_loop_rate(run: Run, measured: Mapping[str, float], output: float) -> float:
    """Return the requests/s that a closed loop's latencies imply at least; 0: they imply none.

    `measured` in ms; `output` are the mean tokens of an answer. All C clients are busy until the
    last of n requests is sent, after n E2EL / C at most, by Little's law. It is taken to last twice
    the mean at most.
    """
    clients = run.count("concurrency")
    ttft, tpot = (measured.get(f"mean_{name}_ms", nan) for name in ("ttft", "tpot"))
    e2el = measured.get("mean_e2el_ms", ttft + (tpot * (output - 1.0) if output > 1.0 else 0.0))
    if clients is None or run.number("rate_rps") is not None or not e2el > 0:
        return 0.0
    count = run.count("n_requests") or ROUNDS * clients
    return 1e3 * count / (count / clients + 2.0) / e2el


def why_impossible(
    measured: Mapping[str, float],
    model: ModelSpec,
    gpu: Gpu,
    engine: EngineConfig,
    *,
    servers: int,
    computed: float,
    output: float,
    clients: int | None = None,
) -> str:
    """Say by how much a run's measurements beat the data sheet; "" where they do not.

    `measured` has throughputs (requests/s, tokens/s) and latencies (ms), where they were recorded.
    `servers` are engine replicas, data-parallel ranks among them; a request computes `computed`
    prompt tokens and `output` tokens in the mean, and `clients` wait for one answer each at a time.
    All bounds are generous: attention, activations and the KV cache cost nothing, kernels reach the
    peak of the data sheet, and a step of decodes reads the experts of a single token, and all its
    drafts are accepted.
    """
    dtype, tensor = engine.weight_dtype, engine.tensor_parallel_size
    flow = measured.get("output_throughput", 0.0)
    rate = max(measured.get("request_throughput", 0.0), flow / output)
    head = 2 * model.head_parameters
    layers = model.flops_per_token - head
    needed = rate * (layers * (computed + max(0.0, output - 1.0)) + head * output)
    gpus = tensor * engine.pipeline_parallel_size
    each = peak_flops(gpu, model.weight_dtype(dtype))
    peak = each * gpus * servers
    if needed > peak:
        return (
            f"{rate:.4g} requests/s of {computed:,.0f} prompt tokens need {needed:.3g} FLOP/s; "
            f"{gpus * servers} x {gpu.name} have {peak:.3g} at most"
        )
    soonest = (layers * computed + head) / (each * tensor)  # one stage after the other
    experts = 0.0 if engine.data_parallel_size > 1 else model.expected_experts(1)
    drafts = engine.speculative_config
    tokens = 1 + drafts.num_speculative_tokens if drafts else 1  # of a step that reads all weights
    read = model.matrix_bytes(experts, dtype) / tensor / tokens  # one stage after the other
    least = read / gpu.bandwidth
    prompt, weights = f"{computed:,.0f} prompt tokens", f"{read:.3g} bytes of weights"
    token = least, weights + (f" (of {tokens} a step)" if drafts else "")
    step = least * tokens, f"{tokens} x {weights}"
    answer = f"{prompt} and {output:,.0f} of the answer"
    bounds = {
        "mean_ttft_ms": (soonest, f"{prompt}, if none is cached,"),
        "mean_e2el_ms": (soonest + (output - 1.0) * least, answer),
        "mean_itl_ms": token,  # of others some may come together
    } | {"tpot": token, "ttft": step, "e2el": step}
    if clients and flow:
        measured = {**measured, "implied_tpot_ms": 1e3 * clients / flow}
    for metric, took in measured.items():
        name = metric.split("_")[1]
        bound, why = bounds.get(metric) or bounds.get(name, (0.0, ""))
        if 0 < took < 1e3 * bound:
            least_time = f"{tensor} x {gpu.name} {1e3 * bound:.4g} ms at least"
            return f"{name.upper()} is {took:.4g} ms; {why} take {least_time}"
    return ""


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Return the most FLOP/s that any GPU of its kind could have for weights of a dtype."""
    eight = gpu.fp8_flops or EIGHT_BIT_SPEEDUP * gpu.bf16_flops
    if "fp4" in dtype or dtype in ("awq", "gptq", "int4"):
        return FOUR_BIT_SPEEDUP * eight
    return eight if dtype.startswith(("fp8", "int8")) else gpu.bf16_flops
