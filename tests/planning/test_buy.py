"""What to buy: theory drops nothing that holds, and the answer is the cheapest that holds."""

import json
import re
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.cli.main import main
from headway.planning.buy import Answer, line, orders
from headway.planning.buy_report import buy_lines, buying_problem, wanted_gpus
from headway.planning.candidate import resources
from headway.planning.market import FEW, Market, Offer
from headway.planning.measure import Change, measure_run
from headway.planning.plan import Runs
from headway.planning.problem import PlanOptions
from headway.planning.search import SearchResult
from headway.planning.theory import (
    MARGIN,
    Replica,
    best_sizes,
    most_requests,
    rates_apart,
    too_slow,
)
from headway.planning.verdict import Trial
from simulator import load_scenario, run
from simulator.core.executor import Timing
from simulator.costs.noise import QUANTILE
from simulator.costs.roofline import UNMEASURED
from simulator.diagnosis.feasibility import Traffic
from simulator.models.load import load_model
from simulator.models.quantization import Format, Quantization, Rule
from simulator.results.service_levels import parse_slo
from simulator.scenario.draw import make_workload
from simulator.scenario.resolve import resolve
from simulator.scenario.scenario import Scenario
from simulator.util.errors import HeadwayError, HeadwayWarning
from tests.support.engines import workload

SHOP = """name: shop
model: llama-3-8b
workload: {num_prompts: 400, request_rate: 8, input_len: 1000, output_len: 100, range_ratio: 0.5}
slo: ["p90_ttft_ms<=1000"]
"""


def replica(scenario: Scenario) -> tuple[Replica, Traffic]:
    parts, traffic = resolve(scenario), Traffic.of(scenario, make_workload(scenario))
    return Replica(scenario.engine, parts.model, parts.gpu, parts.cost), traffic


@pytest.mark.parametrize("lengths", [(2000, 20), (1000, 200), (50, 400)])
@pytest.mark.parametrize("gpu", ["L40S", "H100-80GB"])
def test_theory_is_no_less_than_what_a_replica_serves(gpu: str, lengths: tuple[int, int]) -> None:
    """Of a burst; and not far more."""
    keys = [f"workload.input_len={lengths[0]}", f"workload.output_len={lengths[1]}"]
    keys += [f"gpu.name={gpu}", "workload.request_rate=inf", "workload.num_prompts=600"]
    scenario = load_scenario({"model": "llama-3-8b", "name": "burst"}, keys)
    one, traffic = replica(scenario)
    sizes = scenario.engine.max_num_batched_tokens, scenario.engine.max_num_seqs
    most = most_requests(one, traffic, [], 0.0, sizes=sizes)
    served = run(scenario).summary()["request_throughput"]
    assert served <= MARGIN * most
    assert served >= 0.4 * most


def test_an_answer_of_one_token_takes_no_decode(write) -> None:
    """No bound on the time between tokens speaks of it."""
    for tokens in (1, 2):
        keys = ["gpu.name=H100", "workload.range_ratio=0", f"workload.output_len={tokens}"]
        one, traffic = replica(load_scenario(write(SHOP), keys))
        strict = [parse_slo("mean_tpot_ms<=0.001")]
        most = most_requests(one, traffic, strict, 0.0, sizes=(2048, 64))
        assert (most > 0) == (tokens == 1)


def test_bounds_that_one_request_alone_breaks(write) -> None:
    """A decode step of Llama-3-8B reads 16 GB: 5 ms on an H100; a prompt of 1,000 takes longer."""
    one, traffic = replica(load_scenario(write(SHOP), ["gpu.name=H100"]))
    assert not too_slow(one, traffic, [parse_slo("p90_tpot_ms<=50")], 0.0)
    (token,) = too_slow(one, traffic, [parse_slo("p90_tpot_ms<=4")], 0.0)
    assert str(token).startswith("a token alone")
    (prompt,) = too_slow(one, traffic, [parse_slo("p90_ttft_ms<=10")], 0.0)
    assert "alone takes" in str(prompt)
    assert not too_slow(one, traffic, [parse_slo("p90_ttft_ms<=10")], 0.9)  # a cache may know it


def test_smaller_steps_where_they_must_be_short(write) -> None:
    """Steps of the default budget take longer than a bound on ITL allows."""
    one, traffic = replica(load_scenario(write(SHOP), ["gpu.name=L40S"]))
    free = best_sizes(one, traffic, [], 0.0)
    short = best_sizes(one, traffic, [parse_slo("p99_itl_ms<=60")], 0.0)
    assert short.tokens <= free.tokens
    assert 0 < short.rate < free.rate


