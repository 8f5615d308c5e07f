"""A GPU that is a formula, behind the real inputs, scheduler, grid, fit, live run and validation.

What a calibration finds there can be compared with the truth, which no GPU tells: whether the fit's
form can follow a device that is bound by bytes, by FLOPs in tiles, or by the launches of a slow
host. `python -m tests.gpu_backend.virtual_gpu` prints the errors and ends with 1 where they
are beyond the limits; the formula's figures are those of an H200 to within a tenth.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from calibration.engine_steps.calibrate import measure_all
from calibration.engine_steps.fit import Sample, StepFit, fit_rows, judge
from calibration.engine_steps.grid import GRAPH_TOKENS, Point, Setup
from calibration.engine_steps.measure import ShuffledBlocks, make_chunks, point_row
from calibration.engine_steps.steps_file import RowFile, read_rows
from calibration.errors import Errors
from calibration.profile_yaml import cost_block
from gpu_backend import executor, live
from gpu_backend.cuda.graphs import MIXED_SIZES, mixed_sizes_for, sizes_for
from gpu_backend.engine import Engine, Measured
from gpu_backend.input_batch import HostInputs, InputBatchBuilder
from gpu_backend.request_states import RequestStates
from simulator.core.request import Chunk, Request
from simulator.models.load import load_model
from simulator.models.spec import ModelSpec
from simulator.scenario.load import check_scenario
from simulator.simulation.run import run
from simulator.util.yaml_lines import SourceMap

MAX_MEDIAN, MAX_P95, MAX_TPOT = 0.02, 0.06, 0.02
FLOORS = (4e-3, 6e-3, 8e-3)  # s that launches of 32 layers take: a fast host and slower ones
BUDGETS = {"llama-3.1-8b": 60.0, "llama-3.2-1b": 30.0}
"""Seconds of calibration of each model, on the virtual clock."""
REGIMES = ("decode", "mixed", "prefill")
DRAWN = 100  # steps of each regime, beside those that the calibration holds out
SEQUENCES, TOKENS, LENGTH = 256, 2048, 8192  # of an engine's limits
REPLAYS = {"light": (4.0, 40), "heavy": (14.0, 140)}
"""Requests per second, and how many, as in the campaign."""
HOST_SECONDS = 60e-6  # of the scheduler before a step, of listing what it holds, and after it
TILE = 64  # tokens that a matrix product rounds up to, beyond the first
EMPTY_ROW_SECONDS = 10e-9  # that a row without keys takes a layer's attention
HEAD_SHARE = 0.02  # of a step's launches, those of output projection and sampling
JITTER, LAUNCH_JITTER = 0.01, 0.02  # standard deviations, relative


@dataclass
class Formula:
    """Seconds of a step's kernels, of its launches, and of the host's work."""

    spec: ModelSpec
    launches: float  # s, of a step launched kernel by kernel
    bandwidth: float = 3.6e12  # B/s of matrix products
    cache_bandwidth: float = 3.3e12  # of attention
    flops: float = 700e12
    attention_flops: float = 300e12
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def products(self, tokens: int) -> float:
        """Matrix products: the weights are read once; beyond, tiles of tokens are computed."""
        bytes_read = 2.0 * self.spec.parameters
        tiles = max(tokens, -(-tokens // TILE) * TILE if tokens > 2 * TILE else tokens)
        return max(bytes_read / self.bandwidth, tiles * bytes_read / self.flops) + 3e-7 * tokens

    def kernels(self, host: HostInputs, padded: int, *, mixed: bool = False) -> float:
        """All kernels of a step, one after the other.

        A graph of a step with prompts also launches programs for rows and tiles that are not there.
        """
        spec = self.spec
        layers, width = spec.num_hidden_layers, spec.num_attention_heads * spec.head_dim
        tokens = padded or int(host.counts.sum())
        around = layers * (8e-6 + tokens * 20.0 * spec.hidden_size / self.bandwidth)
        total = self.products(tokens) + around
        alone = host.counts == 1
        if alone.any():
            read = 4.0 * spec.num_key_value_heads * spec.head_dim * host.lengths[alone].sum()
            slow = 8e-6 + 0.5e-9 * float(host.lengths[alone].max())
            total += layers * (2e-6 + max(slow, read / self.cache_bandwidth))
        if mixed:
            total += layers * (2e-6 + EMPTY_ROW_SECONDS * padded)
        for length, count in zip(host.lengths[~alone], host.counts[~alone], strict=True):
            pairs = float(count) * float(length - count) + count * (count + 1) / 2
            total += layers * (5e-6 + 4.0 * width * pairs / self.attention_flops)
        return total * (1.0 + JITTER * self.random.standard_normal())

    def floor(self) -> float:
        """The launches of a step, by layers."""
        share = self.spec.num_hidden_layers / 32
        return self.launches * share * (1.0 + LAUNCH_JITTER * self.random.standard_normal())

    @staticmethod
    def host(rows: int, anew: bool) -> float:
        """The host's work on the inputs: gathered anew, or out of the step before."""
        return 90e-6 + 0.9e-6 * rows if anew else 40e-6 + 0.2e-6 * rows


