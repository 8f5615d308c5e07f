"""Cost models: by hand, by the law that a leap is its steps, and as files."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.engine_config import EngineConfig
from simulator.core.executor import CanLeap
from simulator.core.log import STEP
from simulator.core.request import Chunk, Request, Step
from simulator.costs.linear import LinearCost
from simulator.costs.load import load_cost
from simulator.costs.overhead import Overhead, find_overhead
from simulator.costs.piecewise import MAX_TABLE_TOKENS, PiecewiseCost
from simulator.costs.profile import (
    PROFILES,
    named_hardware,
    read_profile,
    shipped_profile,
    shipped_profiles,
)
from simulator.costs.roofline import USUAL, efficiency_of, roofline
from simulator.models.gpus import GPUS, Gpu
from simulator.models.load import load_model
from simulator.scenario.assemble import assemble
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.scenarios import errors

LLAMA = load_model("llama-3-8b")
SOMEBODY = Request(0, 0.0, 100, 10)
OF_LLAMA = [name for name in shipped_profiles() if re.fullmatch(r"llama-3-8b\.[^-]*\.bf16", name)]
SOME = [*OF_LLAMA, "tiny-test.cpu.fp32", *shipped_profiles()[::25]]
HAND = PiecewiseCost(
    dense=[[1, 10.0], [11, 20.0], [21, 40.0]],
    overhead=1.0,
    head=3.0,
    head_per_sequence=1.0,
    decode=100.0,
    decode_per_context=0.5,
    decode_per_sequence=2.0,
    prefill=200.0,
    prefill_per_pair=0.25,
    prefill_per_token=4.0,
    mixed_per_context=1.5,
    mixed_per_sequence=5.0,
    serial_per_token=16.0,
)


def mixed(*chunks: tuple[int, int], decodes: int = 0, context: int = 0) -> Step:
    """Make a step of (start, tokens) chunks and some decodes."""
    return Step([Chunk(SOMEBODY, *chunk) for chunk in chunks], decodes, context)


def test_linear_by_hand() -> None:
    """Base, 7 tokens in all, 20 cached ones read, 3 sequences."""
    cost = LinearCost(base=1.0, per_token=10.0, per_context=0.5, per_sequence=100.0)
    assert cost.execute(mixed((0, 5), decodes=2, context=20)) == 1 + 70 + 10 + 300
    assert cost.execute(Step([], 2, 20)) == 1 + 20 + 10 + 200
    assert cost.leap(Step([], 2, 20), 3) == [231.0, 232.0, 233.0]


def test_a_pure_decode_step_by_hand() -> None:
    """Overhead, table, head and launch; then the cache or the sequences, whichever is longer."""
    assert HAND.execute(Step([], 1, 10)) == 1 + 10 + 3 + 100 + 5
    assert HAND.execute(Step([], 1, 3)) == 1 + 10 + 3 + 100 + 2
    assert HAND.execute(Step([], 6, 60)) == 1 + 15 + 6 + 100 + 30


def test_a_prompt_by_hand() -> None:
    """5 tokens after 2 cached: 5 x 2 + 15 pairs; 7 keys one after the other take longer."""
    work = 0.25 * 25 + 4 * 5
    assert HAND.execute(mixed((2, 5))) == 1 + 14 + 3 + 200 + max(work, 16 * 7)
    fast = replace(HAND, serial_per_token=0.0)
    assert fast.execute(mixed((2, 5))) == 1 + 14 + 3 + 200 + work


def test_a_mixed_step_by_hand() -> None:
    """Two prompts and four decodes: 12 tokens, 6 sequences, all attention in one sum."""
    step = mixed((0, 3), (0, 5), decodes=4, context=400)
    work = 0.25 * (6 + 15) + 4 * 8 + 1.5 * 400 + 5 * 4
    assert replace(HAND, serial_per_token=0.0).execute(step) == 1 + 22 + 6 + 200 + work
    mean = 400 / 4  # the longest sequence that is known of
    assert HAND.execute(step) == 1 + 22 + 6 + 200 + max(work, 16 * mean)


def test_padding_and_ghosts_are_paid_for() -> None:
    """A ghost costs what a decode costs, a padded token what a token costs."""
    for cost in (HAND, LinearCost(1.0, 1.0, 1.0)):
        ghosts = Step([], 4, 40, ghosts=3)
        assert cost.execute(ghosts) == cost.execute(Step([], 4, 40))
        padded = mixed((0, 8))
        padded.padding = 5
        assert cost.execute(padded) == cost.execute(mixed((0, 8)))


def test_the_dense_table() -> None:
    """Constant below its first row, straight between rows, and beyond as in its upper half."""
    cost = replace(HAND, dense=[[5, 10.0], [10, 20.0], [20, 60.0]])
    assert [cost.dense_seconds(n) for n in (1, 5, 7, 10, 15, 20, 30)] == [
        10.0,
        10.0,
        14.0,
        20.0,
        40.0,
        60.0,
        100.0,
    ]
    assert replace(HAND, dense=[[5, 10.0]]).dense_seconds(100) == 10.0
    stairs = replace(HAND, dense=[[1, 1.0], [8, 8.0], [9, 16.0], [16, 15.0]])
    assert stairs.dense_seconds(32) == 15.0 + 16 * (15.0 - 8.0) / 8
    falling = replace(HAND, dense=[[1, 2.0], [2, 1.0]])
    assert falling.dense_seconds(9) == 1.0


def test_a_long_table_is_searched() -> None:
    """Rows beyond the part that is looked up by index count all the same."""
    far = 4 * MAX_TABLE_TOKENS
    cost = replace(HAND, dense=[[1, 1.0], [2 * MAX_TABLE_TOKENS, 2.0], [far, 4.0]])
    assert cost.dense_seconds(2 * MAX_TABLE_TOKENS) == 2.0
    assert cost.dense_seconds(3 * MAX_TABLE_TOKENS) == 3.0
    assert cost.dense_seconds(5 * MAX_TABLE_TOKENS) == 5.0
    assert cost.execute(Step([], far, 0)) == 1 + 4 + far + 100 + 2 * far


COSTS = {
    "linear": LinearCost(1e-3, 3.3e-5, 1.7e-8, 1.1e-6),
    "piecewise": HAND,
    "roofline": roofline(LLAMA, GPUS["L40S"]),
    "graphs": replace(HAND, cudagraph_capture_sizes=[1, 2, 4, *range(8, 513, 8)]),
    "overlapped": replace(HAND, host=30.0, host_per_sequence=50.0, overlapped=True),
    "waited for": replace(HAND, host=30.0, host_per_sequence=50.0, host_per_prefill=2.0),
} | {name: load_cost(name) for name in SOME}


@given(
    name=st.sampled_from(sorted(COSTS)),
    decodes=st.integers(1, 3000) | st.integers(1, 8),
    mean=st.integers(1, 40_000) | st.integers(1, 30),
    repeats=st.integers(1, 50),
)
def test_a_leap_is_its_steps_to_the_last_bit(
    name: str, decodes: int, mean: int, repeats: int
) -> None:
    """Item i of a leap is what `execute` says of the i-th step, context grown by one each."""
    cost = COSTS[name]
    context = decodes * mean
    steps = [Step([], decodes, context + k * decodes) for k in range(repeats)]
    assert cost.leap(steps[0], repeats) == [cost.execute(step) for step in steps]


@pytest.mark.parametrize("name", sorted(COSTS))
def test_every_kind_can_leap(name: str) -> None:
    """The replica asks this protocol before it leaps."""
    assert isinstance(COSTS[name], CanLeap)
    assert COSTS[name].name.split(" ")[0] in {name, ""}


def logged(**columns: list[int]) -> np.ndarray:
    """Make rows of a step log; columns that are not given are 0, `steps` 1."""
    rows = np.zeros(len(next(iter(columns.values()))), STEP)
    rows["steps"] = 1
    for name, values in columns.items():
        rows[name] = values
    return rows


LIMITED = replace(
    HAND,
    name="hand",
    limits={"tokens": (1, 20), "sequences": (1, 8), "context": (1, 100), "pairs": (0, 50)},
)


def test_steps_inside_the_range_say_nothing() -> None:
    """The bounds themselves are inside; without limits everything is."""
    rows = logged(decodes=[8, 4], prefill_tokens=[0, 12], wasted=[0, 4], context=[100, 7])
    assert LIMITED.range_warnings(rows) == []
    rows["context"] = 10**9
    assert HAND.range_warnings(rows) == []
    assert LIMITED.range_warnings(rows[:0]) == []


def test_padding_is_tokens_and_ghosts_are_sequences() -> None:
    """A static step of nothing but padding computes 20 tokens, for no 20 sequences."""
    assert LIMITED.range_warnings(logged(wasted=[20])) == []
    assert "sequences of 9" in LIMITED.range_warnings(logged(decodes=[1], wasted=[8]))[0]


def test_steps_outside_are_counted_by_quantity() -> None:
    """Each quantity has its line, with its share of the steps."""
    rows = logged(
        decodes=[9, 1, 1, 1], prefill_tokens=[0, 20, 5, 5], prefill_context=[0, 10, 51, 5]
    )
    tokens, sequences, pairs = LIMITED.range_warnings(rows)
    assert tokens == (
        "cost hand: tokens of 6 to 21 in a step, fitted from 1 to 20: "
        "25.00% of the steps are extrapolated"
    )
    assert sequences.startswith("cost hand: sequences of 1 to 9 in a step, fitted from 1 to 8: 25")
    assert pairs.startswith("cost hand: pairs of 5 to 51")


@pytest.mark.parametrize(("first", "late"), [(91, 5), (90, 4), (95, 7), (101, 10), (1, 0)])
def test_a_leapt_row_counts_the_steps_that_lie_outside(first: int, late: int) -> None:
    """Ten steps of two sequences read first, first + 2, ...; those above 100 count."""
    reads = [first + 2 * k for k in range(10)]
    assert sum(read > 100 for read in reads) == late
    rows = logged(decodes=[1], wasted=[1], context=[first], steps=[10])
    shares = [message.rsplit(": ", 1)[1] for message in LIMITED.range_warnings(rows)]
    assert shares == [f"{late / 10:.2%} of the steps are extrapolated"] * (late > 0)


def test_inline_costs() -> None:
    """A mapping with `kind` is enough; numbers that YAML took for text are numbers."""
    spec = {"kind": "linear", "base": "1e-3", "per_token": 2, "per_context": 0.0}
    assert load_cost(spec) == LinearCost(1e-3, 2, 0.0)
    assert load_cost({"kind": "linear", "base": 1}) == LinearCost(1, 0.0, 0.0)
    assert load_cost({"kind": "piecewise", "dense": [[1, 0.5]]}).execute(Step([], 1, 1)) == 0.5


@pytest.mark.parametrize(
    ("spec", "messages"),
    [
        (
            {},
            ["cost.kind: must be linear, piecewise, piecewise-split, roofline; or give `profile`"],
        ),
        (
            {"kind": "cubic"},
            ["cost.kind: must be linear, piecewise, piecewise-split, roofline, not 'cubic'"],
        ),
        (
            {"kind": "linear", "base": "x", "per_token": 1.0, "per_contest": 1.0},
            [
                "cost.per_contest: unknown key",
                "cost.base: 'x' is not a number",
            ],
        ),
        (
            {"kind": "linear", "base": "x", "per_token": -1, "per_contest": 1.0},
            [
                "cost.per_contest: unknown key",
                "cost.base: 'x' is not a number",
                "cost.per_token: must be seconds, at least 0 and at most 1,000,000, not -1",
            ],
        ),
        ({"kind": "linear", "per_token": 1.0}, ["cost.base: missing"]),
        ({"kind": "linear", "base": 1000001}, ["cost.base: must be seconds, at least 0 and at"]),
        ({"kind": "piecewise", "dense": [[1, 1e7]]}, ["cost.dense: must be rows"]),
        ({"kind": "piecewise", "dense": [[1, 1.0], [1e300, 2.0]]}, ["cost.dense: must be rows"]),
        (
            {"kind": "linear", "base": -1, "per_token": float("inf"), "per_context": 1.0},
            ["cost.base: must be seconds, at least 0", "cost.per_token: must be seconds"],
        ),
        (
            {"kind": "linear", "base": 0, "per_token": 0, "per_context": 0},
            ["cost.base: every step takes no time"],
        ),
        ({"kind": "linear", "name": "x"}, ["cost.name: unknown key"]),
        ({"kind": "piecewise", "dense": [[2, 1.0], [1, 2.0]]}, ["cost.dense: must be rows"]),
        ({"kind": "piecewise", "dense": [[1, 0.0]]}, ["cost.dense: must be rows"]),
        ({"kind": "piecewise", "dense": []}, ["cost.dense: must be rows"]),
        ({"kind": "piecewise", "dense": [1]}, ["cost.dense: must be rows"]),
        ({"kind": "roofline", "base": 1}, ["cost.base: roofline takes no terms"]),
        ({"profile": "llama-3-8b.a100.bf16", "x": 1}, ["cost.x: cannot be given beside"]),
        ({"profile": 3}, ["cost.profile: must be a name or a path, not 3"]),
        ({"profile": "llama-3-8b.a100"}, ["cost.profile: no file .*llama-3-8b.a100.bf16"]),
    ],
)
def test_bad_specs_are_told_by_field(spec: dict[str, object], messages: list[str]) -> None:
    """Every wrong key has its line, and begins with the scenario's field."""
    with pytest.raises(ValueError, match="cost") as caught:
        load_cost(spec, model=LLAMA, gpu=GPUS["H200"])
    lines = str(caught.value).split("\n")
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert re.match(message, line)


