"""Encoders apart (EPD): closed forms, what is stored, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headway.report.vllm_serve import serve_command
from headway.runs.explain import explain
from simulator import load_scenario, run
from simulator.simulation.result import Result
from simulator.simulation.write import write_run
from simulator.util.errors import HeadwayError

SCENARIO = """name: apart
model: llama-3-8b
gpu: {name: A100-80GB}
engine:
  max_num_batched_tokens: 400
  max_num_seqs: 8
  max_model_len: 1000
  num_gpu_blocks_override: 500
  multimodal_config: {encoder_seconds: [[1, 0.01], [101, 1.01]]}
cost: {kind: linear, base: 0.1, per_token: 0.001}
cluster:
  router: least_outstanding
  ec_transfer: {bandwidth: 0.001, latency: 20}
  groups:
    language: {replicas: 2, ec_role: ec_consumer}
    encode: {replicas: 2, ec_role: ec_producer}
workload:
  trace: {path: trace.csv}
  multimodal: {image: {tokens: 20}}
"""
ENCODE = 0.2  # s, of an image
SEND = 20 * 2 * 4096 / 1e6  # s, at 0.001 GB/s
LATENCY = 0.02


def made(folder: Path, rows: list[str], *options: str, stepwise: bool = False) -> Result:
    head = "arrival,prompt_tokens,output_tokens,images\n"
    (folder / "trace.csv").write_text(head + "".join(f"{row}\n" for row in rows))
    path = folder / "s.yaml"
    path.write_text(SCENARIO)
    return run(load_scenario(path, options), stepwise=stepwise)


def test_a_lone_request_is_encoded_then_sent_then_prefilled(tmp_path: Path) -> None:
    """And one of text goes past the encoders."""
    result = made(tmp_path, ["0,10,1,1", "5,10,1,0"])
    one, text = (row for _, row in result.requests.iterrows())
    assert one["encoder_time"] == pytest.approx(ENCODE, rel=1e-12)
    assert one["ec_transfer_time"] == pytest.approx(SEND + LATENCY, rel=1e-12)
    prefill = 0.1 + 30 * 0.001
    assert one["ttft"] == pytest.approx(ENCODE + SEND + LATENCY + prefill, rel=1e-12)
    assert text["ttft"] == pytest.approx(0.1 + 10 * 0.001, rel=1e-12)
    assert text["encoder_time"] == text["ec_transfer_time"] == 0
    own = result.summary()["headway"]
    links = own["cluster"]["ec_transfer"]
    assert (links["requests"], links["transfers"], links["bytes"]) == (1, 1, 20 * 8192)
    assert links["mean_encoder_time_ms"] == pytest.approx(1e3 * ENCODE)
    assert links["link_utilization"] == pytest.approx(SEND / 2 / result.summary()["duration"])
    assert own["encoded_items"] == 1
    assert own["encoding_time"] == pytest.approx(ENCODE)


def test_images_of_a_request_are_shared_out(tmp_path: Path) -> None:
    """Of three one encoder gets two, in one step; the second waits for the link."""
    result = made(tmp_path, ["0,10,1,3"])
    (row,) = result.requests.to_dict("records")
    assert row["encoder_time"] == pytest.approx(2 * ENCODE)
    assert row["ec_transfer_time"] == pytest.approx(2 * SEND + LATENCY)


def test_a_replica_of_vllm_alone_takes_the_time_of_both(tmp_path: Path) -> None:
    """Without encoders apart the image is encoded in the step that computes the prompt."""
    apart = made(tmp_path, ["0,10,1,1"]).requests.iloc[0]
    whole = made(tmp_path, ["0,10,1,1"], "cluster={replicas: 1}").requests.iloc[0]
    assert apart["ttft"] - whole["ttft"] == pytest.approx(SEND + LATENCY)


def test_what_is_stored_is_neither_encoded_nor_sent_again(tmp_path: Path) -> None:
    """Nor is what is on its way sent twice: the second request waits for the first's output."""
    rows = ["0,10,1,1", "0.3,10,1,1", "9,10,1,1"]
    result = made(tmp_path, rows, "workload.multimodal.image.distinct=1")
    encoder, sent = (
        result.requests[f"{part}_time"].tolist() for part in ("encoder", "ec_transfer")
    )
    assert encoder == pytest.approx([ENCODE, ENCODE, 0], abs=1e-9)
    assert sent == pytest.approx([SEND + LATENCY, 0, 0], abs=1e-9)
    own = result.summary()["headway"]
    assert own["encoded_items"] == 2
    prompts = sum(result.requests.prompt_tokens - result.requests.cached_tokens)
    assert own["encoded_tokens"] == 40
    assert own["prefill_tokens"] == prompts + own["encoded_tokens"]
    assert own["cluster"]["ec_transfer"]["transfers"] == 1


