"""The larger tables of docs/examples.md, and its picture: `python benchmarks/examples.py [WHICH]`.

WHICH: lengths, claims, static-table, engines-table, policies, memory, load, chunks; all without.
About two minutes. Only `load` and `chunks` write something, docs/images/examples-*.png.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.figures.style import COLORS, grid, legend_below, log_scale, save, sheet
from simulator import Result, load_scenario, run
from simulator.models.gpus import GIB, find_gpu
from simulator.models.load import load_model
from simulator.util.errors import HeadwayWarning
from tests.support.budgets import kv_budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
BLUE, RED, GREEN = COLORS[:3]

EXPONENTIAL = "{kind: exponential, mean: 50}"
LENGTHS = {
    "fixed, 50": "50",
    "uniform, 1 to 99": "{kind: uniform, low: 1, high: 99}",
    "exponential": EXPONENTIAL,
    "lognormal, sigma 1": "{kind: lognormal, sigma: 1, mean: 50}",
    "lognormal, sigma 1.5": "{kind: lognormal, sigma: 1.5, mean: 50}",
    "nine of 5, one of 455": "{kind: mixture, parts: [{weight: 9, kind: fixed, value: 5}, "
    "{weight: 1, kind: fixed, value: 455}]}",
}
ANSWERS = {
    "fixed": "200",
    "uniform": "{kind: uniform, low: 1, high: 399}",
    "half short": "{kind: mixture, parts: [{weight: 1, kind: uniform, low: 1, high: 9}, "
    "{weight: 1, kind: uniform, low: 355, high: 435}]}",
    "exponential": "{kind: exponential, mean: 200, high: 3000}",
    "lognormal": "{kind: lognormal, sigma: 1, mean: 200, high: 3000}",
}
BASELINES = {
    "one at a time": ["engine.scheduling_policy={policy: static, batch_size: 1}"],
    "static, 8": ["engine.scheduling_policy={policy: static, batch_size: 8}"],
    "static, 32": ["engine.scheduling_policy={policy: static, batch_size: 32}"],
    "static, contiguous": ["engine.scheduling_policy=static", "engine.allocation=contiguous"],
    "continuous, 8": ["engine.max_num_seqs=8"],
    "continuous, 32": ["engine.max_num_seqs=32"],
    "continuous, contiguous": ["engine.allocation=contiguous"],
    "continuous, paged": [],
}
ENGINES = {
    "hf, batches of 32": "{name: hf, scheduling_policy: {policy: hf-static, batch_size: 32}}",
    "vllm-v0": "vllm-v0",
    "vllm": "vllm",
    "vllm, synchronous": "{name: vllm, async_scheduling: false}",
    "sglang": "sglang",
    "tensorrt-llm, exact": "{name: tensorrt-llm, "
    "scheduling_policy: {policy: trtllm, max_new_tokens: exact}}",
    "tensorrt-llm, exact, fp8": "{name: tensorrt-llm, quantization: fp8, "
    "scheduling_policy: {policy: trtllm, max_new_tokens: exact}}",
    "tensorrt-llm": "tensorrt-llm",
}
TIGHT = "clients: {client-0: {ttft: 1000, tpot: 50}, client-1: {ttft: 30000, tpot: 100}}"
LOOSE = "clients: {client-0: {ttft: 1000, tpot: 1}, client-1: {ttft: 60000, tpot: 1}}"
POLICIES = {
    "fcfs": "fcfs",
    "priority": "priority",
    "preemptive": "preemptive",
    "last_moment, wait 600": '{policy: "last_moment:LastMoment", wait: 600}',
    "last_moment, wait 800": '{policy: "last_moment:LastMoment", wait: 800}',
    "last_moment, wait 950": '{policy: "last_moment:LastMoment", wait: 950}',
    "sjf by hint": "{policy: sjf, by: hint}",
    "hrrn": "hrrn",
    "boost by total": "{policy: boost, by: total}",
    "srpt": "{policy: srpt, limit: 0.5}",
    "fair, weights 4 to 1": "{policy: fair, weights: {client-0: 4}}",
    "wfq, weights 4 to 1": "{policy: wfq, weights: {client-0: 4}}",
    "mlfq": "mlfq",
    "deadline, loose": f"{{policy: deadline, slack: 30000, {LOOSE}}}",
    "deadline, tight": f"{{policy: deadline, slack: 5000, {TIGHT}}}",
}
MODELS = {
    "llama-3-70b": "int4",
    "llama-2-70b": "int4",
    "codellama-34b": "fp8",
    "qwen3-32b": "fp8",
    "mixtral-8x7b": "fp8",
}
WAYS = {
    "one at a time": "{policy: static, batch_size: 1}",
    "static, 64": "static",
    "continuous, 64": "fcfs",
}
SIZES = (512, 2048, 8192, 32768)  # tokens of a request, all of them
CAPACITY = 10.16  # requests/s: what continuous batching gets done when all come at once
LOADS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0)
CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)


def play(name: str, *overrides: str) -> Result:
    """Run an example."""
    return run(load_scenario(ROOT / "scenarios" / "examples" / f"{name}.yaml", list(overrides)))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table in Markdown as its rows come."""
    names = list(head)
    print(f"\n| {' | '.join(names)} |\n|---{'|--:' * (len(names) - 1)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def lengths() -> None:
    """Static over continuous steps by distribution: mean of ten seeds, and the extremes."""

    def row(spec: str) -> Iterable[str]:
        for count in (100, 1000):
            pairs = np.array(
                [
                    [
                        play(
                            "hundred-requests",
                            f"seed={seed}",
                            f"workload.output_len={spec}",
                            f"workload.num_prompts={count}",
                            f"engine.scheduling_policy={policy}",
                        ).summary()["duration"]
                        for policy in ("static", "fcfs")
                    ]
                    for seed in range(10)
                ]
            )
            ratio = pairs[:, 0] / pairs[:, 1]
            yield f"{pairs[:, 0].mean():,.0f} / {pairs[:, 1].mean():,.0f}"
            yield f"{ratio.mean():.2f} ({ratio.min():.2f}-{ratio.max():.2f})"

    head = ("answers", "steps of 100", "speed-up", "steps of 1,000", "speed-up")
    table(head, ((name, *row(spec)) for name, spec in LENGTHS.items()))


def claims() -> None:
    """Output tokens per second by baseline and distribution."""

    def rate(sets: list[str], spec: str) -> float:
        few = ["workload.num_prompts=400"] if sets == BASELINES["one at a time"] else []
        result = play("claims", f"workload.output_len={spec}", *sets, *few)
        return float(result.summary()["output_throughput"])

    rates = {name: [rate(sets, s) for s in ANSWERS.values()] for name, sets in BASELINES.items()}
    best = rates["continuous, paged"]
    table(
        ("", *ANSWERS),
        (
            (name, *(f"{r:,.0f} ({top / r:.1f}x)" for r, top in zip(row, best, strict=True)))
            for name, row in rates.items()
        ),
    )


def static_table() -> None:
    """The published table of static against continuous batching."""
    head = ("", "out tok/s", "all tok/s", "ITL P50, P99", "TPOT P50, P99", "useful", "memory")
    static = ["engine.allocation=contiguous"]
    policy = "engine.scheduling_policy={{policy: static, batch_size: {}}}"
    batches = {f"static, {n}": [*static, policy.format(n)] for n in (8, 16, 24, 32)}
    table(head, (_row(name, sets) for name, sets in {**batches, "continuous, 64": []}.items()))


def _row(name: str, sets: list[str]) -> Iterable[str]:
    s = play("published-static", *sets).summary()
    more = s["headway"]
    useful = 1 - more["wasted_share"] if "static" in name else more["batch_occupancy"]
    yield from (name, f"{s['output_throughput']:,.0f}", f"{s['total_token_throughput']:,.0f}")
    for gap in ("itl", "tpot"):
        yield f"{s[f'median_{gap}_ms']:.0f}, {s[f'p99_{gap}_ms']:.0f}"
    yield from (f"{useful:.0%}", f"{more['memory_efficiency']:.0%}")


def engines_table() -> None:
    """The published table of four engines: output tokens per second."""

    def rate(engine: str, *sets: str) -> str:
        summary = play("published-engines", f"engine={engine}", *sets).summary()
        return f"{summary['output_throughput']:,.0f}"

    plain = "workload.prefix_groups=null"
    table(
        ("engine", "ten system prompts", "no common prefix"),
        ((name, rate(e), rate(e, plain, "workload.input_len=800")) for name, e in ENGINES.items()),
    )


def memory() -> None:
    """Requests at once by model, KV dtype and tokens of a request."""

    def row(name: str, weights: str, dtype: str) -> Iterable[str]:
        model = load_model(name)
        gpu = find_gpu("A100-80GB")
        budget = kv_budget(model, gpu, quantization=weights, kv_cache_dtype=dtype)
        yield f"{name}, {weights}"
        yield f"{budget.weights / GIB:.1f} GiB"
        yield f"{budget.kv_cache / GIB:.1f} GiB"
        yield f"{budget.kv_cache_dtype}, {budget.kv_bytes_per_token / 1024:.0f} KiB"
        for tokens in SIZES:
            fits = tokens <= model.max_position_embeddings
            yield f"{budget.concurrent(tokens):,}" if fits else ""

    head = ("model, weights", "they take", "left for KV", "KV per token")
    kinds = ((m, w, d) for m, w in MODELS.items() for d in ("auto", "fp8", "int4"))
    table((*head, *(f"{size:,}" for size in SIZES)), (row(*kind) for kind in kinds))


def policies() -> None:
    """What the urgent and the others get under each policy."""
    head = ("policy", "urgent in time", "P99 TTFT, urgent (s)", "P99 E2EL, urgent (s)")
    head += ("P99 E2EL, others (s)", "tok/s", "preemptions")

    def row(name: str, policy: str) -> Iterable[str]:
        result = play("urgent", f"engine.scheduling_policy={policy}")
        frame, summary = result.requests, result.summary()
        urgent = frame[frame.client == "client-0"]
        others = frame[frame.client != "client-0"]
        yield from (name, f"{(urgent.ttft <= 1).mean():.1%}")
        for times in (urgent.ttft, urgent.e2el, others.e2el):
            yield f"{np.percentile(times, 99):,.2f}"
        yield f"{summary['output_throughput']:,.0f}"
        yield f"{summary['headway']['preemptions']:,}"

    table(head, (row(name, policy) for name, policy in POLICIES.items()))


def load() -> None:
    """No batching, static and continuous batching at 0.002 to 2 times the latter's capacity."""
    got: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}

    def row(load: float) -> Iterable[str]:
        rate = f"workload.request_rate={load * CAPACITY:.4f}"
        for name, summaries in got.items():
            summaries.append(play("load", rate, f"engine.scheduling_policy={WAYS[name]}").summary())
        last = [summaries[-1] for summaries in got.values()]
        yield f"{load:g}"
        yield " / ".join(f"{s['output_throughput']:,.0f}" for s in last)
        yield " / ".join(f"{s['mean_tpot_ms']:,.0f}" for s in last)
        for key in ("mean_ttft_ms", "mean_e2el_ms"):
            yield " / ".join(f"{s[key] / 1000:,.2f}" for s in last)
        yield f"{last[1]['mean_e2el_ms'] / last[2]['mean_e2el_ms']:.2f}"

    head = ("load", "tok/s", "mean TPOT (ms)", "mean TTFT (s)", "mean E2EL (s)", "E2EL, ratio")
    table(head, (row(load) for load in LOADS))
    panels = (("output_throughput", 1, "output tokens/s"), ("mean_e2el_ms", 1000, "mean E2EL (s)"))

    def draw(axes: "Axes", panel: tuple[str, int, str]) -> None:
        for (name, summaries), color in zip(got.items(), (GREEN, RED, BLUE), strict=True):
            values = [s[panel[0]] / panel[1] for s in summaries]
            axes.plot(LOADS, values, "o-", color=color, markersize=4, label=name)
        axes.set_title("Throughput" if panel[1] == 1 else "Latency")
        axes.set_xlabel("load / capacity of continuous batching")
        axes.set_ylabel(panel[2])
        log_scale(axes, "x")

    picture("examples-load.png", panels, draw)