def test_roofline_needs_model_and_gpu() -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match=r"cost.kind: roofline needs"):
        load_cost({"kind": "roofline"})


def test_a_profile_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    """Shipped by name; one's own beside the scenario."""
    text = "cost: {kind: linear, base: 1e-3, per_token: 0, per_context: 0}\nrange: {tokens: [1, 9]}"
    (tmp_path / "mine.yaml").write_text(text)
    mine = load_cost({"profile": "mine.yaml"}, tmp_path)
    assert (mine, mine.name) == (LinearCost(1e-3, 0, 0), "mine")
    assert len(mine.range_warnings(logged(decodes=[10]))) == 1
    assert load_cost("llama-3-8b.a100.bf16").name == "llama-3-8b.a100.bf16"


def test_a_bad_profile_is_told_whole(tmp_path: Path) -> None:
    """All that is wrong in the file at once, by line."""
    path = tmp_path / "bad.yaml"
    path.write_text(
        "hardware: 3\n"
        "colour: red\n"
        "cost:\n"
        "  kind: piecewise\n"
        "  head: -1\n"
        "range:\n"
        "  tokens: [1]\n"
        "  times: [1, 2]\n"
    )
    with pytest.raises(HeadwayError) as caught:
        read_profile(path)
    assert sorted(message.split(": ", 2)[:2] for message in caught.value.messages) == [
        [f"{path}:1", "hardware"],
        [f"{path}:2", "colour"],
        [f"{path}:3", "cost.dense"],
        [f"{path}:7", "range.tokens"],
        [f"{path}:8", "range.times"],
    ]
    path.write_text("- 1\n")
    with pytest.raises(HeadwayError, match=r"bad.yaml:1: must be a mapping"):
        read_profile(path)


