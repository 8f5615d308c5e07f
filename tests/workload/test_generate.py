"""Generated workloads: lengths, prefixes, sessions, clients, and what is refused."""

from dataclasses import fields
from math import ceil, floor, inf

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.workload.workload import Workload
from tests.support.workloads import generate, generator_errors


def columns(w: Workload) -> dict[str, object]:
    """All that two equal workloads have in common, as comparable values."""
    arrays = {"arrival", "prompt_tokens", "output_tokens", "after", "delay", "max_tokens"}
    values = {name: getattr(w, name) for name in [one.name for one in fields(w)]}
    return {k: v.tobytes() if k in arrays and v is not None else v for k, v in values.items()}


def test_defaults():
    """By default 1000 requests of 1024 and 128 tokens come at 0, as in vLLM bench."""
    w = generate({})
    assert len(w) == 1000
    assert w.arrival.tolist() == [0.0] * 1000
    assert set(w.prompt_tokens.tolist()) == {1024}
    assert set(w.output_tokens.tolist()) == {128}
    assert w.segments is w.client is w.after is w.delay is w.max_concurrency is None
    assert (w.request_rate, w.burstiness) == (inf, 1.0)


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0, 0.99), st.integers(0, 99))
def test_range_ratio(inputs, outputs, ratio, seed):
    """Lengths lie from floor(n (1 - r)) to ceil(n (1 + r)), and outputs have 1 token or more."""
    if floor(inputs * (1 - ratio)) < 1:
        assert generator_errors(input_len=inputs, range_ratio=ratio)[0].startswith("input_len: ")
        return
    spec = {"num_prompts": 40, "input_len": inputs, "output_len": outputs, "range_ratio": ratio}
    w = generate(spec, seed)
    w.check()
    assert w.prompt_tokens.min() >= floor(inputs * (1 - ratio))
    assert w.prompt_tokens.max() <= ceil(inputs * (1 + ratio))
    assert w.output_tokens.min() >= max(floor(outputs * (1 - ratio)), 1)
    assert w.output_tokens.max() <= ceil(outputs * (1 + ratio))


def test_range_ratio_reaches_both_ends():
    """Every whole number of a range is drawn alike; inputs and outputs may differ in range."""
    spec = {"input_len": 10, "output_len": 4, "range_ratio": {"input": 0.2, "output": 0.5}}
    w = generate(spec | {"num_prompts": 50_000})
    for lengths, values in ((w.prompt_tokens, range(8, 13)), (w.output_tokens, range(2, 7))):
        found, counts = np.unique(lengths, return_counts=True)
        assert found.tolist() == list(values)
        assert counts == pytest.approx(np.full(5, 10_000), rel=0.05)


def test_prefix_len():
    """`prefix_len` tokens come before the input, the same ones in all prompts."""
    w = generate({"num_prompts": 3, "prefix_len": 100, "input_len": 20})
    assert w.prompt_tokens.tolist() == [120] * 3
    assert w.segments == [((("shared",), 100), (("in", i), 20)) for i in range(3)]
    w.check()


def test_prompt_of_nothing_but_prefix():
    """With a prefix the input may be empty, as in vLLM."""
    w = generate({"num_prompts": 2, "prefix_len": 7, "input_len": 0})
    assert w.segments == [((("shared",), 7),)] * 2
    w.check()


def test_prefix_groups():
    """Each prefix begins equally many prompts, in an order that is not theirs."""
    groups = {"num_prefixes": 4, "prefix_len": 30}
    w = generate({"num_prompts": 402, "input_len": 5, "prefix_groups": groups})
    names = [parts[0] for parts in w.segments]
    assert {count for _, count in names} == {30}
    drawn = [name[1] for name, _ in names]
    assert sorted(np.bincount(drawn).tolist()) == [100, 100, 101, 101]
    assert drawn != sorted(drawn)
    assert drawn[:8] != [0, 1, 2, 3] * 2
    assert set(w.prompt_tokens.tolist()) == {35}
    w.check()


def test_skewed_prefix_groups():
    """With `zipf` 1 the k-th prefix is drawn 1 / k as often as the first."""
    groups = {
        "num_prefixes": 3,
        "prefix_len": {"kind": "uniform", "low": 5, "high": 500},
        "zipf": 1,
    }
    w = generate({"num_prompts": 60_000, "prefix_groups": groups, "prefix_len": 9})
    names = [parts[1] for parts in w.segments]
    assert len(set(names)) == 3  # one length for each prefix
    shares = np.bincount([name[1] for name, _ in names]) / len(w)
    assert shares == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.01)
    assert {parts[0] for parts in w.segments} == {(("shared",), 9)}
    w.check()


