"""/metrics and /report of a server: vLLM's families, and what was served."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("aiohttp")

from aiohttp import ClientSession

from headway.twin.api.openai import Reader
from headway.twin.server import Server
from simulator import run
from simulator.scenario.load import load_scenario
from tests.support.twins import served_by

PROMPT = " ".join(f"word{number}" for number in range(100))


def test_metrics_count_what_was_served() -> None:
    began = time.time()

    async def play(client: ClientSession, server: Server) -> None:
        bodies = [{"prompt": PROMPT, "max_tokens": 3 + k, "ignore_eos": True} for k in range(5)]
        await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        text = await (await client.get("/metrics")).text()
        families = {one.name: one for one in text_string_to_metric_families(text)}

        def value(family: str, name: str, **labels: str) -> float:
            (found,) = [
                sample.value
                for sample in families[family].samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ]
            return found

        assert value("vllm:generation_tokens", "vllm:generation_tokens_total") == 3 + 4 + 5 + 6 + 7
        started = value("process_start_time_seconds", "process_start_time_seconds")
        assert began - 1e-3 <= started <= time.time()
        assert value("vllm:prompt_tokens", "vllm:prompt_tokens_total") == 500
        assert not server.engine.scenario.engine.enable_prefix_caching
        assert value("vllm:prefix_cache_queries", "vllm:prefix_cache_queries_total") == 0
        ended = "vllm:request_success", "vllm:request_success_total"
        assert value(*ended, finished_reason="length") == 5
        ttft, e2e = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
        summary = server.engine.result().summary()
        assert value(ttft, f"{ttft}_sum") == pytest.approx(5e-3 * summary["mean_ttft_ms"])
        assert value(e2e, f"{e2e}_sum") == pytest.approx(5e-3 * summary["mean_e2el_ms"])
        itl = "vllm:inter_token_latency_seconds"
        assert value(itl, f"{itl}_count") == 20
        assert value(itl, f"{itl}_sum") == pytest.approx(20e-3 * summary["mean_itl_ms"])
        assert value("vllm:num_requests_running", "vllm:num_requests_running") == 0

    served_by(play)


def test_metrics_count_answers_to_one_prompt_as_vllm_does() -> None:
    """Once by `n`, and each by its tokens; what its client has left not at all."""

    async def play(client: ClientSession, _: Server) -> None:
        left = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with client.post("/v1/completions", json=left) as response:
            await response.content.readline()
        for n in (1, 3):
            body = {"prompt": [PROMPT, PROMPT + " more"], "max_tokens": 4, "n": n}
            await client.post("/v1/completions", json={**body, "ignore_eos": True})
        text = await (await client.get("/metrics")).text()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        found = Counter[str]()
        for one in samples:
            found[one.name.removeprefix("vllm:")] += one.value
        assert found["request_success_total"] == found["e2e_request_latency_seconds_count"] == 8
        assert found["request_generation_tokens_sum"] == 32
        for name, total in (("params_n", 8), ("max_num_generation_tokens", 16)):
            assert found[f"request_{name}_count"] == 4, name
            assert found[f"request_{name}_sum"] == total, name
        computed = found["prompt_tokens_total"] + found["generation_tokens_total"]
        assert abs(found["iteration_tokens_total_sum"] - computed) <= 1

    served_by(play)


LABELS = {
    "num_requests_waiting_by_reason": ("reason", "capacity deferred"),
    "engine_sleep_state": ("sleep_state", "awake weights_offloaded discard_all"),
    "prompt_tokens_by_source": ("source", "local_compute local_cache_hit external_kv_transfer"),
    "prompt_tokens_cached_by_source": ("source", "device host p2p disk external_unspecified"),
    "request_success": ("finished_reason", "stop length abort error repetition"),
    "admission_rejections": ("reason", "max_num_queued_reqs max_num_queued_tokens"),
}
"""Of vLLM 0.33 (v1/metrics/loggers.py): families with a label of their own, and its values."""


def test_metrics_have_vllms_families_and_labels() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True}
        for _ in range(2):
            await (await client.post("/v1/completions", json=body)).read()
        text = await (await client.get("/metrics")).text()
        found = {one.name: one.samples for one in text_string_to_metric_families(text)}
        for name, (label, values) in LABELS.items():
            samples = found[f"vllm:{name}"]
            assert [one.labels[label] for one in samples] == values.split()
            assert all(one.labels["model_name"] == "llama-3-8b" for one in samples)

        def total(name: str, **labels: str) -> float:
            rows = (one for samples in found.values() for one in samples)
            return sum(
                one.value
                for one in rows
                if one.name == f"vllm:{name}" and labels.items() <= one.labels.items()
            )

        # The second prompt is the first one, and all its full blocks but the last token's are held.
        assert total("prompt_tokens_cached_total") == 96
        assert total("prompt_tokens_by_source_total", source="local_compute") == 104
        assert total("prompt_tokens_cached_by_source_total", source="device") == 96
        assert total("request_prefill_kv_computed_tokens_sum") == 104
        assert total("request_params_max_tokens_sum") == 18
        assert total("request_max_num_generation_tokens_sum") == 18
        assert total("request_params_n_count") == total("request_num_preemptions_count") == 2
        assert total("engine_sleep_state", sleep_state="awake") == 1
        assert "vllm:spec_decode_num_drafts" not in found

    served_by(play, "engine.enable_prefix_caching=true")


def test_metrics_tell_of_drafts() -> None:
    """Each step of a decode drafts 3 tokens; what comes out beyond one a step was accepted."""

    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        await (await client.post("/v1/completions", json=body)).read()
        text = await (await client.get("/metrics")).text()
        found = {one.name: one.samples for one in text_string_to_metric_families(text)}
        drafts, tokens, accepted = (
            found[f"vllm:spec_decode_num_{name}"][0].value
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert 3 * (drafts - 1) <= tokens <= 3 * drafts
        assert 1 + drafts + accepted == 100
        assert 0 < accepted < tokens

    config = "{method: ngram, num_speculative_tokens: 3, acceptance: 0.6}"
    served_by(play, "engine={name: vllm}", f"engine.speculative_config={config}")


def test_the_report_is_of_the_run_so_far() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        assert (await client.get("/report")).status == 404
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
        report = await (await client.get("/report")).json()
        assert report["completed"] == 1
        assert report["served"]["speed"] == 50
        page = await client.get("/report", headers={"Accept": "text/html"})
        assert "<!doctype html>" in await page.text()
        model = (await (await client.get("/v1/models")).json())["data"][0]
        assert (model["id"], model["max_model_len"]) == ("llama-3-8b", 8192)
        for path in ("/health", "/ping", "/version"):
            assert (await client.get(path)).status == 200

    served_by(play)


ENGINES = {
    "vllm": (),
    "synchronous": ("engine.async_scheduling=false",),
    "sglang": ("engine={name: sglang}",),
    "drafts": ("engine={speculative_config: {num_speculative_tokens: 2, acceptance: 0.8}}",),
    "fleet": ("cluster={replicas: 2, router: round_robin}",),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_clients_received_before_they_hung_up_is_in_the_requests(name: str) -> None:
    """Tokens and TTFTs of the file are those that /metrics counts, replica by replica."""

    async def play(client: ClientSession, server: Server) -> None:
        async def ask(number: int) -> None:
            body = {"prompt": "a b c", "max_tokens": 3000, "stream": True, "ignore_eos": True}
            body |= {} if number % 3 else {"max_tokens": 5 + number}
            async with client.post("/v1/completions", json=body) as response:
                if number % 3:
                    await asyncio.sleep(0.01 * number)  # some hang up before their first token
                    response.close()
                else:
                    await response.read()

        await asyncio.gather(*(ask(number) for number in range(18)))
        async with asyncio.timeout(60):
            while server.engine.streams:
                await asyncio.sleep(0.01)
        text = await (await client.get("/metrics")).text()
        found = {
            (sample.name, sample.labels["engine"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "engine" in sample.labels
        }
        rows = server.engine.result().requests
        left = rows[rows.finish_reason == "unfinished"]
        assert len(left) == 12
        assert (left.output_tokens > 0).any()
        assert ((left.output_tokens > 0) == left.ttft.notna()).all()
        for number in range(len(server.engine.cores)):
            here = rows[rows.replica == number]
            count = found["vllm:time_to_first_token_seconds_count", str(number)]
            assert count == here.ttft.notna().sum()
            total = found["vllm:time_to_first_token_seconds_sum", str(number)]
            assert total == pytest.approx(here.ttft.sum(), rel=1e-6)
            tokens = found["vllm:generation_tokens_total", str(number)]
            assert tokens == here.output_tokens.sum()

    served_by(play, *ENGINES[name], speed=2)


@pytest.mark.parametrize("overlaps", ["false", "true"])
def test_gauges_are_zero_once_the_last_client_has_hung_up(overlaps: str) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
        while server.engine.streams:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # 5 simulated seconds: the step in flight has ended
        text = await (await client.get("/metrics")).text()
        found = {one.name: one.samples for one in text_string_to_metric_families(text)}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert found[f"vllm:{name}"][0].value == 0, name

    served_by(play, f"engine={{name: vllm, async_scheduling: {overlaps}}}")


def test_a_burst_waits_to_be_read_and_its_first_tokens_say_so() -> None:
    """The last of 60 requests at once is read after the others: it is late by their reading."""

    async def play(client: ClientSession, server: Server) -> None:
        body = {"prompt": 400 * "one ", "max_tokens": 2}

        async def ask() -> None:
            await (await client.post("/v1/completions", json=body)).read()

        await asyncio.gather(*(ask() for _ in range(60)))  # opens the connections
        server.engine.clock.first_delays.clear()
        read = Reader.read

        def slow(self: Reader, asked: Any) -> Any:
            time.sleep(0.005)
            return read(self, asked)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reader, "read", slow)
            await asyncio.gather(*(ask() for _ in range(60)))
        late = server.engine.clock.lateness(first=True)
        assert late["p100"] > 0.1e3  # of 300 ms that reading takes
        assert not server.served()["on_time"]

    served_by(play, speed=1)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "async"])
def test_the_files_play_the_run_again(policy: str, tmp_path: Path) -> None:
    """With clients that hang up, prompts that share, priorities and predicted lengths.

    A server that overlaps steps with their scheduling sends tokens a little ahead of their time, of
    which the replay does not know.
    """
    overlaps = policy == "async"
    overrides = ["engine.async_scheduling=true"] if overlaps else []
    overrides += [f"engine.scheduling_policy={'fcfs' if overlaps else policy}"]
    overrides += ["engine.enable_prefix_caching=true"]
    if policy == "sjf":
        overrides.append("predictor={kind: noisy, sigma: 0.5}")

    async def play(client: ClientSession, server: Server) -> None:
        async def ask(number: int) -> None:
            body = {"prompt": PROMPT * (1 + number % 3), "max_tokens": 20 + number, "stream": True}
            body |= {"priority": number % 2, "user": "ab"[number % 2], "ignore_eos": number % 2 > 0}
            body |= {"vllm_xargs": {"predicted_output_tokens": 5 + number}} if number % 5 else {}
            if number % 4 == 0:  # it hangs up: long before its end, however busy the machine is
                body |= {"max_tokens": 6000, "ignore_eos": True}
            await asyncio.sleep(number * 0.003)
            response = await client.post("/v1/completions", json=body)
            if number % 4:
                await response.read()
            else:
                await response.content.readany()
                response.close()

        await asyncio.gather(*(ask(number) for number in range(24)))
        while server.engine.streams:  # until the server has seen the last one hang up
            await asyncio.sleep(0.01)
        text = await (await client.get("/report/requests")).text()
        assert text.count("\n") == 24
        assert "served.jsonl" in {path.name for path in server.write(tmp_path)}
        served.append(server.engine.result())

    served: list[Any] = []
    served_by(play, *overrides, speed=1 if overlaps else 10)
    played = run(load_scenario(tmp_path / "replay.yaml"))
    before, after = served[0].requests, played.requests
    assert (before.finish_reason == "unfinished").any()
    assert [*before.finish_reason] == [*after.finish_reason]
    left, ahead = before.finish_reason == "unfinished", before.output_tokens - after.output_tokens
    sure = ~(left & overlaps)
    for column in ("queue_time", "ttft", "e2el", "output_tokens"):
        there, again = before[column][sure], after[column][sure]
        assert np.allclose(there, again, atol=1e-9, equal_nan=True)
    assert ahead.between(0, 5).all()
    assert (before.output_tokens > 0).all()
