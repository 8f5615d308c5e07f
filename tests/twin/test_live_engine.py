"""What comes over HTTP is a simulation: the same arrivals, played again, give the same run."""

import asyncio
import gc
import tracemalloc
from math import inf

import numpy as np
import pytest

from headway.twin.asked import Asked
from headway.twin.live_engine import LiveEngine, Stream
from headway.twin.live_metrics import LiveMetrics
from simulator import run
from simulator.scenario.load import load_scenario
from simulator.util.errors import HeadwayError

pytest.importorskip("aiohttp")

SPEED = 50.0
ENGINES = {
    "vllm": [],
    "asynchronous": ["engine.async_scheduling=true", "engine.enable_prefix_caching=true"],
    "few blocks": ["engine.num_gpu_blocks_override=80", "engine.max_model_len=1200"],
    "few blocks, asynchronous": [
        *("engine.num_gpu_blocks_override=80", "engine.max_model_len=1200"),
        "engine.async_scheduling=true",
    ],
    "srpt": ["engine.scheduling_policy=srpt", "predictor={kind: noisy, sigma: 0.5}"],
    "static": ["engine={name: hf, max_num_seqs: 8}"],
    "sglang": ["engine={name: sglang}"],
    "tgi": ["engine={name: tgi}"],
    "fleet": ["cluster={replicas: 3, router: least_outstanding}"],
}


async def send(
    engine: LiveEngine, count: int, gap: float = 0.2, hang_ups: int = 0, speed: float = SPEED
) -> list[tuple[str, bool]]:
    """Send requests, `gap` s apart; give how each ended, and whether every token was told.

    The clients of the first `hang_ups` hang up after a while.
    """
    random = np.random.default_rng(7)
    ended: list[tuple[str, bool]] = []
    told = [0] * count

    def hang_up(stream: Stream) -> None:
        if stream.request.id in engine.streams:
            engine.cancel(stream)
            ended.append(("abort", True))

    def ask(number: int) -> None:
        def tokens(new: int, total: int) -> None:
            told[number] += new
            assert told[number] == total

        length = int(random.integers(1, 60))
        prompt = int(random.integers(10, 900))
        segments = ((number % 3, min(prompt, 200)), *(((number, prompt - 200),) * (prompt > 200)))
        stream = engine.submit(
            Asked(prompt, length, max_tokens=40, segments=segments),
            tokens,
            lambda request, why: ended.append((why, told[number] == request.generated)),
        )
        if number < hang_ups:
            asyncio.get_running_loop().call_later(random.random() / speed, hang_up, stream)

    clock = asyncio.create_task(engine.clock.run())
    for number in range(count):
        if gap:
            await asyncio.sleep(random.exponential(gap / speed))
        ask(number)
    async with asyncio.timeout(60):
        while len(ended) < count:
            await asyncio.sleep(0.005)
            if clock.done():
                clock.result()
        while engine.clock.env.peek() < inf:  # the step in flight when the last one hung up
            await asyncio.sleep(0.005)
    clock.cancel()
    return ended


@pytest.mark.parametrize("name", ENGINES)
def test_a_served_run_is_the_simulation_of_its_arrivals(name: str) -> None:
    scenario = load_scenario("demo", ENGINES[name])

    async def play() -> tuple[LiveEngine, list[tuple[str, bool]]]:
        engine = LiveEngine(scenario, SPEED)
        return engine, await send(engine, 40, 0.0 if "few" in name else 0.2)

    engine, ended = asyncio.run(play())
    assert len(ended) == 40
    assert all(whole for _, whole in ended)
    assert {why for why, _ in ended} == {"stop", "length"}
    served = engine.result()
    again = run(scenario, workload=served.workload)
    for column in ("arrival", "queue_time", "ttft", "e2el", "output_tokens", "preemptions"):
        assert served.requests[column].equals(again.requests[column]), column
    if "few blocks" in name:
        assert served.requests.preemptions.sum() > 0


@pytest.mark.parametrize("name", ENGINES)
def test_clients_that_hang_up_do_so_again_in_the_simulation(name: str) -> None:
    scenario = load_scenario("demo", ENGINES[name])

    async def play() -> tuple[LiveEngine, list[tuple[str, bool]]]:
        engine = LiveEngine(scenario, 10.0)  # a busy machine may stop for longer than an answer
        return engine, await send(engine, 30, 0.02, hang_ups=15, speed=10.0)

    engine, ended = asyncio.run(play())
    assert any(why == "abort" for why, _ in ended)
    served = engine.result()
    assert (served.requests.finish_reason == "unfinished").any()
    again = run(scenario, workload=served.workload)
    for column in ("arrival", "e2el", "finish_reason"):
        assert served.requests[column].equals(again.requests[column]), column
    whole = served.requests.finish_reason != "unfinished"  # a server knows what others received
    for column in ("queue_time", "ttft", "output_tokens"):
        assert served.requests[whole][column].equals(again.requests[whole][column]), column
    assert [log.step_rows for log in served.logs] == [
        log.step_rows for log in run(scenario, workload=served.workload, stepwise=True).logs
    ]


def test_who_hangs_up_leaves_and_is_told_as_unfinished() -> None:
    scenario = load_scenario("demo", ["engine.max_num_seqs=1"])

    async def play() -> None:
        engine = LiveEngine(scenario, SPEED)
        clock = asyncio.create_task(engine.clock.run())
        ends: list[str] = []

        def ask(length: int) -> Stream:
            return engine.submit(Asked(100, length), _ignore, lambda _, why: ends.append(why))

        long, short = ask(5000), ask(3)
        await asyncio.sleep(1 / SPEED)
        engine.cancel(long)
        async with asyncio.timeout(20):
            while not ends:
                await asyncio.sleep(0.005)
        clock.cancel()
        assert ends == ["stop"]
        assert short.told == 3
        assert engine.cores[0].stats().blocks_used == 0
        requests = engine.result().requests
        assert [*requests.finish_reason] == ["unfinished", "stop"]

    asyncio.run(play())


