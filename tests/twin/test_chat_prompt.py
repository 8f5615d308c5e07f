"""What a model sees of a chat: by a template, as vLLM makes it, or by an estimate that says so."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("jinja2")
from aiohttp import ClientSession

from headway.cli.main import main
from headway.twin.api.bodies import BadRequestError, ChatBody
from headway.twin.api.chat_prompt import chat_prompt
from headway.twin.api.chat_template import ChatTemplate, own_template
from headway.twin.api.tokenizers import TokenCounter
from headway.twin.server import Server, token_counter
from simulator.util.errors import HeadwayError
from tests.support.twins import served_by

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "finds a word " * 100,
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    for number in range(20)
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "tool_3", "arguments": '{"q": "where is the word"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "look for it"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "it is here"},
]
TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
    {%- for tool in tools %}
 [tool {{ tool.function.name }} {{ tool.function.parameters | tojson }}]
    {%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('no <system> here') }}{% endif %}
 [{{ m.role }}] {{ m.content }}
    {%- for call in m.tool_calls or [] %}
        {%- for name, value in call.function.arguments.items() %}
 ({{ name }} = {{ value }})
        {%- endfor %}
    {%- endfor %}
    {%- if m.role == 'assistant' %}{% generation %} {% endgeneration %}{% endif %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %} [assistant]{% endif %}
{%- if thinking %} <think>{% endif %}
"""


def rendered(**body: Any) -> str:
    """Render a body by TEMPLATE, as `chat_prompt` does."""
    seen: list[str] = []

    class Seen(TokenCounter):
        template = ChatTemplate(TEMPLATE, "here", {"bos_token": "<s>"})

        def encode(self, text: str) -> list[int]:
            seen.append(text)
            return [1]

    chat_prompt(ChatBody.model_validate({"messages": CHAT, **body}), Seen())
    (text,) = seen
    return text


def tokens_of(counter: TokenCounter) -> Sequence[int]:
    return chat_prompt(ChatBody.model_validate({"messages": CHAT}), counter).tokens


def test_a_template_sees_tools_calls_and_what_the_body_says() -> None:
    parameters = json.dumps(TOOLS[0]["function"]["parameters"])  # type: ignore[index]
    text = rendered(tools=TOOLS[:1], chat_template_kwargs={"thinking": True, "messages": []})
    assert f"[tool tool_0 {parameters}]" in text
    assert "(q = where is the word)" in text
    assert "[tool] it is here" in text
    assert text.endswith("[assistant] <think>")
    plain = "<s> [user] look for it [assistant]  (q = where is the word)  [tool] it is here"
    assert rendered().replace("\n", "") == f"{plain} [assistant]"
    assert rendered(add_generation_prompt=False).endswith("[tool] it is here")


def test_what_a_template_objects_to_is_told() -> None:
    with pytest.raises(BadRequestError, match=r"^no <system> here$"):
        rendered(messages=[{"role": "system", "content": "a"}])