def test_a_profile_of_something_else_warns() -> None:
    """Model, GPU and precision that differ are named once; 16-bit dtypes are alike."""
    name = "llama-3-8b.a100.bf16"
    a100 = GPUS["A100-80GB"]
    load_cost(
        name, model=load_model("llama-3.1-8b"), gpu=a100, engine=EngineConfig(dtype="float16")
    )
    engine = EngineConfig(tensor_parallel_size=2, quantization="int4")
    with pytest.warns(
        HeadwayWarning,
        match=f"{name} was fitted to llama-3-8b, not llama-2-7b; gpu A100-80GB, not H200; "
        "tensor_parallel_size 1, not 2; dtype bfloat16, not int4$",
    ):
        load_cost(name, model=load_model("llama-2-7b"), gpu=GPUS["H200"], engine=engine)


def test_the_shipped_profile_of_a_scenario() -> None:
    """Found by the model's shape, the GPU and the precision; else there is none."""
    engine = EngineConfig()
    found = shipped_profile(load_model("llama-3.1-8b"), GPUS["H100-80GB"], engine)
    assert found == {"profile": "llama-3-8b.h100.bf16"}
    assert shipped_profile(LLAMA, GPUS["L4"], engine) is None
    assert shipped_profile(load_model("qwen3-0.6b"), GPUS["H200"], engine) is None
    assert shipped_profile(LLAMA, GPUS["H200"], EngineConfig(kv_cache_dtype="fp8")) is None
    large = load_model("llama-3.1-70b")
    engine = EngineConfig(tensor_parallel_size=4, quantization="fp8", kv_cache_dtype="fp8_e4m3")
    found = shipped_profile(large, GPUS["H200"], engine)
    assert found == {"profile": "llama-3-70b.h200-tp4.fp8-kvfp8"}
    engine = EngineConfig(tensor_parallel_size=4, quantization="fp8")
    found = shipped_profile(large, GPUS["H200"], engine)
    assert found == {"profile": "llama-3-70b.h200-tp4.fp8"}
    engine = EngineConfig(tensor_parallel_size=2, dtype="float16")
    found = shipped_profile(load_model("codellama-34b"), GPUS["A100-80GB"], engine)
    assert found == {"profile": "codellama-34b.a100-tp2.bf16"}