@pytest.mark.medium
def test_the_cheapest_that_holds(write, tmp_path: Path, capsys, monkeypatch) -> None:
    """One command for GPUs, precision and replicas; the files are those of any plan."""
    phases: list[str] = []
    monkeypatch.setattr(Runs, "enter", lambda self, phase: phases.append(phase.split(",")[0]))
    command = ["plan", str(write(SHOP)), "--buy", "--out", str(tmp_path), "--min-duration", "30"]
    command += ["--max-duration", "60", "--jobs", "1"]
    assert main([*command, "--gpus", "L40S,A100-80GB"]) == 0
    assert phases[:3] == ["First look", "Router", "The best two"]
    assert phases[3] == "What 10 % more load would change"
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("Buy ")
    assert [line for line in told if line.startswith("Second best: ")]
    assert len([line for line in told if line.startswith("Then ")]) == 3
    change = told[told.index("The best order with:") :]
    for words in ("10 % more load", "20 % longer answers", "steps ", "20 % dearer"):
        assert any(words in line for line in change), words
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["answer"][0] == told[0]
    held = [row for row in report["candidates"] if row["holds"]]
    assert held[0]["dollars_per_hour"] <= 1.02 * min(row["dollars_per_hour"] for row in held)
    assert len([line for line in told if line.startswith("  means: TTFT ")]) == 5
    assert report["best"] == 0
    best = load_scenario(tmp_path / "best.yaml")
    assert best.cluster is not None
    assert best.cluster.replicas == held[0]["at"]
    # Each that was dropped would cost more, were it as fast as theory says at most.
    dropped = [row for row in report["candidates"] if row["not_tried"]]
    assert dropped
    assert all("at least" in row["not_tried"] for row in dropped)
    few = best.model_copy(update={"cluster": best.cluster.model_copy(update={"replicas": 1})})
    if best.cluster.replicas > 1:
        values = measure_run(few, [parse_slo("p90_ttft_ms<=1000")], steady=True)
        assert values.get("broken") or values["p90_ttft_ms"] > 1000 or values["growing"]


def test_a_change_is_of_answers_and_steps(write) -> None:
    """Twice the answers; steps by two standard deviations."""
    scenario = load_scenario(write(SHOP), ["workload.request_rate=0.5", "workload.num_prompts=50"])
    as_it_is, longer, slower = (
        measure_run(scenario, [], steady=False, change=change)
        for change in (Change(), Change(answers=2.0), Change(steps=2.0))
    )
    assert longer["mean_e2el_ms"] == pytest.approx(2 * as_it_is["mean_e2el_ms"], rel=0.15)
    assert as_it_is["mean_tpot_ms"] < slower["mean_tpot_ms"] < 1.5 * as_it_is["mean_tpot_ms"]


@pytest.mark.many
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--buy", "--vary", "gpu.name=H100"], "--vary: cannot be used with --buy"),
        (["--gpus", "H100"], "--gpus: needs --buy"),
        (["--by-data-sheet"], "--by-data-sheet: needs --buy"),
        (["--buy", "--gpus", "H100,MI300X=2.5"], "--gpus: MI300X has no measured kernels (95 % of"),
        (["--buy", "--gpus", "H300"], "--gpus: gpu.name: no GPU 'H300'"),
        (["--buy", "--gpus", ""], "--gpus: gpu.name: no GPU ''"),
        (["--buy", "--gpus", "L4=cheap"], "--gpus L4=cheap: must be L4=PRICE, $/h and more"),
        (["--buy", "--gpus", "L4=1,L4=2"], "--gpus: L4 is named twice, with unlike prices"),
        (
            ["--buy", "--gpus", "L4", "--set", "model=llama-3.1-405b"],
            "--buy: nothing can carry it: llama-3.1-405b in fp8 does not fit the L4: 47.80 GiB",
        ),
        (["--buy", "--slo", "p99_tpot_ms<=0.1"], "--buy: nothing can carry it"),
        (
            ["--buy", "--precision", "int3"],
            "--precision int3: take bf16, fp8 or none: no profile on A100-40GB",
        ),
        (
            ["--buy", "--set", "cluster={groups: {a: {}}}"],
            "--buy: cannot be used with cluster.groups",
        ),
    ],
)
def test_what_cannot_be_bought(write, capsys, tmp_path: Path, options, message) -> None:
    path = write(SHOP)
    code = main(["plan", str(path), *options, "--out", str(tmp_path / "o"), "--jobs", "1"])
    assert code == (1 if "nothing can carry" in message else 2)
    assert message in capsys.readouterr().err.splitlines()[-1]