def test_the_parts_of_the_time_are_the_whole(tmp_path: Path) -> None:
    rows = [f"{k / 4},{20 + k % 50},{1 + 3 * k % 40},{k * k % 5}" for k in range(60)]
    result = made(tmp_path, rows, "cluster.client={timeout: 4, max_retries: 1, backoff: 0.1}")
    done = result.requests[result.requests.finish_reason.isin(["stop", "length"])]
    parts = ["queue_time", *result.time_parts()]
    assert parts[:4] == ["queue_time", "retry_time", "encoder_time", "ec_transfer_time"]
    np.testing.assert_allclose(done[parts].sum(axis=1), done["e2el"], atol=1e-9)
    assert (done["retry_time"] > 0).any()
    assert set(done["replica"]) == {0, 1}
    groups = result.summary()["headway"]["cluster"]["groups"]
    assert groups["encode"]["completed"] == groups["encode"]["mfu"] == 0
    assert groups["language"]["completed"] == len(done)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_run_leaps_as_it_steps(tmp_path: Path, asynchronous: str) -> None:
    """To the last bit, also where clients let go of requests and encoders come and go."""
    rows = [f"{k / 3},{20 + k % 50},{1 + 3 * k % 40},{k * k % 5}" for k in range(80)]
    options = [
        f"engine.async_scheduling={asynchronous}",
        "workload.multimodal.image.distinct=40",
        "engine.multimodal_config.encoder_cache_size=45",
        "cluster.client={timeout: 3, max_retries: 1}",
        "cluster.ec_transfer.bandwidth=0.01",
        "cluster.groups.encode.replicas=1",
        "cluster.groups.encode.autoscaling={target: 1, max_replicas: 3, interval: 1, "
        "startup_delay: 1}",
    ]
    one, other = (made(tmp_path, rows, *options, stepwise=stepwise) for stepwise in (False, True))
    assert one.requests.equals(other.requests)
    own, alike = (result.summary()["headway"] for result in (one, other))
    assert own["cluster"]["ec_transfer"] == alike["cluster"]["ec_transfer"]
    assert own["encoded_items"] == alike["encoded_items"] > 0
    assert own["cluster"]["scalings"] > 0
    assert own["cluster"]["timed_out_tries"] > 0


def test_an_image_that_no_encoder_takes_is_refused(tmp_path: Path) -> None:
    """It is larger than what a step encodes at most."""
    most = "engine.multimodal_config.max_num_encoder_input_tokens=400"
    result = made(tmp_path, ["0,10,1,1", "0,10,1,0"], "workload.multimodal.image.tokens=401", most)
    assert result.requests.finish_reason.tolist() == ["rejected", "stop"]


