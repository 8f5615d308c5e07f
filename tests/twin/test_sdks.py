"""SDKs and frameworks that people write clients with, against `headway serve`.

`make test-clients` installs them. Each streams the same chats and measures by its own clock.
"""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from tests.support.clients import GIVEN, HARNESS, OPENAI, OSL, call, compare, program, served

pytestmark = pytest.mark.clients

COUNT = 12
PYTHON = {
    "openai": ("openai", OPENAI),
    "openai, Responses": (
        "openai",
        """
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

async def stream(text):
    events = await client.responses.create(
        model="twin", input=text, max_output_tokens=OSL, stream=True, extra_body=EXTRA)
    async for event in events:
        if event.type == "response.output_text.delta":
            yield event.delta
    assert event.response.usage.output_tokens == OSL
""",
    ),
    "litellm": (
        "openai",
        """
import litellm

async def stream(text):
    chunks = await litellm.acompletion(
        model="hosted_vllm/twin", api_base=f"{URL}/v1", api_key="none", max_tokens=OSL,
        messages=[{"role": "user", "content": text}], stream=True, extra_body=EXTRA)
    async for chunk in chunks:
        yield chunk.choices[0].delta.content
""",
    ),
    "anthropic": (
        "sdks",
        """
from anthropic import AsyncAnthropic

client = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)

async def stream(text):
    events = await client.messages.create(
        model="twin", messages=[{"role": "user", "content": text}], max_tokens=OSL,
        stream=True, extra_body=EXTRA)
    async for event in events:
        if event.type == "content_block_delta":
            yield event.delta.text
""",
    ),
    "langchain": (
        "sdks",
        """
from langchain_openai import ChatOpenAI

client = ChatOpenAI(model="twin", base_url=f"{URL}/v1", api_key="none", max_retries=0,
                    max_tokens=OSL, extra_body=EXTRA)

async def stream(text):
    async for chunk in client.astream(text):
        yield chunk.content
""",
    ),
    "llama-index": (
        "sdks",
        """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

client = OpenAILike(model="twin", api_base=f"{URL}/v1", api_key="none", is_chat_model=True,
                    max_tokens=OSL, max_retries=0, additional_kwargs={"extra_body": EXTRA})

async def stream(text):
    async for chunk in await client.astream_chat([ChatMessage(role="user", content=text)]):
        yield chunk.delta
""",
    ),
    "semantic-kernel": (
        "sdks",
        """
from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion, OpenAIChatPromptExecutionSettings)
from semantic_kernel.contents import ChatHistory

inner = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
client = OpenAIChatCompletion(ai_model_id="twin", async_client=inner)
given = OpenAIChatPromptExecutionSettings(max_tokens=OSL, extra_body=EXTRA)

async def stream(text):
    history = ChatHistory()
    history.add_user_message(text)
    async for chunk in client.get_streaming_chat_message_content(history, given):
        yield str(chunk)
""",
    ),
}
"""By name: the environment, and what streams the pieces of an answer."""
NODE_HARNESS = """
const [url, count, osl] = [process.argv[2], +process.argv[3], +process.argv[4]];

async function ask(number) {
  await new Promise((done) => setTimeout(done, 250 * number));
  const begin = performance.now(), times = [], text = `${number} ` + "word ".repeat(1500);
  for await (const piece of stream(text)) if (piece) times.push(performance.now());
  if (times.length !== osl) throw new Error(`${times.length} pieces of ${osl}`);
  return [times[0] - begin, (times.at(-1) - times[0]) / (osl - 1), times.at(-1) - begin];
}

const rows = await Promise.all([...Array(count).keys()].map(ask));
const middle = (k) => rows.map((row) => row[k]).sort((a, b) => a - b).slice(count / 2 - 1)
  .slice(0, 2).reduce((a, b) => a + b) / 2;
console.log(JSON.stringify([0, 1, 2].map(middle)));
"""
NODE = {
    "openai for Node": """
import OpenAI from "openai";

async function* stream(text) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const chunks = await client.chat.completions.create({
    model: "twin", messages: [{ role: "user", content: text }], max_tokens: osl,
    stream: true, ignore_eos: true });
  for await (const chunk of chunks) yield chunk.choices[0]?.delta?.content;
}
""",
    "Vercel's AI SDK": """
import { streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

async function* stream(text) {
  const provider = createOpenAICompatible({ name: "t", baseURL: `${url}/v1`, apiKey: "none" });
  const found = streamText({
    model: provider("twin"), prompt: text, maxOutputTokens: osl, maxRetries: 0,
    providerOptions: { t: { ignore_eos: true } } });
  yield* found.textStream;
}
""",
}


def measure(name: str, tmp_path: Path, *command: str) -> None:
    """Run a client, which prints its medians, and hold them against the simulation's."""
    with served(tmp_path) as (url, _):
        found = json.loads(call(*command, url, str(COUNT), str(OSL), cwd=tmp_path).splitlines()[-1])
        ttft, tpot, e2el = found
        compare(name, url, COUNT, of="median", ttft=ttft, tpot=tpot, e2el=e2el)


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_client(name: str, tmp_path: Path) -> None:
    package, script = PYTHON[name]
    python = program(package, "python")
    measure(name, tmp_path, python, "-c", GIVEN + script + HARNESS)


@pytest.mark.parametrize("name", NODE)
def test_a_node_client(name: str, tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node on this machine")
    (tmp_path / "node_modules").symlink_to(program("node", "node_modules"))
    script = tmp_path / "client.mjs"
    script.write_text(NODE[name] + NODE_HARNESS)
    measure(name, tmp_path, node, str(script))
