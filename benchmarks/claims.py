"""What is often said of continuous batching, in figures: `python benchmarks/claims.py [WHICH]`.

The tables of docs/claims.md. WHICH: steps, memory, utilisation, percentiles, drafts, sjf, compute,
low-load, jitter, host, engines, swap; all without. About a minute.
"""

from collections.abc import Iterable
from typing import Any

from examples import ENGINES, main, play, table

from simulator.models.gpus import GIB, HOST_SHARE, find_gpu
from simulator.models.load import load_model

STATIC, CONTINUOUS = "engine.scheduling_policy=static", "engine.scheduling_policy=fcfs"
ORDERS = ("fcfs", "sjf", "{policy: sjf, by: hint}", "srpt")
DRAFTS = "{num_speculative_tokens: 3, acceptance: 0.7, draft: {fraction: 0.05}}"
SWAP_GPUS = ("A100-80GB", "H100-80GB", "H200", "B200")
HOSTS = (0.0, 0.0005, 0.002, 0.005, 0.02)  # seconds of the host's work per step


def summary(name: str, *overrides: str) -> dict[str, Any]:
    """Run an example, and give its summary with the keys of `headway` beside the others."""
    whole = play(name, *overrides).summary()
    return {**whole, **whole["headway"]}


def steps() -> None:
    """100 requests in ten seats: how many steps, by what their answers are like."""
    longest = "{kind: cycle, values: [50, %s]}"
    answers = {
        "50 on average, all alike": "50",
        "50 on average, exponential": "{kind: exponential, mean: 50}",
        "in each ten one of 50, nine of 4": longest % ", ".join("4" * 9),
        "in each ten one of 50, nine of 5": longest % ", ".join("5" * 9),
    }

    def row(name: str, spec: str) -> Iterable[object]:
        static, continuous = (
            summary("hundred-requests", f"workload.output_len={spec}", policy)["duration"]
            for policy in (STATIC, CONTINUOUS)
        )
        yield from (name, f"{static:,.0f}", f"{continuous:,.0f}", f"{static / continuous:.2f}")

    table(("answers", "static", "continuous", "speed-up"), (row(*kind) for kind in answers.items()))


def memory() -> None:
    """The KV cache of one request of 4,096 tokens, and how many such 40 GB hold."""

    def row(name: str, heads: int | None) -> Iterable[object]:
        model = load_model(name)
        per_token = model.kv_bytes_per_token()
        if heads:
            per_token *= heads / model.num_key_value_heads
        yield f"{name}, {heads or model.num_key_value_heads} KV heads"
        yield f"{per_token / 1024:,.0f} KiB"
        yield f"{4096 * per_token / GIB:.2f} GiB"
        yield f"{40 * GIB // (4096 * per_token):,.0f}"

    kinds = (("llama-3-70b", None), ("llama-2-70b", None), ("llama-2-70b", 64))
    head = ("model, 16-bit cache", "a token", "4,096 tokens", "such requests in 40 GiB")
    table(head, (row(*kind) for kind in kinds))


def utilisation() -> None:
    """Seats, GPU and memory under each way of batching, answers of exponential length."""
    kinds = {
        "one at a time": "{policy: static, batch_size: 1}",
        "static, 8": "{policy: static, batch_size: 8}",
        "static, 32": "{policy: static, batch_size: 32}",
        "continuous, 32": "fcfs",
    }
    keys = ("decode_seat_utilization", "batch_occupancy", "wasted_seat_share", "gpu_busy_fraction")
    keys += ("gpu_busy_without_host", "mfu", "bandwidth_utilization")

    def row(name: str, policy: str) -> Iterable[object]:
        few = ["workload.num_prompts=400"] if name == "one at a time" else []
        sets = ["engine.max_num_seqs=32", f"engine.scheduling_policy={policy}", *few]
        s = summary("claims", *sets)
        yield from (name, *(f"{s[key]:.1%}" for key in keys))

    head = ("", "decode seats live", "occupancy", "seat-steps wasted", "GPU busy")
    head += ("without host", "MFU", "bandwidth")
    table(head, (row(*kind) for kind in kinds.items()))


