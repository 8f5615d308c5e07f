"""Adapters (LoRA): who is admitted beside whom, what is loaded, and what a run makes of it."""

from pathlib import Path
from typing import Any

import pytest

from simulator import load_scenario, run
from simulator.build.assemble_scheduler import make_scheduler
from simulator.core.request import Request, Step
from simulator.costs.linear import LinearCost
from simulator.features.lora.lora import Lora
from simulator.features.lora.work import AdapterWork, work_of
from simulator.kv_cache.block_manager import BlockCounter, BlockManager
from simulator.scenario.resolve import engine_specs
from simulator.schedulers.vllm.scheduler import Scheduler
from tests.support.engines import made
from tests.support.scenarios import errors

# A step takes 0.1 s and what adapters add: 1 prompt and 9 decodes are 1 s.
SCENARIO = """
model: llama-3-8b
gpu: {name: A100-80GB}
engine: {name: textbook, max_num_seqs: 8, max_model_len: 256, enable_lora: true, max_loras: 1}
cost: {kind: linear, base: 0.1}
workload:
  trace: {path: trace.csv, format: requests}
"""


def scheduler(max_loras: int, **options: Any) -> Scheduler:
    return made(Scheduler, BlockCounter(1000, 4), features=[Lora(max_loras)], **options)


def ask(id: int, model: str = "", output: int = 3) -> Request:
    return Request(id, float(id), 4, output, model=model)


def started(step: Step) -> list[int]:
    return [chunk.request.id for chunk in step.prefills]


def test_an_adapter_too_many_is_passed_over_and_keeps_its_place() -> None:
    """One adapter may run: b waits, the base model and a's second request go before it."""
    one = scheduler(1)
    for request in (ask(0, "a"), ask(1, "b"), ask(2), ask(3, "a", 5), ask(4, "b")):
        one.add(request)
    step = one.schedule(0.0)
    assert started(step) == [0, 2, 3]
    assert work_of(step) == AdapterWork(active=1, tokens=8, read=1, copied=1, refused=2)
    assert [request.id for request in list(one.waiting)] == [1, 4]
    for _ in range(4):
        one.commit(step, [0.0])
        step = one.schedule(0.0)
        assert not step.prefills
    one.commit(step, [0.0])  # request 3 says its fifth token
    assert started(one.schedule(0.0)) == [1, 4]


def test_who_was_passed_over_and_leaves_is_forgotten() -> None:
    one, asked = scheduler(1), [ask(0, "a"), ask(1, "b")]
    for request in asked:
        one.add(request)
    assert started(one.schedule(0.0)) == [0]
    assert one._deferred == {asked[1]}
    one.cancel(asked[1])
    assert not one._deferred


def test_a_request_that_comes_ends_a_leap_though_it_is_not_the_head() -> None:
    one = scheduler(1)
    one.add(ask(0, "a", 50))
    one.add(ask(1, "b"))
    one.commit(one.schedule(0.0), [0.0])
    assert one.horizon(one.schedule(0.0)) > 1  # nobody who waits may fit
    assert one.add(ask(2, "a"))


def work(slots: Lora, *names: str) -> tuple[int, int]:
    """Compute a prompt for each of the names; return what is read and copied."""
    step = Step([])
    for id, name in enumerate(names):
        step.add_single(ask(id, name), 0)
    slots.annotate(step)
    work = work_of(step)
    assert work is not None
    return work.read, work.copied


def test_the_adapters_used_longest_ago_leave_gpu_and_host() -> None:
    """Two slots, three places on the host."""
    slots = Lora(2, 3)
    Scheduler(BlockCounter(1000, 4), features=[slots])
    assert work(slots, "a", "b") == (2, 2)
    assert work(slots, "c") == (1, 1)  # a leaves its slot
    assert work(slots, "a") == (0, 1)  # from the host; b leaves its slot
    assert work(slots, "d") == (1, 1)  # b, used longest ago, leaves the host; c its slot
    assert work(slots, "a", "d") == (0, 0)
    assert work(slots, "b") == (1, 1)  # c leaves the host
    assert work(slots, "c") == (1, 1)
    assert [work(slots, name)[1] for name in "bdb"] == [0, 1, 0]  # it is use that counts


def test_no_two_adapters_share_kv_blocks() -> None:
    """The same prompt, under an adapter and without: each finds its own alone."""
    blocks = BlockManager(100, 4, True)
    found = []
    for id, model in enumerate(["", "a", "b", "a", ""]):
        request = Request(id, 0.0, 13, 9, segments=(("text", 13),), model=model)
        hits = blocks.match(request)
        found.append(len(hits))
        blocks.admit(request, hits, request.known)
        blocks.release(request)
    assert found == [0, 0, 0, 3, 3]


def write(folder: Path, *rows: str, text: str = SCENARIO) -> Path:
    head = "arrival,prompt_tokens,output_tokens,model\n"
    (folder / "trace.csv").write_text(head + "".join(f"{row}\n" for row in rows))
    path = folder / "s.yaml"
    path.write_text(text)
    return path


DRAFTS = "speculative_config: {method: ngram, num_speculative_tokens: 3, acceptance: 1}"