def test_every_shipped_profile_is_found_by_what_its_name_says() -> None:
    """Name and contents agree, and no two profiles are of the same thing."""
    seen = set()
    for name in shipped_profiles()[::7]:
        profile = read_profile(PROFILES / f"{name}.yaml")
        said = named_hardware(name)
        assert profile.hardware == said
        assert profile.model == name.rsplit(".", 2)[0]
        seen.add((profile.model, *said.values()))
    assert len(seen) == len(shipped_profiles()[::7])


def test_the_engines_overhead_comes_on_top_of_kernels() -> None:
    """Profiles of kernels take the overhead of the engine they name."""
    name = "llama-3-8b.a100.bf16"
    kernels = read_profile(PROFILES / f"{name}.yaml").cost
    whole = load_cost(name)
    assert isinstance(kernels, PiecewiseCost)
    assert kernels.overhead == 0.0
    added = whole.execute(Step([], 8, 8000)) - kernels.execute(Step([], 8, 8000))
    assert added == pytest.approx(0.75e-3 + 8 * 20e-6)
    with pytest.raises(ValueError, match=r"cost\.overhead: no engine 'vlm'; there are vllm"):
        load_cost({"profile": name, "overhead": "vlm"})


@pytest.mark.parametrize("cost", ["profile: llama-3-8b.a100.bf16", "kind: roofline"])
def test_a_scenario_sets_the_hosts_work_and_async_scheduling_hides_it(write, cost: str) -> None:
    """8 sequences: 1 ms and 0.5 ms each, 5 ms; a longer host of 1 s and 0.5 ms each shows alone."""
    engine = "engine: {async_scheduling: ASYNC}"
    text = f"model: llama-3-8b\n{engine}\ncost: {{{cost}, overhead: X}}\n"
    step = Step([], 8, 8000)

    def seconds(overhead: str, hidden: bool) -> float:
        scenario = text.replace("X", overhead).replace("ASYNC", str(hidden).lower())
        return assemble(load_scenario(write(scenario))).cost.execute(step)

    own = {hidden: find_overhead(asynchronous=hidden) for hidden in (False, True)}
    plain = {hidden: seconds("vllm", hidden) for hidden in own}
    short, long = "{host: 1e-3, host_per_sequence: 5e-4}", "{host: 1, host_per_sequence: 5e-4}"
    assert seconds(short, False) == pytest.approx(plain[False] + 5e-3)
    assert seconds(short, True) == plain[True]
    waits = own[True].step + 8 * own[True].per_sequence
    assert seconds(long, True) == pytest.approx(waits + 1.004)
    assert seconds("{step: 0.0}", True) == pytest.approx(plain[True] - own[True].step)


