"""Cost models as files and as mappings: profiles, overheads, and what is wrong with them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.build.settle_cost import load_cost
from simulator.core.engine_config import EngineConfig
from simulator.core.request import Step
from simulator.costs.linear import LinearCost
from simulator.costs.overhead import Overhead
from simulator.costs.piecewise import PiecewiseCost
from simulator.costs.profile import (
    PROFILES,
    named_hardware,
    read_profile,
    shipped_profile,
    shipped_profiles,
)
from simulator.models.gpus import GPUS
from simulator.models.load import load_model
from simulator.scenario.load import load_scenario
from simulator.scenario.resolve import resolve
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.costs import HAND, cost_of, mixed, overhead_of, with_overhead
from tests.support.logs import logged
from tests.support.scenarios import errors

LLAMA = load_model("llama-3-8b")


def test_inline_costs() -> None:
    """A mapping with `kind` is enough; numbers that YAML took for text are numbers."""
    spec = {"kind": "linear", "base": "1e-3", "per_token": 2, "per_context": 0.0}
    found = cost_of(spec)
    assert isinstance(found, LinearCost)
    assert (found.base, found.per_token, found.per_context) == (1e-3, 2, 0.0)
    assert cost_of({"kind": "linear", "base": 1}).execute(Step([], 9, 99)).seconds == 1.0
    assert (
        cost_of({"kind": "piecewise", "dense": [[1, 0.5]]}).execute(Step([], 1, 1)).seconds == 0.5
    )


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
            {"kind": ["linear"]},
            [r"cost.kind: must be linear, piecewise, piecewise-split, roofline, not \['linear'\]"],
        ),
        (
            {"kind": "linear", "base": "x", "per_token": 1.0, "per_contest": 1.0},
            [
                "cost.per_contest: unknown key",
                "cost.base: must be a number, not 'x'",
            ],
        ),
        (
            {"kind": "linear", "base": "x", "per_token": -1, "per_contest": 1.0},
            [
                "cost.per_contest: unknown key",
                "cost.base: must be a number, not 'x'",
                "cost.per_token: must be from 0 to 1,000,000, not -1 .s.",
            ],
        ),
        ({"kind": "linear", "per_token": 1.0}, ["cost.base: is missing"]),
        (
            {"kind": "linear", "base": 1000001},
            ["cost.base: must be from 0 to 1,000,000, not 1000001"],
        ),
        ({"kind": "piecewise", "dense": [[1, 1e7]]}, ["cost.dense: must be rows"]),
        ({"kind": "piecewise", "dense": [[1, 1.0], [1e300, 2.0]]}, ["cost.dense: must be rows"]),
        (
            {"kind": "linear", "base": -1, "per_token": float("inf"), "per_context": 1.0},
            ["cost.base: must be from 0 to", "cost.per_token: must be from 0 to"],
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
        (
            {"kind": "roofline", "base": 1},
            ["cost.base: unknown key; there is kind, overhead, residuals"],
        ),
        ({"profile": "llama-3-8b.a100.bf16", "x": 1}, ["cost.x: 1 cannot be given beside"]),
        ({"profile": 3}, ["cost.profile: must be a name or a path, not 3"]),
        ({"profile": "llama-3-8b.a100"}, ["cost.profile: no file .*llama-3-8b.a100.bf16"]),
    ],
)
def test_bad_specs_are_told_by_field(spec: dict[str, object], messages: list[str]) -> None:
    """Every wrong key has its line, and begins with the scenario's field."""
    with pytest.raises(ValueError, match="cost") as caught:
        cost_of(spec, gpu="H200")
    lines = str(caught.value).split("\n")
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert re.match(message, line)


def test_a_profile_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    """Shipped by name; one's own beside the scenario."""
    text = "cost: {kind: linear, base: 1e-3, per_token: 0, per_context: 0}\nrange: {tokens: [1, 9]}"
    (tmp_path / "mine.yaml").write_text(text)
    mine = load_cost(
        {"profile": "mine.yaml"}, tmp_path, model=LLAMA, gpu=GPUS["L4"], engine=EngineConfig()
    )
    assert (mine.execute(Step([], 9, 99)).seconds, mine.name) == (1e-3, "mine")
    assert len(mine.range_warnings(logged(decodes=[10]))) == 1
    assert cost_of("llama-3-8b.a100.bf16").name == "llama-3-8b.a100.bf16"


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
        [f"{path}:5", "cost.head"],
        [f"{path}:7", "range.tokens"],
        [f"{path}:8", "range.times"],
    ]
    path.write_text("- 1\n")
    with pytest.raises(HeadwayError, match=r"bad.yaml:1: must be a mapping"):
        read_profile(path)


def test_a_profile_of_something_else_warns() -> None:
    """Model and precision that differ are named once; 16-bit dtypes are alike."""
    name = "llama-3-8b.a100.bf16"
    a100 = GPUS["A100-80GB"]
    load_cost(
        name, model=load_model("llama-3.1-8b"), gpu=a100, engine=EngineConfig(dtype="float16")
    )
    engine = EngineConfig(tensor_parallel_size=2, quantization="int4")
    with pytest.warns(
        HeadwayWarning,
        match=f"{name} was fitted to llama-3-8b, not llama-2-7b; "
        "tensor_parallel_size 1, not 2; dtype bfloat16, not int4$",
    ):
        load_cost(name, model=load_model("llama-2-7b"), gpu=GPUS["H200"], engine=engine)