@pytest.mark.parametrize("caching", ["false", "true"])
def test_drafts_are_tokens_under_an_adapter(tmp_path: Path, caching: str) -> None:
    """Decodes verify 1 + 3 tokens, kept as sums or, with a prefix cache, one by one."""
    text = SCENARIO.replace("max_loras: 1", f"enable_prefix_caching: {caching}, {DRAFTS}")
    scenario = load_scenario(write(tmp_path, "0,20,10,a", text=text))
    one = make_scheduler(engine_specs(scenario)[""], False)
    for id, model in enumerate(["a", ""]):
        one.add(Request(id, 0.0, 20, 10, model=model))
    found = []
    for now in range(3):
        step = one.schedule(float(now))
        work = work_of(step)
        assert work is not None
        found.append((work.tokens, step.decodes + step.drafts))
        one.commit(step, [now + 1.0])
    assert found == [(20, 0), (4, 8), (4, 8)]


def test_adapters_with_drafts_need_room_for_all_at_once(tmp_path: Path) -> None:
    """As vLLM 0.32 and 0.33: 8 requests that verify 1 + 3 tokens are 32."""
    path = write(tmp_path, "0,20,10,a", text=SCENARIO.replace("max_loras: 1", DRAFTS))
    what = (
        "engine.enable_lora: with k drafts needs max_num_batched_tokens >= max_num_seqs x (1 + k)"
    )
    assert errors(path, ["engine.max_num_batched_tokens=31"]) == [f"s.yaml:4: {what} (32), not 31"]
    load_scenario(path, ["engine.max_num_batched_tokens=32"])


@pytest.mark.parametrize("stepwise", [False, True])
def test_adapters_that_may_not_run_together_take_turns(tmp_path: Path, stepwise: bool) -> None:
    """max_loras 1, all at once: a, b, a and one of the base, 1 s each: b waits for both a's."""
    rows = [f"0,20,10,{name}" for name in ("a", "b", "a", "llama-3-8b")]
    scenario = load_scenario(write(tmp_path, *rows))
    result = run(scenario, stepwise=stepwise, cost=LinearCost(0.1))
    frame = result.requests
    assert frame.e2el.tolist() == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert frame.model.tolist() == ["a", "b", "a", "base"]
    own = result.summary()["headway"]
    assert own["adapters_read"] == own["adapters_copied"] == 2
    assert own["adapter_waiting_time"] == pytest.approx(1.0)
    assert own["per_model"]["b"]["mean_queue_time_ms"] == pytest.approx(1000)


def test_a_run_with_adapters_leaps_as_it_steps(tmp_path: Path) -> None:
    """To the last bit, with what adapters cost: many of them, loaded from host and disk."""
    names = ["abcdefgh"[k * k * 5 // 7 % 8] for k in range(60)]
    rows = [f"{k / 7},{20 + k % 50},{1 + 3 * k % 40},{name}" for k, name in enumerate(names)]
    text = SCENARIO.replace("max_loras: 1", "max_loras: 3, max_cpu_loras: 5")
    scenario = load_scenario(write(tmp_path, *rows, text=text))
    one, other = (run(scenario, stepwise=stepwise) for stepwise in (False, True))
    assert one.requests.equals(other.requests)
    own, alike = (result.summary()["headway"] for result in (one, other))
    assert own["adapter_loading_time"] == alike["adapter_loading_time"] > 0
    assert own["adapter_waiting_time"] == pytest.approx(alike["adapter_waiting_time"])
    assert 8 <= own["adapters_read"] < own["adapters_copied"]


def test_a_wait_for_max_loras_is_diagnosed(tmp_path: Path) -> None:
    rows = [f"{k / 10},20,10,{'abcd'[k % 4]}" for k in range(40)]
    result = run(load_scenario(write(tmp_path, *rows)))
    first = result.summary()["headway"]["diagnosis"][0]
    assert first["rule"] == "adapters"
    advised = first["advice"][0]
    assert (advised["key"], advised["from"], advised["to"]) == ("engine.max_loras", 1, 4)
    assert advised["also"] == {"engine.max_cpu_loras": 4}
    cured = run(load_scenario(tmp_path / "s.yaml", ["engine.max_loras=4"])).summary()
    assert not any(one["rule"] == "adapters" for one in cured["headway"]["diagnosis"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("engine.enable_lora=false", "engine.max_loras: needs enable_lora: true"),
        ("engine.max_cpu_loras=0", "engine.max_cpu_loras: must be at least 1, not 0"),
        ("engine.version=0.31", "engine.enable_lora: needs the rules of vLLM 0.32 or later"),
        ("engine.prefix_cache=radix", "engine.enable_lora: needs prefix_cache: hash"),
        ("engine.scheduling_policy=fair", "enable_lora: needs policies of a key alone"),
        ("engine.scheduling_policy=sarathi", "engine.enable_lora: sarathi knows no adapters"),
        ("model=mixtral-8x7b", "engine.enable_lora: adapters of mixtral-8x7b, with experts"),
    ],
)
def test_what_goes_with_no_adapter_is_refused(tmp_path: Path, change: str, message: str) -> None:
    path = write(tmp_path, "0,20,10,a")
    changes = [change, *(["engine.max_loras=2"] if "cpu" in change or "false" in change else [])]
    assert any(message in line for line in errors(path, changes))


def test_adapters_are_refused_where_nobody_serves_them(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: llama-3-8b\nworkload: {num_prompts: 5, adapters: {num_adapters: 3}}\n")
    with pytest.raises(Exception, match=r"s.yaml:2: workload.adapters: needs engine.enable_lor"):
        run(load_scenario(path))


def test_a_logs_models_mean_nothing_where_no_adapters_are_served(tmp_path: Path) -> None:
    """A gateway's log names models: an engine of one model serves them all."""
    text = SCENARIO.replace(", enable_lora: true, max_loras: 1", "")
    result = run(load_scenario(write(tmp_path, "0,20,10,gpt", text=text)))
    assert "model" not in result.requests