class VirtualEngine(Engine):
    """An engine without weights, cache or device; `seconds` is what its steps have taken."""

    def __init__(
        self,
        model: str,
        launches: float,
        num_blocks: int = 24576,
        mixed_sizes: Sequence[int] = MIXED_SIZES,
    ) -> None:
        spec = load_model(model)
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, 16
        self.device, self.dtype = torch.device("cuda"), torch.bfloat16
        self.states = RequestStates(spec.vocab_size)
        self.inputs = InputBatchBuilder(
            self.states, 16, torch.device("cpu"), capture_sizes=sizes_for(256),
            mixed_sizes=mixed_sizes, max_blocks=-(-spec.max_position_embeddings // 16),
            tile_rows=128,
        )  # fmt: skip
        self.graphs = None
        self.formula = Formula(spec, launches)
        self.seconds = self._host = 0.0
        self.steps = 0
        self._swapped = {}
        # The scheduler runs in earnest; what it takes here, beside others, says nothing.
        vars(live)["thread_time"] = self.host_clock
        vars(live)["monotonic"] = lambda: self.seconds  # by which it warms up
        vars(executor)["time"] = SimpleNamespace(thread_time=self.host_clock)

    def host_clock(self) -> float:
        """Read the host's clock, by which every piece of work takes as long as the others."""
        self._host += HOST_SECONDS
        return self._host

    @property
    def gpu_name(self) -> str:
        """The GPU whose figures the formula has."""
        return "H200"

    def execute(
        self,
        chunks: Sequence[Chunk] | None,
        decoding: Sequence[Request] = (),
        *,
        keep: bool = True,
    ) -> Measured:
        """Build the inputs of a step, and say what it would take."""
        inputs = self.inputs
        batch, emitting = inputs.advance() if chunks is None else inputs.build(chunks, decoding)
        if keep:
            self.states.append(emitting, np.zeros(len(emitting), np.int64))
        formula = self.formula
        device = formula.kernels(batch.host, batch.bucket, mixed=batch.mixed)
        launch = 20e-6
        if batch.mixed:
            launch += HEAD_SHARE * formula.floor()  # while the graph runs
        if not batch.bucket:
            launch = formula.floor()
            device = max(device, launch)
        host = formula.host(len(batch.host.counts), chunks is not None)
        wall = device + host + 40e-6
        self.seconds += wall
        self.steps += 1
        logits = len(batch.host.emits)
        return Measured(device, host, wall, launch, bucket=batch.bucket, n_logits=logits)

    def swap_out(self, request: Request, blocks: list[int]) -> float:
        """Say what a copy to the host would take."""
        return self._copy(len(blocks))

    def swap_in(self, request: Request, blocks: list[int], first: int = 0) -> float:
        """Say what a copy back would take."""
        return self._copy(len(blocks))

    def _copy(self, blocks: int) -> float:
        self.seconds += (taken := 3e-4 + 45e-6 * blocks)
        return taken

    def reset(self) -> None:
        """Forget all requests."""
        self.states = RequestStates(self.spec.vocab_size)
        self.inputs.reset(self.states)

    def reserve_host(self, blocks: int) -> None:
        """Pin nothing: there is no copy."""

    def fill_random(self) -> None:
        """Fill nothing: there is no cache."""


def calibrated(engine: VirtualEngine, model: str, budget_s: float) -> StepFit:
    """Calibrate as on a GPU, on the virtual one's clock: the same steps every time."""
    setup = Setup(model, "cuda", budget_s, engine.num_blocks, 16, SEQUENCES, TOKENS, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        file = RowFile(Path(folder) / "steps.csv.gz")
        until = engine.seconds + budget_s
        measure_all(engine, setup, file, until, echo=lambda _: None, clock=lambda: engine.seconds)
        file.flush()
        rows = read_rows(file.path)
    return fit_rows(rows, "wall", engine.capture_sizes, engine.mixed_sizes, launched=True)


def draw_points(random: np.random.Generator) -> Iterator[Point]:
    """Draw steps of every regime that no grid has: sizes log-uniform, up to two prompts."""

    def size(low: int, high: int) -> int:
        return int(np.exp(random.uniform(np.log(low), np.log(high))))

    for number in range(DRAWN):
        for kind in REGIMES:
            contexts: list[int] = []
            chunks = []
            if kind != "prefill":
                most = size(16, LENGTH // 2)
                contexts = random.integers(1, most, size(1, SEQUENCES - 2), endpoint=True).tolist()
            if kind != "decode":
                for _ in range(random.integers(1, 2, endpoint=True)):
                    history = size(16, LENGTH // 2) if random.random() < 0.3 else 0
                    chunks.append((history, size(2, (TOKENS - len(contexts)) // 2)))
            yield Point(number, kind, tuple(contexts), tuple(chunks), coarse=False)


def drawn(engine: VirtualEngine) -> list[Sample]:
    """Measure drawn steps, each once and with the time of a scheduler before it."""
    random = np.random.default_rng(DRAWN)
    samples = []
    for point in draw_points(random):
        engine.reset()
        blocks = ShuffledBlocks(engine, random, engine.num_blocks)
        done = engine.execute(make_chunks(point, blocks), keep=False)
        row = point_row(point, done, "drawn", 0)
        samples.append(Sample(row, row.wall_s + 3 * HOST_SECONDS, held_out=True))
    return samples


def regimes(fit: StepFit, more: Sequence[Sample]) -> dict[str, Errors]:
    """Judge by what the fit has not seen, in grid and runs and `more` together."""

    def kind(sample: Sample) -> str:
        if not sample.row.chunks:
            return "decode"
        return "mixed" if sample.row.decodes else "prefill"

    unseen = [*(sample for sample in fit.samples if sample.held_out), *more]
    return {name: judge(fit.judged, [s for s in unseen if kind(s) == name]) for name in REGIMES}


def replayed(engine: VirtualEngine, model: str, fit: StepFit, name: str) -> dict[str, float]:
    """Replay a workload live and simulate it; give the relative errors of the simulation."""
    rate, count = REPLAYS[name]
    raw: dict[str, Any] = {
        "name": name,
        "model": model,
        "gpu": {"name": "H200"},
        "engine": {
            "name": "textbook",
            "num_gpu_blocks_override": engine.num_blocks,
            "max_num_seqs": SEQUENCES,
            "max_num_batched_tokens": TOKENS,
            "max_model_len": LENGTH,
            "enable_prefix_caching": False,
        },
        "cost": cost_block(fit.cost),
        "workload": {
            "num_prompts": count,
            "request_rate": rate,
            "burstiness": 0.835,
            "input_len": {"kind": "uniform", "low": 64, "high": 2000},
            "output_len": {"kind": "uniform", "low": 16, "high": 384},
        },
        "seed": 1,
    }
    scenario = check_scenario(raw, SourceMap(name, {}))
    done = live.run_live(scenario, "cuda", "exec", engine=engine, warm_s=0.0).result.summary()
    simulated = run(scenario).summary()
    keys = ("mean_tpot_ms", "mean_ttft_ms", "mean_e2el_ms", "request_throughput")
    return {key: float(simulated[key]) / float(done[key]) - 1.0 for key in keys}


def recover(
    model: str, launches: float, graph_tokens: int, budget_s: float, replays: Sequence[str]
) -> int:
    """Calibrate a virtual GPU, print how far the fit is off, count what is beyond the limits.

    Steps with prompts are graphs up to so many tokens.
    """
    begun = time.process_time()
    engine = VirtualEngine(model, launches, mixed_sizes=mixed_sizes_for(graph_tokens))
    fit = calibrated(engine, model, budget_s)
    prompts = f"prompts in graphs to {graph_tokens}" if graph_tokens else "prompts launched"
    print(
        f"{model}, launches {1e3 * launches:g} ms, {prompts}: {engine.steps} steps, "
        f"floor {1e3 * fit.cost.launch:.2f} ms fitted"
    )
    wrong = 0
    for name, errors in regimes(fit, drawn(engine)).items():
        beyond = errors.median > MAX_MEDIAN or errors.p95 > MAX_P95
        wrong += beyond
        print(f"  held out, {name:<8} {errors}{'  TOO FAR' * beyond}")
    for name in replays:
        found = replayed(engine, model, fit, name)
        beyond = abs(found["mean_tpot_ms"]) > MAX_TPOT
        wrong += beyond
        said = ", ".join(f"{key.split('_')[1]} {value:+.2%}" for key, value in found.items())
        print(f"  replay, {name:<10} {said}{'  TOO FAR' * beyond}")
    print(f"  {time.process_time() - begun:.0f} s of CPU", flush=True)
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """Recover one virtual GPU, or all; the exit code is 1 where one is beyond the limits."""
    parser = argparse.ArgumentParser(prog="tests.gpu_backend.virtual_gpu")
    parser.add_argument(
        "--all", action="store_true", help="both models, every floor, and the last without graphs"
    )
    parser.add_argument("--graph-tokens", type=int, default=GRAPH_TOKENS, help="of steps in graphs")
    parser.add_argument("--model", default=next(iter(BUDGETS)), choices=[*BUDGETS])
    parser.add_argument("--launch-ms", type=float, default=6.0, help="of 32 layers")
    parser.add_argument("--budget-s", type=float, help="of the virtual clock")
    given = parser.parse_args(words)
    cases = [(given.model, given.graph_tokens, given.launch_ms / 1e3)]
    if given.all:
        cases = [*product(BUDGETS, (GRAPH_TOKENS,), FLOORS), *product(BUDGETS, (0,), FLOORS[-1:])]
    wrong = 0
    for model, most, floor in cases:
        wrong += recover(model, floor, most, given.budget_s or BUDGETS[model], [*REPLAYS])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