def trace(path: str, form: str | None) -> Workload:
    """Four requests whose output is ten times their input."""
    assert (path, form) == ("some.csv", "azure")
    lengths = np.array([1, 2, 3, 4])
    return Workload(np.zeros(4), lengths, lengths * 10)


def test_joint_lengths():
    """`lengths` draws whole rows of a trace, so that inputs and outputs stay together."""
    spec = {"num_prompts": 8000, "lengths": {"path": "some.csv", "format": "azure"}}
    w = generate(spec, 0, trace)
    assert (w.output_tokens == w.prompt_tokens * 10).all()
    assert np.bincount(w.prompt_tokens)[1:] == pytest.approx(np.full(4, 2000), rel=0.1)


def test_lengths_of_two_columns():
    """`empirical` draws inputs and outputs apart."""
    column = {"kind": "empirical", "path": "some.csv", "format": "azure"}
    spec = {"input_len": column | {"column": "input"}, "output_len": column | {"column": "output"}}
    w = generate(spec, 0, trace)
    assert set(w.prompt_tokens.tolist()) == {1, 2, 3, 4}
    assert set(w.output_tokens.tolist()) == {10, 20, 30, 40}
    assert len(set(zip(w.prompt_tokens.tolist(), w.output_tokens.tolist(), strict=True))) == 16


TURNS = {"kind": "uniform", "low": 1, "high": 5}


THINK = {"kind": "exponential", "mean": 10}


def test_session_word_by_word():
    """A turn says all that was said before it, and then something new."""
    sessions = {"turns": 3, "think_time": 2.5}
    spec = {"num_prompts": 5, "input_len": 10, "output_len": 4, "prefix_len": 2, "request_rate": 1}
    w = generate(spec | {"sessions": sessions, "burstiness": inf})
    w.check()
    assert w.prompt_tokens.tolist() == [12, 26, 40, 12, 26]
    assert np.array_equal(w.arrival, [1, np.nan, np.nan, 2, np.nan], equal_nan=True)
    assert w.after.tolist() == [-1, 0, 1, -1, 3]
    assert w.delay.tolist() == [0, 2.5, 2.5, 0, 2.5]
    first, second = ((("shared",), 2), (("in", 0), 10)), ((("out", 0), 4), (("in", 1), 10))
    assert w.segments[:3] == [
        first,
        first + second,
        first + second + ((("out", 1), 4), (("in", 2), 10)),
    ]
    assert w.segments[3] == ((("shared",), 2), (("in", 3), 10))


def test_a_turn_repeats_what_was_said_of_an_answer_that_was_cut():
    """Answers of 4, cut at 3 and not at 9: prompts of 10, 10 + 3 + 10 and 23 + 4 + 10."""
    limits = {"kind": "cycle", "values": [3, 9]}
    spec = {"num_prompts": 3, "input_len": 10, "output_len": 4, "max_tokens": limits}
    w = generate(spec | {"sessions": {"turns": 3}})
    assert w.max_tokens.tolist() == [3, 9, 3]
    assert w.output_tokens.tolist() == [4, 4, 4]
    assert w.prompt_tokens.tolist() == [10, 23, 37]
    w.check()


@given(st.integers(1, 60), st.integers(0, 99))
def test_sessions(count, seed):
    """`num_prompts` counts turns; the rate is that of starts; every prompt holds the last one."""
    spec = {"num_prompts": count, "request_rate": 2.0, "range_ratio": 0.5, "clients": 3}
    spec |= {"sessions": {"turns": TURNS, "think_time": THINK}, "prefix_groups": {}}
    w = generate(spec, seed)
    w.check()
    assert len(w) == count
    starts = np.flatnonzero(w.after < 0)
    assert np.diff(starts, append=count).max() <= 5
    assert w.duration == pytest.approx(len(starts) / 2.0)
    for i in np.flatnonzero(w.after >= 0).tolist():
        last = w.segments[i - 1]
        answer = (("out", i - 1), int(w.output_tokens[i - 1]))
        assert w.segments[i] == (*last, answer, w.segments[i][-1])
        assert w.segments[i][-1][0] == ("in", i)
        assert w.client[i] == w.client[i - 1]


def test_think_times():
    """Think times follow their distribution, in seconds and not rounded."""
    sessions = {"turns": 50, "think_time": THINK}
    w = generate({"num_prompts": 20_000, "sessions": sessions})
    delays = w.delay[w.after >= 0]
    assert delays.mean() == pytest.approx(10, rel=0.03)
    assert np.count_nonzero(delays % 1) > 19_000


def test_clients():
    """A number of clients share the requests alike, weights as they say."""
    even = generate({"num_prompts": 30_000, "clients": 3}).client
    assert [even.count(f"client-{k}") / 30_000 for k in range(3)] == pytest.approx(
        [1 / 3] * 3, abs=0.02
    )
    skewed = generate({"num_prompts": 30_000, "clients": [3, 0, 1.0]}).client
    assert set(skewed) == {"client-0", "client-2"}
    assert skewed.count("client-0") / 30_000 == pytest.approx(0.75, abs=0.02)