def percentiles() -> None:
    """P50 and P99 under static and continuous batching at equal load, per request and per token."""

    def row(rate: float, policy: str) -> Iterable[object]:
        s = summary("load", f"workload.request_rate={rate}", f"engine.scheduling_policy={policy}")
        yield from (f"{policy}, {rate:g}/s",)
        for key in ("ttft", "e2el", "tpot", "itl"):
            yield f"{s[f'median_{key}_ms']:,.0f}, {s[f'p99_{key}_ms']:,.0f}"

    head = ("", *(f"{key}, P50, P99 (ms)" for key in ("TTFT", "E2EL", "TPOT", "ITL")))
    table(head, (row(rate, p) for rate in (0.1, 1, 2, 9) for p in ("static", "fcfs")))


def drafts() -> None:
    """What speculative decoding does to TTFT."""

    def row(rate: float, given: str) -> Iterable[object]:
        spec = f"engine.speculative_config={given}"
        s = summary("load", spec, f"workload.request_rate={rate}")
        yield f"{rate:g}/s, {'none' if given == 'null' else 'three drafts'}"
        yield from (f"{s[f'mean_{key}_ms']:,.1f}" for key in ("ttft", "itl", "tpot", "e2el"))
        yield f"{s['output_throughput']:,.0f}"

    head = ("drafts", *(f"mean {k} (ms)" for k in ("TTFT", "ITL", "TPOT", "E2EL")), "tok/s")
    table(head, (row(rate, given) for rate in (2, 6, 9, 12) for given in ("null", DRAFTS)))


def sjf() -> None:
    """What the order of the queue does to throughput and to latency, lengths known."""

    def row(rate: str, policy: str) -> Iterable[object]:
        sets = (f"workload.request_rate={rate}", f"engine.scheduling_policy={policy}")
        s = summary("load", "predictor={kind: oracle}", *sets)
        yield f"{policy}, {'all at once' if rate == 'inf' else rate + '/s'}"
        yield f"{s['output_throughput']:,.0f}"
        yield from (f"{s[f'{key}_e2el_ms'] / 1000:,.1f}" for key in ("mean", "median", "p99"))

    head = ("order, load", "tok/s", *(f"{k} E2EL (s)" for k in ("mean", "median", "P99")))
    table(head, (row(rate, order) for rate in ("12", "inf") for order in ORDERS))


def compute() -> None:
    """A better scheduler against a better GPU, 32 seats."""
    kinds = (("A100-80GB", "static"), ("H100-80GB", "static"), ("H200", "static"))
    kinds += (("B200", "static"), ("A100-80GB", "fcfs"), ("H100-80GB", "fcfs"))

    def row(gpu: str, policy: str) -> Iterable[object]:
        sets = ["model=llama-3-8b", "cost=null", f"gpu.name={gpu}", "engine.max_num_seqs=32"]
        s = summary("claims", *sets, f"engine.scheduling_policy={policy}")
        yield from (f"{policy}, {gpu}", f"{s['output_throughput']:,.0f}")

    table(("", "tok/s"), (row(*kind) for kind in kinds))