def test_encoders_need_no_room_for_the_language_model(tmp_path: Path) -> None:
    """14 GB of weights are on no encoder, and it has the encoder's own table."""
    options = ("cluster.groups.encode.gpu={name: L4}", "cluster.groups.encode.dollars_per_hour=0.5")
    own = made(tmp_path, ["0,10,1,1"], *options).summary()["headway"]
    one, other = (own["cluster"]["groups"][name] for name in ("language", "encode"))
    assert own["cluster"]["gpus"] == 4
    assert other["ec_role"] == "ec_producer"
    assert own["cluster"]["dollars_per_hour"] == pytest.approx(one["dollars_per_hour"] + 1.0)


def test_what_explains_a_request_and_starts_the_servers(tmp_path: Path) -> None:
    result = made(tmp_path, ["0,10,1,1"])
    write_run(result, tmp_path / "run")
    text = explain(tmp_path / "run", 0)
    assert "its images sent to the encoders" in text
    command = serve_command(result.scenario)
    assert command.count("--ec-transfer-config") == 2
    assert '"ec_role": "ec_producer"' in command


@pytest.mark.parametrize(
    ("count", "row", "says", "to"),
    [
        (1, lambda k: f"{k * 0.9},10,2,3", "Images are at the encoders for", 2),
        (1, lambda k: f"{k // 10 * 20},10,2,1", "Images are at the encoders for", 2),
        (2, lambda k: f"{k * 10},10,2,1", "Encoders apart save next to", 1),
        (2, lambda k: f"{k * 10},10,2,0", "Encoders apart save next to", 1),
    ],
    ids=["busy", "in bursts", "idle", "no images"],
)
def test_a_finding_for_encoders(
    tmp_path: Path, count: int, row: Callable[[int], str], says: str, to: int
) -> None:
    """Those that all wait for, also in bursts, and those that have nothing to do."""
    rows = [row(k) for k in range(40)]
    result = made(tmp_path, rows, f"cluster.groups.encode.replicas={count}")
    found = result.summary()["headway"]["diagnosis"]
    (finding,) = [one for one in found if one["rule"] == "encoder"]
    assert finding["text"].startswith(says)
    knob = finding["advice"][0]
    assert (knob["key"], knob["to"]) == ("cluster.groups.encode.replicas", to)


TEXT = "workload.trace=null workload.columns=null workload.multimodal=null workload.num_prompts=1"
ROLES = "cluster={groups: {a: {ec_role: ec_consumer}, b: {ec_role: ec_producer}}, ec_transfer: {}"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("cluster.ec_transfer=null", "cluster.ec_transfer: groups with ec_role need it"),
        ("cluster.groups.encode.ec_role=null", "encode.ec_role: ec_producer or ec_consumer, as"),
        ("cluster.groups.encode.ec_role=both", "encode.ec_role: must be"),
        ("cluster.groups.language.replicas=0", "cluster.groups: there is no replica of ec_role"),
        ("cluster.groups.encode.cost={kind: roofline}", "encode.cost: an ec_producer runs no"),
        ("cluster.groups.encode.model=qwen3-8b", "encode.model: cannot be used with ec_role: all"),
        ("cluster.failures={mtbf: 100}", "cluster.failures: cannot be used with ec_role: none is"),
        (ROLES + ", pods: 1}", "pods: cannot be used with ec_role: encoders would be shared"),
        (ROLES + ", kv_transfer: {}}", "kv_transfer"),
        ("cluster={replicas: 2, ec_transfer: {}}", "cluster.ec_transfer: needs groups of"),
        ("cluster.ec_transfer.bandwidth=0", "cluster.ec_transfer.bandwidth: must be"),
        ("cluster.ec_transfer.router=nearest", "no router 'nearest'"),
        (f"{TEXT} engine.multimodal_config=null", "ec_role: needs engine.multimodal_config"),
        ("cluster.groups.encode.engine.ec_transfer_config={}", "give cluster.ec_transfer, and"),
        ("engine.data_parallel_size=2", "data_parallel_size"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, option: str, says: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        made(tmp_path, ["0,10,1,1"], *re.split(" (?=workload|engine)", option))
    (line,) = caught.value.messages
    assert says in line