def test_closed_loop():
    """`max_concurrency` is handed on."""
    assert generate({"max_concurrency": 7}).max_concurrency == 7


RICH = {
    "num_prompts": 200,
    "request_rate": 5.0,
    "input_len": {"kind": "lognormal", "median": 300, "sigma": 1},
    "output_len": {"kind": "zipf", "alpha": 1.1, "high": 500},
    "prefix_groups": {"num_prefixes": 5, "prefix_len": TURNS, "zipf": 1},
    "sessions": {"turns": TURNS, "think_time": THINK},
    "clients": 4,
}


def test_same_seed_same_workload():
    """One seed makes one workload, to the last bit; another seed another one."""
    assert columns(generate(RICH, 3)) == columns(generate(RICH, 3))
    assert columns(generate(RICH, 3))["arrival"] != columns(generate(RICH, 4))["arrival"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (
            {"request_rate": 9.0, "burstiness": 3.0},
            "prompt_tokens output_tokens client delay after",
        ),
        ({"input_len": TURNS}, "arrival output_tokens client delay after"),
        ({"output_len": TURNS}, "arrival client delay after"),
        ({"prefix_groups": None}, "arrival output_tokens client delay after"),
        ({"clients": None}, "arrival prompt_tokens output_tokens delay after segments"),
        (
            {"sessions": {"turns": TURNS}},
            "arrival prompt_tokens output_tokens client after segments",
        ),
        ({"sessions": None}, "output_tokens"),
        ({"max_tokens": 99}, "arrival output_tokens client delay after"),
    ],
)
def test_streams_are_apart(change, kept):
    """To change one concern leaves the draws of the others as they were."""
    before, after = columns(generate(RICH)), columns(generate(RICH | change))
    assert before != after
    same = {name for name in before if before[name] == after[name]}
    assert set(kept.split()) <= same


def test_numbers_that_yaml_takes_for_texts():
    """YAML reads `inf` and `1e-3` as texts; they are taken for the numbers they look like."""
    spec = yaml.safe_load("{request_rate: inf, sessions: {turns: 2, think_time: 1e-3}}")
    w = generate(spec)
    assert w.arrival[0] == 0.0
    assert set(w.delay.tolist()) == {0.0, 0.001}


