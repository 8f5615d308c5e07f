"""The same requests, right and wrong, to a real vLLM and to `headway serve`: the same answers.

What still differs is listed here and in docs/serve.md. A difference that is in no list fails, and
so does one that is listed and is gone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT
from tests.support.live_vllm import FLAGS, LiveServer
from tests.support.twins import twin
from tests.support.wire import (
    RIGHT,
    WRONG,
    ask,
    chunks,
    described,
    families,
    shape,
    without_repeats,
)

pytestmark = pytest.mark.engine

NAME = "tiny"
SCENARIO = """
name: wire
model: {model}
gpu: CPU
engine:
  name: vllm
  version: "0.32.0"
  max_num_seqs: {--max-num-seqs}
  max_num_batched_tokens: {--max-num-batched-tokens}
  max_model_len: {--max-model-len}
  block_size: {--block-size}
  num_gpu_blocks_override: 500
  async_scheduling: false
cost: {{kind: linear, base: 1e-3}}
workload: {{num_prompts: 10, request_rate: 1, input_len: 100, output_len: 10}}
"""
OTHER_MESSAGES = {
    "text beyond the context": "vLLM counts characters before it tokenizes",
    "chat beyond the context": "vLLM counts characters before it tokenizes",
    "message without a role": "vLLM tells of each kind of message that it could have been",
    "no input": "vLLM adds a tool_choice before it counts the keys",
    "content a number": "vLLM tells of each kind of message that it could have been",
}
"""Wrong requests of which the message and the key that it names differ, and why."""
NEWER = {"prompt_cache_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
NEWER |= {"weight_versions"}
"""Keys of answers that vLLM has from 0.33 on; the live one is 0.32."""
ONLY_LIVE = ("http_", "process_", "python_", "vllm:estimated_")
"""Beginnings of names of metrics that vLLM alone has; and each `_created`."""
ONLY_TWIN = {"headway:late_seconds", "headway:speed"}


@pytest.fixture(scope="module")
def both(live: LiveServer, models: Callable[[str], Path], tmp_path_factory: Any) -> Any:
    """The addresses of the live server and of its twin."""
    model = models("llama")
    path = tmp_path_factory.mktemp("wire") / "wire.yaml"
    path.write_text(SCENARIO.format(model=model, **FLAGS))
    options = "--port", "0", "--tokenizer", str(model), "--served-model-name", NAME
    with twin(str(path), *options) as ((url,), _):
        yield live.url, url


def test_answers_have_the_same_fields(both: tuple[str, str], show: Callable[[str], None]) -> None:
    """Status, content type, and of each chunk the keys, the kinds of values, and what is null."""
    for name, (where, what) in RIGHT.items():
        found = []
        for url in both:
            status, kind, body = ask(url, NAME, where, what)
            shapes = without_repeats([shape(chunk, NEWER) for chunk in chunks(body)])
            found.append((status, kind, shapes))
        assert found[0] == found[1], name
        assert found[0][0] == 200, name
    show(f"the live server and its twin: {len(RIGHT)} kinds of answers have the same fields")


def test_the_recorded_addresses_are_those_of_the_live_server(both: tuple[str, str]) -> None:
    """tests/support/vllm_openapi.json, against which tests/twin holds ours."""
    live = json.loads(ask(both[0], NAME, "/openapi.json", None)[2])
    recorded = Path(ROOT) / "tests/support/vllm_openapi.json"
    assert described(live) == json.loads(recorded.read_text("utf-8"))


def test_wrong_requests_are_refused_in_the_same_words(
    both: tuple[str, str], show: Callable[[str], None]
) -> None:
    differ = {}
    for name, (where, what) in WRONG.items():
        live, ours = (ask(url, NAME, where, what) for url in both)
        assert live[:2] == ours[:2], name
        assert live[0] >= 400, name
        bodies = [json.loads(one[2]) for one in (live, ours)]
        if bodies[0] == bodies[1]:
            continue
        differ[name] = [body["error"].pop("message") for body in bodies]
        for body in bodies:
            body["error"].pop("param")
        assert bodies[0] == bodies[1], name
    assert differ.keys() == OTHER_MESSAGES.keys(), differ
    show(
        f"of {len(WRONG)} wrong requests {len(WRONG) - len(differ)} are refused in the same words, "
        f"{len(differ)} in others"
    )


def test_metrics_have_the_same_names(both: tuple[str, str], show: Callable[[str], None]) -> None:
    """And kinds; labels, too, but those of cache_config_info, which tells all of vLLM's config."""
    live, ours = (families(ask(url, NAME, "/metrics", None)[2].decode()) for url in both)
    assert ours.keys() - live.keys() == ONLY_TWIN
    lacking = {name for name in live.keys() - ours.keys() if not name.endswith("_created")}
    assert not [name for name in lacking if not name.startswith(ONLY_LIVE)]
    for name in live.keys() & ours.keys():
        if name != "vllm:cache_config_info":
            assert live[name] == ours[name], name
    assert ours["vllm:cache_config_info"][1] <= live["vllm:cache_config_info"][1]
    show(f"/metrics: {len(live.keys() & ours.keys())} families have the same names and labels")
