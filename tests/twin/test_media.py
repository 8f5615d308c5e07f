"""Images and clips in prompts: counted by the scenario's law, in their places, up to limits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jinja2")
from aiohttp import ClientSession

from headway.twin.api.chat_template import ChatTemplate
from headway.twin.server import Server
from simulator import run
from simulator.core.request import Media
from simulator.scenario.load import load_scenario
from tests.support.twins import served_by

ENGINE = "engine.multimodal_config={limit_mm_per_prompt: {image: 4}, encoder_seconds: [[1, 0.1]]}"
LAW = "workload.multimodal={image: {tokens: 100}, audio: {tokens: 30}}"
BY_TEXT = "{% for m in messages %}{{ m.content }} {% endfor %}"
BY_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }} "
    "{% else %}<{{ part.type }}> {% endif %}{% endfor %}{% endfor %}"
)


def part(kind: str, name: str = "a") -> dict[str, Any]:
    sound = {"data": name, "format": "wav"}
    return {"type": kind, kind: sound if kind == "input_audio" else {"url": f"data:{name}"}}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return {"role": "user", "content": texts}


async def ask(client: ClientSession, *messages: Any) -> tuple[int, dict[str, str], Any]:
    body = {"messages": messages, "max_tokens": 1}
    async with client.post("/v1/chat/completions", json=body) as response:
        heads = {k: v for k, v in response.headers.items() if k.startswith("X-Headway")}
        return response.status, heads, await response.json()


async def tokens(client: ClientSession, *messages: Any) -> int:
    status, _, answer = await ask(client, *messages)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens"])


def test_images_and_sounds_count_by_the_law() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        assert await tokens(client, user("one two")) == 2
        assert await tokens(client, user("one two", part("image_url"))) == 102
        assert await tokens(client, user(part("input_audio"), "one"), user("two")) == 32
        by_key = {"image_url": "data:a"}  # without a type, as vLLM
        status, heads, answer = await ask(client, user("one", by_key, part("file")))
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 101)
        assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 100}
        ignored = {"X-Headway-Ignored": "file", "X-Headway-Estimated": "prompt_tokens"}
        assert heads == ignored
        text = await (await client.get("/report/requests")).text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["input_length"] for row in rows] == [2, 102, 32, 101]
        found = server.engine.result().requests
        assert found.ttft[1] > found.ttft[0] + 0.05  # the encoder's time

    served_by(play, ENGINE, LAW)


def test_an_image_comes_again_from_the_caches() -> None:
    async def play(client: ClientSession, server: Server) -> None:
        async def cached(name: str) -> int:
            _, _, answer = await ask(client, user("one", part("image_url", name)))
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(name) for name in ("a", "b", "a")] == [0, 0, 96]
        names = [
            segments[0][0]
            for segments in server.engine.result().workload.segments or ()
            if segments
        ]
        assert all(isinstance(name, Media) for name in names)
        assert names[0] == names[2] != names[1]
        text = await (await client.get("/metrics")).text()
        assert re.findall(r"vllm:mm_cache_(.*)_total\{.* (.*)", text) == [
            ("queries", "3.0"),
            ("hits", "1.0"),
        ]

    served_by(play, ENGINE, LAW, "engine.enable_prefix_caching=true")


def test_the_served_requests_play_again(tmp_path: Path) -> None:
    async def play(client: ClientSession, server: Server) -> None:
        for name in ("a", "b", "a"):
            await ask(client, user("one two", part("image_url", name), "three"))
        server.write(tmp_path)
        again = run(server.scenario, workload=server.engine.result().workload)
        assert [*again.requests.ttft] == pytest.approx(
            [*server.engine.result().requests.ttft], abs=0.01
        )

        told.extend(server.engine.result().requests.ttft)

    told: list[float] = []
    served_by(play, ENGINE, LAW)
    again = run(load_scenario(tmp_path / "replay.yaml"))
    assert [*again.requests.ttft] == pytest.approx(told, abs=1e-6)
    assert told[0] > 10 > told[2]  # the encoder's time of one image, and that of one it has seen


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([{"type": "refusal", "refusal": "no two"}, {"type": "output_text", "text": "a"}], 3),
        ([{"type": "text", "text": "a"}, {"type": "foo", "foo": 1}], None),
    ],
    ids=["known", "unknown"],
)
def test_parts_of_unknown_kinds_are_refused_in_vllms_words(parts: Any, words: int | None) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        status, _, answer = await ask(client, user(*parts))
        if words is None:
            why = answer["error"]["message"]
            assert status == 400
            assert why.startswith(
                "Unsupported chat content part type: 'foo'. Supported types: audio_"
            )
            assert why.endswith("video_embeds, video_url. (parameter=type, value=foo)")
        else:
            assert answer["usage"]["prompt_tokens"] == words

    served_by(play)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"type": "image_url"}, "'loc': 'body.image_url', 'msg': 'Field required'"),
        ({"type": "image_url", "image_url": {}}, "'loc': 'body.image_url.url'"),
        ({"type": "image_url", "image_url": "data:a"}, "'loc': 'body.image_url'"),
        ({"type": "input_audio", "input_audio": {"data": "a"}}, "'body.input_audio.format'"),
        ({"words": "a"}, "Missing 'type' field in multimodal part. (parameter=type)"),
    ],
)
def test_a_part_without_what_it_is_of_is_refused(wrong: Any, told: str) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        status, _, answer = await ask(client, user("one", wrong))
        assert status == 400
        assert told in answer["error"]["message"]

    served_by(play)


def test_more_images_than_the_limit_are_refused() -> None:
    """As in vLLM: five beside a limit of four; sounds have a limit of their own, or none."""

    async def play(client: ClientSession, _: Server) -> None:
        assert await tokens(client, user("a", *[part("image_url")] * 4)) == 401
        many = [part("image_url")] * 3
        status, _, answer = await ask(client, user("a", *many), user(*many[:2]))
        assert status == 400
        told = "At most 4 image(s) may be provided in one prompt. (parameter=image)"
        assert answer["error"]["message"] == told
        assert await tokens(client, user("a", *[part("audio_url")] * 5)) == 151

    served_by(play, ENGINE, LAW)


def test_an_image_beyond_the_encoders_cache_is_refused_in_vllms_words() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        status, _, answer = await ask(client, user("a", part("image_url")))
        assert status == 400
        assert (
            "a(n) image item with 1024 embedding tokens, which exceeds"
            in answer["error"]["message"]
        )
        assert "engine.multimodal_config.encoder_cache_size" in answer["error"]["message"]

    async def takes_the_default(client: ClientSession, _: Server) -> None:
        assert (await ask(client, user("a", part("image_url"))))[0] == 200

    served_by(play, ENGINE, "engine.multimodal_config.encoder_cache_size=1000")
    served_by(takes_the_default, ENGINE, "engine.max_num_batched_tokens=512")


def test_images_of_a_scenario_of_text_are_ignored() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        status, heads, answer = await ask(client, user("one two", part("image_url")))
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
        assert heads["X-Headway-Ignored"] == "image_url"
        status, _, answer = await ask(client, user(part("image_url")))
        assert status == 400
        assert answer["error"]["message"] == (
            "The model is not a multimodal model "
            "(in Headway: engine.multimodal_config makes it one)"
        )
        status, _, answer = await ask(client, user(part("file")))
        assert (status, answer["error"]["message"]) == (400, "The decoder prompt cannot be empty")

    served_by(play)


@pytest.mark.parametrize(("source", "text"), [(BY_TEXT, 3), (BY_PARTS, 5)])
def test_templates_get_a_text_or_parts(source: str, text: int) -> None:
    """vLLM's content formats: "string" has images before the text, "openai" where they are."""

    async def play(client: ClientSession, server: Server) -> None:
        server.counter.template = template = ChatTemplate(source, "here")
        assert template.takes_parts == (source is BY_PARTS)
        message = user("one", part("image_url"), "two", part("image_url", "b"))
        assert await tokens(client, message, user("three")) == text + 200
        (segments,) = server.engine.result().workload.segments or ()
        places = [isinstance(name, Media) for name, _ in segments or ()]
        assert places == ([True, True, False] if text == 3 else [False, True, False, True, False])

    served_by(play, ENGINE, LAW, "engine.block_size=64")