def test_memory_does_not_grow_with_the_requests_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.twin.live_engine.KEPT", 10)

    async def play() -> LiveEngine:
        engine = LiveEngine(load_scenario("demo"), SPEED)
        await send(engine, 50)
        return engine

    engine = asyncio.run(play())
    assert len(engine.cores[0].log.requests) < 20
    result = engine.result()
    assert 10 <= len(result.workload) < 20
    assert result.summary()["completed"] == len(result.workload)
    assert (result.requests.e2el > 0).all()


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [[], ["cluster={replicas: 2, router: least_outstanding}"]])
def test_a_server_takes_no_more_memory_however_long_it_serves(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    """500 more requests leave nothing behind, where 100 are kept for the report."""
    monkeypatch.setattr("headway.twin.live_engine.KEPT", 100)
    monkeypatch.setattr("headway.twin.clock.KEPT", 100)
    engine = LiveEngine(load_scenario("demo", overrides), 1000.0)
    LiveMetrics(engine, "m")

    async def play(count: int) -> int:
        ended: list[str] = []
        clock = asyncio.create_task(engine.clock.run())
        for number in range(count):
            segments = ((engine.next_id, 50),)
            engine.submit(
                Asked(50, 8, max_tokens=8, segments=segments),
                _ignore,
                lambda _, why: ended.append(why),
            )
            while number - len(ended) > 50:
                await asyncio.sleep(0.001)
        while len(ended) < count:
            await asyncio.sleep(0.001)
        clock.cancel()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    asyncio.run(play(300))
    tracemalloc.start()
    try:
        first, last = asyncio.run(play(500)), asyncio.run(play(500))
    finally:
        tracemalloc.stop()
    assert last - first < 300_000  # bytes, of 100 to 200 requests; all take 690,000


def test_stages_are_refused() -> None:
    with pytest.raises(HeadwayError, match="pipeline_parallel_size"):
        LiveEngine(load_scenario("demo", ["engine.pipeline_parallel_size=2"]))


def test_prefill_and_decode_apart_are_refused() -> None:
    with pytest.raises(HeadwayError, match="apart"):
        LiveEngine(load_scenario("what-if/disaggregation"))


def _ignore(*_: object) -> None:
    """Tokens that nobody reads."""


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_tokens_go_out_as_much_ahead_as_their_request_was_late(asynchronous: str) -> None:
    """Where steps are decided ahead; the record and /metrics stay as they are without."""
    found: list[list[float]] = []
    logs = []
    for late in (None, 0.005):
        engine = LiveEngine(load_scenario("demo", [f"engine.async_scheduling={asynchronous}"]))
        times: list[float] = []

        def tokens(
            new: int, _: int, engine: LiveEngine = engine, times: list[float] = times
        ) -> None:
            assert new == 1
            times.append(engine.env.now)

        over: list[str] = []
        due = None if late is None else engine.clock.now - late
        stream = engine.submit(
            Asked(100, 20), tokens, lambda _, reason, over=over: over.append(reason), due=due
        )
        while not over:
            engine.env.step()
        found.append([when - stream.asked.arrival for when in times])
        logs.append(
            (stream.first - stream.asked.arrival, stream.last - stream.asked.arrival, stream.told)
        )
        assert (engine.clock.first_delays[-1] >= 0) == (len(engine.clock.first_delays) == 1)
    assert logs[0] == pytest.approx(logs[1])
    ahead = np.subtract(*found)
    assert ahead == pytest.approx([0.005] * 20 if asynchronous == "true" else [0.0] * 20, abs=1e-3)


def test_tokens_go_out_ahead_by_what_this_process_is_usually_late() -> None:
    """Twice: a request is seen, and a token is sent, as late as the last steps were."""
    engine = LiveEngine(load_scenario("demo", ["engine.async_scheduling=true"]), speed=2.0)
    engine.clock.stop()
    engine.clock.delays.extend([0.002] * 17 + [0.5] * 15)
    times: list[float] = []
    stream = engine.submit(
        *(Asked(100, 20), lambda *_: times.append(engine.env.now), lambda *_: None),
        due=engine.clock.now - 0.001,
    )
    while not stream.told:
        engine.env.step()
    assert (stream.lead, stream.ahead) == pytest.approx((0.001, 0.009))
    assert stream.first - times[0] == pytest.approx(0.009, abs=1e-4)
    assert engine.clock.lateness(first=True)["p100"] == 0


def test_tokens_that_went_out_ahead_are_counted_where_the_client_leaves() -> None:
    engine = LiveEngine(load_scenario("demo", ["engine.async_scheduling=true"]))
    metrics = LiveMetrics(engine, "m")
    engine.clock.stop()  # however long this test takes, no later token comes
    received: list[int] = []
    stream = engine.submit(
        Asked(100, 20),
        lambda _, count: received.append(count),
        lambda *_: None,
        due=engine.clock.now - 0.02,
    )
    while not received:
        engine.env.step()
    assert (stream.sent, stream.told) == (1, 0)
    engine.cancel(stream)
    assert stream.told == 1
    assert 'vllm:generation_tokens_total{model_name="m",engine="0"} 1.0' in metrics.text()