def low_load() -> None:
    """Static batching below 10 requests/s: P99 TTFT and mean E2EL, static and continuous."""
    kinds = {
        "llama-3.2-1b, B200": ["model=llama-3.2-1b", "gpu.name=B200"],
        "llama-3-8b, B200": ["model=llama-3-8b", "gpu.name=B200"],
        "llama-3-8b, A100": ["model=llama-3-8b"],
        "llama-3-70b, 4 H100": [
            "model=llama-3-70b",
            "gpu={name: H100-80GB, count: 4}",
            "engine.tensor_parallel_size=4",
        ],
    }

    def row(name: str, sets: list[str], rate: float) -> Iterable[object]:
        both = [
            summary("load", "cost=null", *sets, f"workload.request_rate={rate}", policy)
            for policy in (STATIC, CONTINUOUS)
        ]
        yield f"{name}, {rate:g}/s"
        yield " / ".join(f"{s['output_throughput']:,.0f}" for s in both)
        yield " / ".join(f"{s['p99_ttft_ms'] / 1000:,.2f}" for s in both)
        yield " / ".join(f"{s['mean_e2el_ms'] / 1000:,.2f}" for s in both)

    head = ("", "tok/s", "P99 TTFT (s)", "mean E2EL (s)")
    rates = (0.1, 1, 5, 10)
    table(head, (row(name, sets, rate) for name, sets in kinds.items() for rate in rates))


def jitter() -> None:
    """Gaps between the tokens of one request that is alone, by tensor parallelism."""

    def row(gpus: int) -> Iterable[object]:
        sets = [f"gpu={{name: H100-80GB, count: {gpus}}}", f"engine.tensor_parallel_size={gpus}"]
        sets += ["model=llama-3-70b", "cost=null", "workload.num_prompts=1"]
        sets += ["workload.input_len=1000", "workload.output_len=1000"]
        s = summary("load", *sets)
        yield from (gpus, *(f"{s[f'{key}_itl_ms']:.3f}" for key in ("mean", "std")))
        yield f"{s['min_itl_ms']:.3f} to {s['max_itl_ms']:.3f}"

    head = ("GPUs", "mean ITL (ms)", "std ITL (ms)", "range of ITL (ms)")
    table(head, (row(gpus) for gpus in (2, 4, 8)))


def host() -> None:
    """What a step waits for its host, by the host's time a step."""

    def row(seconds: float) -> Iterable[object]:
        yield f"{1000 * seconds:g} ms"
        for scheduling in ("false", "true"):
            cost = f"cost={{profile: llama-3-8b.a100.bf16, overhead: {{host: {seconds}}}}}"
            s = summary("load", cost, f"engine.async_scheduling={scheduling}")
            yield f"{s['mean_itl_ms']:.1f} ms, {s['host_share']:.0%}"

    head = ("host, a step", "synchronous: ITL, host share", "asynchronous: ITL, host share")
    table(head, (row(seconds) for seconds in HOSTS))


def engines() -> None:
    """The P99 and utilisation columns of the table of engines: all at once, and at 5 requests/s."""

    def row(name: str, engine: str, rate: str) -> Iterable[object]:
        s = summary("published-engines", f"engine={engine}", f"workload.request_rate={rate}")
        yield f"{name}, {'all at once' if rate == 'inf' else rate + '/s'}"
        yield f"{s['output_throughput']:,.0f}"
        yield from (f"{s[f'p99_{key}_ms']:,.0f}" for key in ("ttft", "itl", "e2el"))
        yield f"{s['batch_occupancy']:.0%}"

    names = ("hf, batches of 32", "vllm-v0", "vllm", "sglang", "tensorrt-llm, exact")
    head = (
        "engine, load",
        "tok/s",
        *(f"P99 {k} (ms)" for k in ("TTFT", "ITL", "E2EL")),
        "occupancy",
    )
    table(head, (row(name, ENGINES[name], rate) for rate in ("5", "inf") for name in names))


def swap() -> None:
    """What a GB of KV cache takes to the host, and back."""

    def row(name: str) -> Iterable[object]:
        rate = find_gpu(name).host_bandwidth * HOST_SHARE
        yield from (name, f"{rate / 1e9:,.0f} GB/s", f"{1e12 / rate:,.1f} ms")

    table(("GPU", "a copy reaches", "1 GB takes"), (row(name) for name in SWAP_GPUS))


PARTS = (
    *(steps, memory, utilisation, percentiles, drafts, sjf, compute, low_load),
    *(jitter, host, engines, swap),
)

if __name__ == "__main__":
    main(PARTS)