def test_the_shipped_profile_of_a_scenario() -> None:
    """Found by the model's shape, the GPU and the precision; else there is none."""
    engine = EngineConfig()
    found = shipped_profile(load_model("llama-3.1-8b"), GPUS["H100-80GB"], engine)
    assert found == "llama-3-8b.h100.bf16"
    assert shipped_profile(LLAMA, GPUS["L4"], engine) is None
    assert shipped_profile(load_model("qwen3-0.6b"), GPUS["H200"], engine) is None
    assert shipped_profile(LLAMA, GPUS["H200"], EngineConfig(kv_cache_dtype="fp8")) is None
    large = load_model("llama-3.1-70b")
    engine = EngineConfig(tensor_parallel_size=4, quantization="fp8", kv_cache_dtype="fp8_e4m3")
    found = shipped_profile(large, GPUS["H200"], engine)
    assert found == "llama-3-70b.h200-tp4.fp8-kvfp8"
    engine = EngineConfig(tensor_parallel_size=4, quantization="fp8")
    found = shipped_profile(large, GPUS["H200"], engine)
    assert found == "llama-3-70b.h200-tp4.fp8"
    engine = EngineConfig(tensor_parallel_size=2, dtype="float16")
    found = shipped_profile(load_model("codellama-34b"), GPUS["A100-80GB"], engine)
    assert found == "codellama-34b.a100-tp2.bf16"


@pytest.mark.medium
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
    whole = cost_of(name, generation_config="vllm")
    assert isinstance(kernels, PiecewiseCost)
    assert kernels.overhead == 0.0
    added = whole.execute(Step([], 8, 8000)).seconds - kernels.execute(Step([], 8, 8000)).seconds
    assert added == pytest.approx(0.75e-3 + 8 * 20e-6)
    with pytest.raises(ValueError, match=r"cost\.overhead: no engine 'vlm'; there are vllm"):
        cost_of({"profile": name, "overhead": "vlm"})


@pytest.mark.parametrize("cost", ["profile: llama-3-8b.a100.bf16", "kind: roofline"])
def test_a_scenario_sets_the_hosts_work_and_async_scheduling_hides_it(write, cost: str) -> None:
    """8 sequences: 1 ms and 0.5 ms each, 5 ms; a longer host of 1 s and 0.5 ms each shows alone."""
    engine = "engine: {async_scheduling: ASYNC}"
    text = f"model: llama-3-8b\n{engine}\ncost: {{{cost}, overhead: X}}\n"
    step = Step([], 8, 8000)

    def seconds(overhead: str, hidden: bool) -> float:
        scenario = text.replace("X", overhead).replace("ASYNC", str(hidden).lower())
        return resolve(load_scenario(write(scenario))).cost.execute(step).seconds

    own = {hidden: overhead_of(asynchronous=hidden) for hidden in (False, True)}
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
        found.append(resolve(scenario).cost.execute(Step([], 1, 1)).seconds)
    assert found == [8.0, 5.0]
    told = text.replace("ASYNC", "true").replace("3.0", "3.0, overlapped: false")
    assert resolve(load_scenario(write(told))).cost.execute(Step([], 1, 1)).seconds == 8.0


@pytest.mark.parametrize(
    ("overhead", "told"),
    [
        ("{hots: 1}", "cost.overhead.hots: unknown key; did you mean host?"),
        (
            "{host: -1}",
            "cost.overhead.host: must be from 0 to 1,000,000, not -1 (s)",
        ),
        ("{captured: -1}", "cost.overhead.captured: must be at least 0, not -1"),
        (
            "[1]",
            "cost.overhead: must be a mapping of keys, as {step: 0.0, per_sequence: 0.0}, not [1]",
        ),
        ("vlm", "cost.overhead: no engine 'vlm'; there are vllm"),
    ],
)
def test_wrong_overheads_are_told(write, overhead: str, told: str) -> None:
    assert errors(write(f"cost: {{kind: roofline, overhead: {overhead}}}\n"))[0].endswith(told)


def test_vllms_graphs_pad_decodes() -> None:
    """9 decodes run in the graph of 16, 300 in that of 304, 600 without one."""
    sizes = overhead_of().capture_sizes
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, 512)
    cost = with_overhead(Overhead(captured=512), HAND, overlapped=False)
    for count, size in ((9, 16), (300, 304), (600, 600)):
        assert cost.execute(Step([], count, 0)).seconds - 2 * count == HAND.execute(
            Step([], size, 0)
        ).seconds - (2 * size)


def test_the_hosts_work_is_waited_for_or_hidden() -> None:
    """6 sequences of which 2 are prompts of 8 tokens; hidden, only what is longer shows."""
    step = mixed((0, 3), (0, 5), decodes=4, context=400)
    kernels = HAND.execute(step).seconds
    terms = Overhead(
        step=0.5, host=7.0, host_per_sequence=3.0, host_per_prefill=10.0, host_per_prefill_token=2.0
    )
    host = 7 + 3 * 6 + 10 * 2 + 2 * 8
    assert (
        with_overhead(terms, HAND, overlapped=False).execute(step).seconds == kernels + 0.5 + host
    )
    assert with_overhead(terms, HAND, overlapped=True).execute(step).seconds == kernels + 0.5
    long = with_overhead(replace(terms, host=9999.0), HAND, overlapped=True)
    assert long.execute(step).seconds == HAND.overhead + 0.5 + 9999 + host - 7
    decodes = with_overhead(terms, HAND, overlapped=False)
    assert (
        decodes.execute(Step([], 6, 60)).seconds
        == HAND.execute(Step([], 6, 60)).seconds + 0.5 + 7 + 3 * 6
    )