def test_terms_of_a_form_are_hidden_too_where_the_engine_is_asynchronous(write) -> None:
    """5 s of kernels, 3 of the host; `overlapped` overrides what the engine does."""
    cost = "{kind: piecewise, dense: [[1, 5.0]], host: 3.0}"
    text = f"cost: {cost}\nengine: {{async_scheduling: ASYNC}}\n"
    found = []
    for change in ("false", "true"):
        scenario = load_scenario(write(text.replace("ASYNC", change)))
        found.append(assemble(scenario).cost.execute(Step([], 1, 1)))
    assert found == [8.0, 5.0]
    told = text.replace("ASYNC", "true").replace("3.0", "3.0, overlapped: false")
    assert assemble(load_scenario(write(told))).cost.execute(Step([], 1, 1)) == 8.0


@pytest.mark.parametrize(
    ("overhead", "told"),
    [
        ("{hots: 1}", "cost.overhead.hots: unknown key"),
        (
            "{host: -1}",
            "cost.overhead.host: must be seconds, at least 0 and at most 1,000,000, not -1",
        ),
        ("{captured: -1}", "cost.overhead.captured: must be at least 0, not -1"),
        ("[1]", "cost.overhead: [1] is not a mapping"),
        ("vlm", "cost.overhead: no engine 'vlm'; there are vllm"),
    ],
)
def test_wrong_overheads_are_told(write, overhead: str, told: str) -> None:
    assert errors(write(f"cost: {{kind: roofline, overhead: {overhead}}}\n"))[0].endswith(told)