def market(scenario: Path, *slos: str, precision: str | None = "bf16") -> Market:
    options = PlanOptions(slo=slos or None)
    gpus = wanted_gpus("H100")
    return Market(buying_problem(scenario, options, ([], None), gpus), gpus, precision)


def test_gpus_to_choose_from_and_their_prices() -> None:
    """By any name once; a price of one's own stands in place of the list's."""
    (one,) = wanted_gpus("H100,h100-sxm, H100-80GB")
    assert (one.name, one.dollars_per_hour) == ("H100-80GB", 6.88)
    own, listed = wanted_gpus("H100=0.99,L40S")
    assert (own.dollars_per_hour, listed.dollars_per_hour) == (0.99, 1.86)
    with pytest.warns(HeadwayWarning, match="left out, for want of a price: GH200; give one, as"):
        assert [gpu.name for gpu in wanted_gpus("GH200,L4")] == ["L4"]
    assert [gpu.name for gpu in wanted_gpus("GH200")] == ["GH200"]
    assert all(gpu.dollars_per_hour for gpu in wanted_gpus(None))


def test_gpus_without_measured_kernels_are_bought_on_request() -> None:
    """The error has the span of their steps; a GPU like a measured one takes its kernels."""
    every = {gpu.name for gpu in wanted_gpus(None, by_data_sheet=True)}
    assert every - {gpu.name for gpu in wanted_gpus(None)} == {"T4", "V100-16GB"}
    (one,) = wanted_gpus("MI300X=2.50", by_data_sheet=True)
    assert one.dollars_per_hour == 2.5
    low, high = (100 * (exp(sign * QUANTILE * UNMEASURED) - 1) for sign in (-1, 1))
    with pytest.raises(HeadwayError, match=re.escape(f"steps within {low:+.0f} to {high:+.0f} %")):
        wanted_gpus("MI300X=2.50")


BURST = """name: burst
model: llama-3-8b
workload: {num_prompts: 100, request_rate: .inf, input_len: 1000, output_len: 20}
slo: ["p90_ttft_ms<=1000"]
"""


@pytest.mark.medium
def test_a_burst_takes_as_many_replicas_as_it_takes(write, tmp_path: Path, capsys) -> None:
    """Of requests at once theory names no least number; a price and levels stay in best.yaml."""
    command = ["plan", str(write(BURST)), "--buy", "--gpus", "L40S=1.50", "--precision", "bf16"]
    assert main([*command, "--out", str(tmp_path), "--jobs", "1"]) == 0
    best = load_scenario(tmp_path / "best.yaml")
    assert best.cluster is not None
    assert best.slo == ["p90_ttft_ms<=1000", "completion>=1"]
    assert resources(best) == (best.cluster.replicas, 1.5 * (best.cluster.replicas or 0))
    fewer = {"cluster": best.cluster.model_copy(update={"replicas": best.cluster.replicas - 1})}
    held, broken = (run(one).summary() for one in (best, best.model_copy(update=fewer)))
    assert held["headway"]["slo_met"]
    assert not broken["headway"]["slo_met"]
    told = capsys.readouterr().out
    load = next(line for line in told.splitlines() if line.startswith("  10 % more load: "))
    assert not load.endswith("the same")