def test_demo_is_like_azure(request):
    """The demonstration has the rate, burstiness and lengths that its comments claim."""
    path = request.config.rootpath / "scenarios" / "demo.yaml"
    spec = yaml.safe_load(path.read_text())["workload"] | {"num_prompts": 100_000}
    w = generate(spec)
    between = np.diff(w.arrival)
    assert 1 / between.mean() == pytest.approx(5.53, rel=0.001)
    assert between.std() / between.mean() == pytest.approx(1.094, rel=0.02)
    for lengths, mean, deviation in ((w.prompt_tokens, 1155, 1112), (w.output_tokens, 212, 167)):
        assert lengths.mean() == pytest.approx(mean, rel=0.01)
        assert lengths.std() == pytest.approx(deviation, rel=0.01)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"request_rate": 0}, "request_rate: must be more than 0, not 0"),
        ({"burstiness": -1.0}, "burstiness: must be more than 0, not -1.0"),
        ({"num_prompts": 0}, "num_prompts: must be at least 1, not 0"),
        ({"num_prompts": 1.5}, "num_prompts: must be a whole number such as 64, not 1.5"),
        ({"num_prompts": True}, "num_prompts: must be a whole number such as 64, not true"),
        ({"rescale": "no"}, "rescale: must be true or false, not 'no'"),
        ({"max_concurrency": 0}, "max_concurrency: must be at least 1, not 0"),
        ({"request_rat": 3}, "request_rat: unknown key; did you mean request_rate?"),
        ({"request_rate": float("nan")}, "request_rate: must be a number, not nan"),
        ({"input_len": 0}, "input_len: 0 tokens would be possible, but 1 is the least"),
        ({"input_len": 3.5}, "input_len: 3.5 is not a whole number"),
        ({"input_len": "long"}, "input_len: must be a number, not 'long'"),
        ({"output_len": 0}, "output_len: 0 is less than 1 token"),
        ({"range_ratio": 1}, "range_ratio: must be less than 1, not 1"),
        ({"range_ratio": {"input": 0.1}}, "range_ratio.output: is missing"),
        (
            {"input_len": TURNS, "range_ratio": 0.1},
            "input_len: must be a number where there is a range_ratio",
        ),
        ({"prefix_len": -1}, "prefix_len: must be at least 0, not -1"),
        (
            {"prefix_groups": {"num_prefixes": 0}},
            "prefix_groups.num_prefixes: must be at least 1, not 0",
        ),
        (
            {"prefix_groups": 3},
            "prefix_groups: must be a mapping of keys, as {num_prefixes: 10, zipf: 0.0}, not 3",
        ),
        (
            {"prefix_groups": {"prefix_len": 0}},
            "prefix_groups.prefix_len: 0 is not a whole number of 1 or more",
        ),
        ({"sessions": {}}, "sessions.turns: is missing"),
        (
            {"sessions": {"turns": 2, "think_time": -1}},
            "sessions.think_time: must be 0 or more, and finite, not -1",
        ),
        ({"clients": 0}, "clients: must be at least 1, not 0"),
        ({"clients": [0, 0]}, "clients: must have a weight above 0"),
        ({"clients": [1, -1]}, "clients.1: must be at least 0, not -1"),
        (
            {"clients": 2, "priorities": [1, 0.5]},
            "priorities.1: must be a whole number such as 64, not 0.5",
        ),
        ({"models": [1, 2]}, "models: must be a mapping of keys, not [1, 2]"),
        ({"models": {"a": 0}}, "models: must have a weight above 0"),
        ({"ramp_up_start_rps": 3}, "ramp_up_strategy: missing, but there is a rate to ramp up"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 3},
            "ramp_up_end_rps: missing, as ramp_up_strategy is given",
        ),
        ({"max_tokens": 0}, "max_tokens: 0 is not a whole number of 1 or more"),
        ({"max_tokens": -1}, "max_tokens: -1 is not a whole number of 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number of 1 or more"),
        ({"sessions": {"turns": 2.5}}, "sessions.turns: 2.5 is not a whole number of 1 or more"),
        ({"max_tokens": True}, "max_tokens: must be a number, not true"),
        ({"lengths": {"format": "azure"}}, "lengths.path: is missing"),
        ({"lengths": {"path": "x"}}, "lengths.path: no reader of traces was given"),
        ({"lengths": {"path": "x"}, "input_len": 3}, "input_len: cannot be given with lengths"),
        (
            {"input_len": {"kind": "empirical", "path": "x", "column": "input"}},
            "input_len.path: no reader of traces was given",
        ),
    ],
)
def test_refusals(spec, message):
    """Each wrong key is named, with what is wrong with it, and nothing else."""
    assert generator_errors(**spec) == [message]


def test_all_refusals_at_once():
    """All wrong keys come out together, inner ones by their whole path."""
    parts = [{"weight": 1, "kind": "uniform", "low": 5, "high": 2}, {"kind": "fixed", "value": 1}]
    wrong = generator_errors(
        request_rate=-1, num_prompts=0, output_len={"kind": "mixture", "parts": parts}, sessions=7
    )
    assert wrong == [
        "request_rate: must be more than 0, not -1",
        "num_prompts: must be at least 1, not 0",
        "output_len.parts.0.low: 5 is more than high, 2",
        "output_len.parts.1.weight: null is not a number above 0",
        "sessions: must be a mapping of keys, as {turns: <turns of a session>}, not 7",
    ]


def test_clients_have_names_of_the_users_own():
    """The same requests are theirs as of clients by number; a name is a word."""
    named = generate({"num_prompts": 50, "clients": {"paid": 1, "batch": 3}, "priorities": [0, 7]})
    numbered = generate({"num_prompts": 50, "clients": [1, 3]})
    own = {"client-0": "paid", "client-1": "batch"}
    assert named.client == [own[name] for name in numbered.client]
    assert named.priority.tolist() == [{"paid": 0, "batch": 7}[name] for name in named.client]
    assert {*generate({"num_prompts": 5, "clients": {1: 2}}).client} == {"1"}
    for wrong in ({"a": 0}, {"a": -1, "b": 2}, {}):
        assert generator_errors(clients=wrong)[0].startswith("clients")


def test_priorities_are_those_of_the_clients():
    """One for each client, and nothing else changes."""
    spec = {"num_prompts": 50, "clients": [1, 3]}
    w, without = generate(spec | {"priorities": [0, 7]}), generate(spec)
    assert w.priority.tolist() == [{"client-0": 0, "client-1": 7}[name] for name in w.client]
    assert set(w.priority.tolist()) == {0, 7}
    assert without.priority is None
    assert columns(without) == columns(w) | {"priority": None}
    for wrong in ({"priorities": [0]}, {"priorities": [0, 1.5]}, {"priorities": 3}):
        assert generator_errors(**(spec | wrong))[0].startswith("priorities")
    message = "priorities: needs clients: how urgent the requests of each are"
    assert generator_errors(priorities=[0]) == [message]