def test_vllms_graphs_pad_decodes() -> None:
    """9 decodes run in the graph of 16, 300 in that of 304, 600 without one."""
    sizes = find_overhead().capture_sizes
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, 512)
    cost = Overhead(captured=512).add_to(HAND, overlapped=False)
    for count, size in ((9, 16), (300, 304), (600, 600)):
        assert cost.execute(Step([], count, 0)) - 2 * count == HAND.execute(Step([], size, 0)) - (
            2 * size
        )


def test_the_hosts_work_is_waited_for_or_hidden() -> None:
    """6 sequences of which 2 are prompts of 8 tokens; hidden, only what is longer shows."""
    step = mixed((0, 3), (0, 5), decodes=4, context=400)
    kernels = HAND.execute(step)
    terms = Overhead(
        step=0.5, host=7.0, host_per_sequence=3.0, host_per_prefill=10.0, host_per_prefill_token=2.0
    )
    host = 7 + 3 * 6 + 10 * 2 + 2 * 8
    assert terms.add_to(HAND, overlapped=False).execute(step) == kernels + 0.5 + host
    assert terms.add_to(HAND, overlapped=True).execute(step) == kernels + 0.5
    long = replace(terms, host=9999.0).add_to(HAND, overlapped=True)
    assert long.execute(step) == HAND.overhead + 0.5 + 9999 + host - 7
    decodes = terms.add_to(HAND, overlapped=False)
    assert decodes.execute(Step([], 6, 60)) == HAND.execute(Step([], 6, 60)) + 0.5 + 7 + 3 * 6


GRAPHS = Overhead(step=0.8e-3, captured=512)


def with_graphs(name: str) -> tuple[PiecewiseCost, Gpu]:
    """Give a shipped profile's kernels as CUDA graphs launch them, and its GPU."""
    profile = read_profile(PROFILES / f"{name}.yaml")
    assert isinstance(profile.cost, PiecewiseCost)
    return GRAPHS.add_to(profile.cost, overlapped=False), GPUS[str(profile.hardware["gpu"])]


def bound(gpu: Gpu, step: Step) -> float:
    """Give the time below which no GPU of this data sheet can be: its bytes, its FLOPs."""
    pairs = sum(c.tokens * c.start + c.tokens * (c.tokens + 1) / 2 for c in step.prefills)
    linear = LLAMA.linear_parameters(0)
    moving = 2 * (linear + LLAMA.head_parameters) + 131_072 * step.context
    products = 2 * linear * step.tokens
    attention = LLAMA.attention_flops_per_pair * (pairs + step.context)
    return max(moving / gpu.bandwidth, (products + attention) / gpu.bf16_flops)


@pytest.mark.parametrize("name", OF_LLAMA)
def test_shipped_profiles_are_physical(name: str) -> None:
    """No step beats the data sheet; none takes three times as long, but for mixed attention."""
    cost, gpu = with_graphs(name)
    decodes = [Step([], n, n * mean) for n in (1, 8, 64, 256) for mean in (16, 1024, 8192)]
    prompts = [mixed((start, n)) for n in (64, 512, 2048, 8192) for start in (0, 4096)]
    mixtures = [mixed((0, 512 - n), decodes=n, context=n * 1000) for n in (1, 32, 128, 256)]
    for step in (*decodes, *prompts):
        assert 1.1 < cost.execute(step) / bound(gpu, step) < 3.2
    for step in mixtures:
        assert 1.1 < cost.execute(step) / bound(gpu, step) < 5


@pytest.mark.parametrize("name", OF_LLAMA)
def test_the_roofline_comes_near_the_profiles(name: str) -> None:
    """Within 30 % of what was measured, from the data sheet alone."""
    cost, gpu = with_graphs(name)
    guess = GRAPHS.add_to(roofline(LLAMA, gpu), overlapped=False)
    steps = [Step([], 1, 1000), Step([], 64, 64_000), mixed((0, 512)), mixed((0, 4096))]
    steps.append(mixed((0, 448), decodes=64, context=64_000))
    for step in steps:
        assert guess.execute(step) == pytest.approx(cost.execute(step), rel=0.3)