def test_what_comes_closest_is_told_and_how_far_it_was_looked(write, tmp_path, capsys) -> None:
    """A request alone takes more than 100 ms, however many replicas there are: one for each."""
    path = write(BURST.replace("ttft_ms<=1000", "e2el_ms<=100").replace("100,", "12,", 1))
    command = ["plan", str(path), "--buy", "--gpus", "L40S", "--precision", "bf16"]
    assert main([*command, "--out", str(tmp_path), "--jobs", "1"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "the closest is L40S (TP " in told
    assert "candidates tried: " in told
    assert ", with up to 12 replicas" in told


def test_weights_are_quantized_where_there_is_a_profile(write) -> None:
    """Of fp8 there is one on an L40S; on an L4 all is estimated, and an A10G computes no fp8."""
    shop, model = market(write(SHOP), precision=None), load_model("llama-3-8b")
    every = [(None, "auto"), ("fp8", "auto"), ("fp8", "fp8")]
    for name, found in (("L4", every), ("L40S", every), ("A10G", every[:1])):
        (gpu,) = wanted_gpus(name)
        assert list(shop._precisions(model, gpu, 1)) == found
    awq = Quantization((Rule((), Format("int4", 4, 2.5, 128)),), method="awq")
    (gpu,) = wanted_gpus("L4")  # vLLM refuses --quantization fp8 beside AWQ's weights
    assert list(shop._precisions(replace(model, checkpoint=awq), gpu, 1)) == every[:1]
    largest = load_model("llama-3.1-405b")  # on eight H100 it fits in fp8 alone
    (gpu,) = wanted_gpus("H100")
    assert list(shop._precisions(largest, gpu, 8)) == every


@pytest.mark.medium
def test_a_precision_as_users_write_it(write) -> None:
    """bf16 is how the model is published; of fp8 there are profiles with both KV caches."""
    path = write(SHOP)
    assert {one.varied["engine.quantization"] for one in market(path).offers()} == {"null"}
    eight = market(path, precision="fp8").offers()
    assert {one.varied["engine.kv_cache_dtype"] for one in eight} == {"auto", "fp8"}


def test_what_halves_serve_by_hand() -> None:
    """Steps of 2 s, 5 tokens of prompt and 9 of answer: two prompts, or four decodes, in a step."""
    cost = SimpleNamespace(
        execute=lambda step: Timing(2.0), decode_seconds=lambda sizes, context: 2.0 + 0.0 * sizes
    )
    engine = SimpleNamespace(most_tokens=10, most_running=4)
    model, load = SimpleNamespace(keeps_window=True), workload((0.0, 5, 9))
    one = Replica(engine, model, None, cost)  # type: ignore[arg-type]
    traffic = SimpleNamespace(workload=load, answer_context=9.0)
    assert rates_apart(one, traffic, [], 0.0) == (2 / 2.0, 4 / (8 * 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(2000, 100), (6000, 50)])
def test_theory_is_no_less_than_prefill_and_decode_apart_serve(lengths: tuple[int, int]) -> None:
    """One replica of each serves of a burst what the slower can; and not far less."""
    keys = [
        f"workload.input_len={lengths[0]}",
        f"workload.output_len={lengths[1]}",
        "gpu.name=H100",
    ]
    keys += ["workload.request_rate=inf", "workload.num_prompts=300"]
    groups = (
        "cluster={groups: {p: {kv_role: kv_producer}, d: {kv_role: kv_consumer}}, kv_transfer: {}}"
    )
    scenario = {"model": "llama-3-8b", "name": "burst"}
    one, traffic = replica(load_scenario(scenario, keys))
    most = min(rates_apart(one, traffic, [], 0.0))
    served = run(load_scenario(scenario, [*keys, groups])).summary()["request_throughput"]
    assert 0.4 * most <= served <= MARGIN * most


def found(offer: Offer, replicas: int) -> Offer:
    """Say that so many replicas hold the load."""
    return replace(offer, result=SearchResult(Trial(replicas), []))


@pytest.mark.medium
def test_prefill_and_decode_go_apart_where_fewer_may_be_enough(write) -> None:
    """Under a strict bound on TPOT chunks must be small: alone, prompts need no small ones."""
    long = "workload: {num_prompts: 400, request_rate: 30, input_len: 6000, output_len: 60}"
    path = write(re.sub("workload: .*", long, SHOP))
    strict = market(path, "p90_tpot_ms<=10")
    (best,) = [one for one in strict.offers() if one.size == 1]
    why, offers = strict._apart(found(best, best.fewest))
    assert not why
    for one in offers:
        assert one.scenario is not None
        assert one.scenario.cluster is not None
        assert set(one.scenario.cluster.groups) == {"prefill", "decode"}
        assert one.within is not None
        assert one.prefill + one.within[1] == best.fewest - 1
        assert "engine.max_num_batched_tokens" not in one.varied
    assert "it needs two replicas, so it saves none of the 2" in strict._apart(found(best, 2))[0]
    needed = strict.traffic.rate / MARGIN  # by one replica that prefills and two that decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.planning.market.rates_apart", lambda *_: (needed, needed / 2))
        _, offers = strict._apart(found(best, 4))
    assert [(one.prefill, one.within) for one in offers] == [(1, (2, 2))]
    loose = market(path, "p90_tpot_ms<=50")
    (best,) = [one for one in loose.offers() if one.size == 1]
    assert "replicas at least" in loose._apart(found(best, best.fewest))[0]


@pytest.mark.medium
def test_where_nothing_holds_the_router_is_tried_where_prompts_begin_alike(write) -> None:
    """It needs two replicas at least."""
    shared = "prefix_groups: {num_prefixes: 8, prefix_len: 800}, input_len: 200"
    alike, other = write(SHOP.replace("input_len: 1000", shared)), write(SHOP, "other.yaml")
    (offer, *_), plain = market(alike).offers(), market(other)
    (routed,) = market(alike).routed([replace(offer, fewest=1)])
    assert routed.varied == {**offer.varied, "cluster.router": "prefix_aware"}
    assert (routed.fewest, routed.gpu, routed.price) == (2, offer.gpu, offer.price)
    assert not plain.routed(plain.offers()[:1])


@pytest.mark.medium
def test_a_prefix_aware_router_is_tried_where_prompts_begin_alike(write) -> None:
    shared = "prefix_groups: {num_prefixes: 8, prefix_len: 800}, input_len: 200"
    alike, other = write(SHOP.replace("input_len: 1000", shared)), write(SHOP, "other.yaml")
    offer = market(alike).offers()[0]
    why, (routed,) = market(alike)._by_prefix(found(offer, 4))
    assert not why
    assert routed.varied["cluster.router"] == "prefix_aware"
    assert routed.within == (2, 3)
    assert market(alike)._by_prefix(found(offer, 1))[0] == FEW.format(1)
    assert market(other)._by_prefix(found(offer, 4))[0].startswith("0 % of the prompt tokens")


def test_orders_are_told_apart_by_gpus_and_their_number() -> None:
    """Of those of one order the first stands for all, in the given order."""

    def offer(gpu: str, size: int, replicas: int, **keys: str) -> Offer:
        found = SearchResult(Trial(float(replicas)), [])
        return Offer(keys, result=found, gpu=gpu, size=size, price=float(size))

    ranked = [offer("A", 1, 2), offer("B", 1, 2), offer("A", 2, 1), offer("A", 1, 3)]
    assert orders(ranked) == [ranked[0], ranked[1], ranked[3]]
    assert line(ranked[0]) == "2 x A (2 replicas of TP 1): $2.00/h"
    assert line(ranked[2]) == "2 x A (1 replica of TP 2): $2.00/h"


def test_a_model_that_only_the_most_gpus_hold_at_eight_bits_can_be_asked_for() -> None:
    """405 GB of weights on GPUs of 80 GB."""
    large = {"name": "large", "model": "llama-3.1-405b", "slo": ["p90_ttft_ms<=9000"]}
    problem = buying_problem(large, PlanOptions(), ([], None), wanted_gpus("H100"))
    assert "gpu={name: H100-80GB, count: 8}" in problem.overrides
    assert "engine.quantization=fp8" in problem.overrides


def test_other_settings_of_the_best_order_are_told_by_whether_they_surely_hold(write) -> None:
    """At a tenth of the bound the error of the step times does not matter; just below it does."""
    scenario = load_scenario(write(SHOP), ["gpu.name=H100"])

    def offer(ttft: float, **keys: str) -> Offer:
        means = dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), 7.0)
        runs = [{"p90_ttft_ms": ttft, "goodput": 0.999, **means}] * 3
        found = SearchResult(Trial(2.0, seconds=60.0, runs=runs), [])
        return Offer(keys, scenario=scenario, result=found, gpu="H100-80GB", price=6.88)

    best, sure, unsure = offer(100), offer(100, max_num_seqs="64"), offer(999, max_num_seqs="32")
    criteria = SimpleNamespace(slos=[parse_slo("p90_ttft_ms<=1000")])
    problem = SimpleNamespace(criteria=criteria, under="under x", of_pods=["one of 4 pods"])
    told = buy_lines(problem, Answer([best, sure, unsure], [], True))  # type: ignore[arg-type]
    assert told[0] == "one of 4 pods"
    assert "E2EL 7 ms; nearest to its bound: p90_ttft_ms, at 10 % of it" in "".join(told)
    assert f"  by short runs these are enough, too: {line(sure)}" in told
    assert f"  by short runs these are too close to tell: {line(unsure)}" in told
    criteria.slos = [parse_slo("goodput>=0.99")]
    told = buy_lines(problem, Answer([best], [], True))  # type: ignore[arg-type]
    assert "bound: goodput, with at most 10 % of the misses it allows" in "".join(told)