def chunks() -> None:
    """TTFT and ITL by the tokens that a step computes at most."""
    got: dict[int, list[dict[str, float]]] = {3: [], 4: []}

    def row(size: int) -> Iterable[str]:
        yield f"{size:,}"
        for rate, summaries in got.items():
            sets = f"engine.max_num_batched_tokens={size}", f"workload.request_rate={rate}"
            summaries.append(play("chunk-size", *sets).summary())
            s = summaries[-1]
            yield f"{s['mean_ttft_ms']:,.0f}, {s['p99_ttft_ms']:,.0f}"
            yield f"{s['mean_itl_ms']:.1f}, {s['p99_itl_ms']:.0f}"

    head = ("budget", "TTFT at 3/s (ms)", "ITL at 3/s (ms)", "TTFT at 4/s (ms)", "ITL at 4/s (ms)")
    table(head, (row(size) for size in CHUNKS))

    def draw(axes: "Axes", rate: int) -> None:
        for key, color in (("p99_ttft_ms", RED), ("p99_itl_ms", BLUE)):
            values = [s[key] for s in got[rate]]
            axes.plot(CHUNKS, values, "o-", color=color, label=f"P99 {key[4:-3].upper()}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(CHUNKS, [f"{size:,}" for size in CHUNKS], rotation=30)
        axes.set_title(f"{rate} requests/s")
        axes.set_xlabel("max_num_batched_tokens (tokens per step)")
        axes.set_ylabel("latency (ms)")

    picture("examples-chunks.png", tuple(got), draw)


def picture(name: str, panels: tuple, draw: Callable) -> None:  # type: ignore[type-arg]
    """Draw two panels into a file of docs/images."""
    with sheet(1, 2, 3.8) as figure:
        for axes, panel in zip(figure.axes, panels, strict=True):
            draw(axes, panel)
            log_scale(axes, "y")
            grid(axes)
        legend_below(figure, figure.axes[0])
    save(figure, ROOT / "docs" / "images" / name)


PARTS = (lengths, claims, static_table, engines_table, memory, policies, load, chunks)


def main(parts: Sequence[Callable[[], None]]) -> None:
    """Do the parts that the command line names, or all; each is called as its function is."""
    warnings.simplefilter("ignore", HeadwayWarning)
    named = {part.__name__.replace("_", "-"): part for part in parts}
    if unknown := set(sys.argv[1:]) - set(named):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(named)}")
    for name in sys.argv[1:] or named:
        named[name]()


if __name__ == "__main__":
    main(PARTS)