@pytest.mark.parametrize(
    ("template", "text"),
    [("", "[system a\n\nb\n\nc] [user d] "), ("{# 'developer' #}", "[user d] [developer b] ")],
)
def test_developers_are_the_system_where_a_template_does_not_know_them(
    template: str, text: str
) -> None:
    """As in vLLM: one message at the beginning."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
    ]
    if template:
        messages = messages[1:3]
    seen: list[str] = []

    class Seen(TokenCounter):
        def encode(self, text: str) -> list[int]:
            seen.append(text)
            return [1]

    counter = Seen()
    each = "{% for m in messages %}[{{ m.role }} {{ m.content }}] {% endfor %}"
    counter.template = ChatTemplate(template + each, "here")
    chat_prompt(ChatBody.model_validate({"messages": messages}), counter)
    assert seen == [text]


@pytest.mark.parametrize("word", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_is_kept_in_its_sandbox(word: str) -> None:
    counter = TokenCounter()
    counter.template = ChatTemplate(word, "here")
    with pytest.raises(BadRequestError, match=r"unsafe|not safely"):
        tokens_of(counter)


def test_a_tokenizer_brings_its_template(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    config["bos_token"] = {"content": "</s>"}
    path.write_text(json.dumps(config))
    counter = token_counter(tmp_path)
    assert tokens_of(counter) == counter.encode("</s>look for it")
    assert tokens_of(counter)[0] == 1  # as one token
    (tmp_path / "chat_template.jinja").write_text("of the file")
    counter = token_counter(tmp_path)
    assert tokens_of(counter) == counter.encode("of the file")
    other = tmp_path / "other.jinja"
    other.write_text("of the option")
    for given in (str(other), "of the {{ 'option' }}"):  # a file, or the template itself
        counter = token_counter(tmp_path, given)
        assert tokens_of(counter) == counter.encode("of the option")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("chat_template.jinja", "a\n{% if %}", r"chat_template\.jinja:2: chat template: "),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: "),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: .*is not a mapping"),
        ("tokenizer_config.json", '{"chat_template": "{{"}', r"config\.json:1: chat template: "),
    ],
)
def test_a_broken_template_is_told_with_its_line(
    name: str, text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(HeadwayError, match=told):
        own_template(tmp_path)


def test_the_option_names_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", "--port", "0", "--chat-template", str(tmp_path / "no")]) == 2
    assert f"--chat-template: {tmp_path / 'no'}: no such file" in capsys.readouterr().err


def test_without_a_template_tools_and_calls_are_estimated_and_it_is_said() -> None:
    async def play(client: ClientSession, _: Server) -> None:
        async def asked(**body: Any) -> tuple[int, dict[str, str]]:
            body = {"messages": CHAT[:1], "max_tokens": 1, **body}
            async with client.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                usage = (await response.json())["usage"]
                heads = {k: v for k, v in response.headers.items() if k.startswith("X-Headway")}
                async with client.post("/tokenize", json=body) as same:
                    assert (await same.json())["count"] == usage["prompt_tokens"]
                return usage["prompt_tokens"], heads

        said = {"X-Headway-Estimated": "prompt_tokens"}
        assert await asked() == (3, said)
        count, heads = await asked(tools=TOOLS)
        assert count > 20 * 300
        assert heads == said
        alone, _ = await asked(messages=[CHAT[0], {**CHAT[1], "tool_calls": None}, CHAT[2]])
        count, _ = await asked(messages=CHAT)
        assert count > alone + 5
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        parts = [{"type": "text", "text": "what is this"}, image]
        choice = {"type": "function", "function": {"name": "tool_3"}}
        count, heads = await asked(
            messages=[{"role": "user", "content": parts}],
            tools=TOOLS[:4],
            tool_choice=choice,
            chat_template_kwargs={"thinking": True},
        )
        ignored = "chat_template_kwargs, image_url"
        assert heads == said | {"X-Headway-Ignored": ignored}

    served_by(play)


def test_a_trained_tokenizer_counts_tools_and_calls(tokenizer: Path) -> None:
    counter = token_counter(tokenizer)

    def count(**body: Any) -> int:
        return len(chat_prompt(ChatBody.model_validate(body), counter).tokens)

    alone = count(messages=[CHAT[0], CHAT[2]])
    assert alone == len(counter.encode("look for it" + "it is here"))
    assert count(messages=CHAT) > alone + 5
    assert count(messages=[CHAT[0], CHAT[2]], tools=TOOLS) > alone + 20 * 300


def test_with_a_template_the_prompt_is_what_it_makes(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    async def play(client: ClientSession, server: Server) -> None:
        body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 1}
        async with client.post("/v1/chat/completions", json=body) as response:
            usage = (await response.json())["usage"]
            assert "X-Headway-Estimated" not in response.headers
        text = rendered(tools=TOOLS)
        assert usage["prompt_tokens"] == len(server.counter.encode(text)) > 400
        wrong = {**body, "messages": [{"role": "system", "content": "a"}]}
        async with client.post("/v1/chat/completions", json=wrong) as response:
            assert response.status == 400
            assert "no <system> here" in await response.text()

    served_by(play, tokenizer=tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"function": {}}]},
        {"tools": [{"type": "other", "function": {"name": "a"}}]},
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": [3]}]},
        {"tools": []},
    ],
)
def test_what_is_no_tool_and_no_call_is_refused(wrong: dict[str, Any]) -> None:
    async def play(client: ClientSession, _: Server) -> None:
        body = {"messages": CHAT, "max_tokens": 1, **wrong}
        async with client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 400

    served_by(play)