def test_roofline_by_hand() -> None:
    """Decoding one token moves all weights once; a long prompt is bound by its products."""
    gpu = GPUS["H100-80GB"]
    cost = roofline(LLAMA, gpu)
    share = efficiency_of(gpu)
    weights = 2 * LLAMA.linear_parameters(0) / (share.weights * gpu.bandwidth)
    small = 32 * (10e-6 + 2 * (8 * 4096 + 2 * 5120 + 4 * 1024 + 3 * 14_336) / 0.9 / gpu.bandwidth)
    assert cost.dense_seconds(1) == pytest.approx(weights + small, rel=1e-9)
    products = 2 * LLAMA.linear_parameters(0) * 20_000 / (share.compute * gpu.bf16_flops)
    assert cost.dense_seconds(20_000) == pytest.approx(products + 20_000 * (small - 32e-5) + 32e-5)
    assert cost.decode_per_context == pytest.approx(131_072 / (share.cache * gpu.bandwidth))
    assert cost.mixed_per_context == cost.decode_per_context


def test_roofline_of_other_precisions_and_hardware() -> None:
    """Fewer bytes are read sooner, fp8 computes faster where the GPU can, FA2 tiles decodes."""
    h100, a100 = GPUS["H100-80GB"], GPUS["A100-80GB"]
    one, long = 1, 30_000
    full, fp8, int4 = (roofline(LLAMA, h100, dtype=d) for d in ("auto", "fp8", "int4"))
    assert int4.dense_seconds(one) < fp8.dense_seconds(one) < full.dense_seconds(one)
    assert fp8.dense_seconds(long) < 0.85 * full.dense_seconds(long)
    assert int4.dense_seconds(long) == pytest.approx(full.dense_seconds(long))
    assert roofline(LLAMA, a100, dtype="fp8").dense_seconds(long) == pytest.approx(
        roofline(LLAMA, a100).dense_seconds(long)
    )
    assert roofline(LLAMA, a100).mixed_per_context > roofline(LLAMA, a100).decode_per_context
    assert roofline(LLAMA, h100, kv_cache_dtype="fp8").decode_per_context == (
        full.decode_per_context / 2
    )


def test_a_roofline_says_whether_its_gpu_was_measured() -> None:
    """The name that reports show tells a scaled roofline from one of the data sheet alone."""
    assert roofline(LLAMA, GPUS["H200"]).name == "roofline scaled to H200 kernels"
    assert roofline(LLAMA, GPUS["H100-PCIe"]).name == "roofline scaled to H100-80GB kernels"
    assert roofline(LLAMA, GPUS["A10G"]).name == "roofline"
    pcie, nvlink = (efficiency_of(GPUS[name]) for name in ("A10G", "A100-40GB"))
    assert replace(pcie, link=USUAL.link, link_latency=USUAL.link_latency) == USUAL
    through_host = efficiency_of(GPUS["RTX-PRO-6000"]).link * GPUS["RTX-PRO-6000"].link_bandwidth
    assert pcie.link * GPUS["A10G"].link_bandwidth == pytest.approx(through_host)
    assert nvlink == efficiency_of(GPUS["A100-80GB"])


def test_roofline_of_two_gpus() -> None:
    """Each does half the products and reads half the cache; the sums are passed around."""
    gpu = GPUS["H100-80GB"]
    one, two = (roofline(LLAMA, gpu, tensor_parallel_size=n) for n in (1, 2))
    assert two.decode_per_context == one.decode_per_context / 2
    share = efficiency_of(gpu)
    link = share.link * gpu.link_bandwidth
    passed = 2 * 32 * (share.link_latency + 20_000 * 4096 * 2 / link)
    assert one.dense_seconds(20_000) / 2 < two.dense_seconds(20_000) - passed
    assert two.dense_seconds(20_000) - passed < 0.55 * one.dense_seconds(20_000)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        roofline(LLAMA, gpu, tensor_parallel_size=3)


def test_roofline_of_experts() -> None:
    """One token reads the two experts it chooses, many tokens all eight."""
    model, gpu = load_model("mixtral-8x7b"), GPUS["H200"]
    cost = roofline(model, gpu)
    read = efficiency_of(gpu).weights * gpu.bandwidth

    def seconds(experts: float) -> float:
        return 2 * model.linear_parameters(experts) / read

    assert seconds(2) < cost.dense_seconds(1) < 1.1 * seconds(2)
    assert seconds(7.9) < cost.dense_seconds(32) < 1.1 * seconds(8)
