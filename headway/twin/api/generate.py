"""The addresses where a vLLM generates: a body is read, put to the engine, and answered."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from headway.twin.api import bodies
from headway.twin.api.answers import Answer, ChatAnswer, Choice
from headway.twin.api.bodies import BadRequestError, ChatBody, CompletionBody, read_types, refuse
from headway.twin.api.messages import CountTokensBody, MessageAnswer, MessagesBody
from headway.twin.api.openai import MOST_TOKENS, Reader, Wanted, client_name, output_tokens
from headway.twin.api.refusals import web
from headway.twin.api.responses import ResponseAnswer, ResponseChat, ResponsesBody, Stored
from headway.twin.api.said import Said
from headway.twin.asked import Asked
from headway.twin.fault_injection import FailureRates
from headway.twin.live_engine import LOST, LiveEngine
from simulator.core.request import Request
from simulator.scenario.draw import make_workload
from simulator.scenario.scenario import Scenario

MOST_BYTES = 16 * 2**20  # of a body
MOST_UNSENT = 2**20  # bytes that a client may leave unread: then it is taken for gone
LOOK = 16  # tokens from one look at what a client has left unread to the next
MOST_REQUESTS = 10_000  # at once
MOST_ANSWERS = 128  # to one request
READ_SECONDS = 60.0  # that a body may take
ANSWERED = ("stop", "length")
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
ANSWERS: dict[str, tuple[type[BaseModel], type[Answer]]] = {
    "/v1/completions": (CompletionBody, Answer),
    "/v1/chat/completions": (ChatBody, ChatAnswer),
    "/v1/messages": (MessagesBody, MessageAnswer),
    "/v1/responses": (ResponsesBody, ResponseAnswer),
}
"""What is read and what is answered at each address where a vLLM generates."""


class ApiServer:
    """Puts requests to a live engine, and its tokens into answers."""

    def __init__(
        self, scenario: Scenario, engine: LiveEngine, reader: Reader, fingerprint: str
    ) -> None:
        self.engine, self.reader, self.fingerprint = engine, reader, fingerprint
        self.failures = FailureRates(scenario.seed)
        self.responses = Stored()
        self.open = 0  # requests that are being answered
        self.said: dict[int, tuple[Sequence[int], int]] = {}  # by id: prompt, first word
        self._caches = scenario.engine.enable_prefix_caching
        self._lengths = make_workload(scenario).output_tokens
        self._seed, self._random = scenario.seed, np.random.default_rng(scenario.seed)
        self._serial = 0
        self._frontend = scenario.workload.make_frontend()
        self._free = 0.0  # simulated s, when the frontend has passed on all requests so far

    # Bodies.

    async def body(self, request: web.Request, kind: type[BaseModel]) -> Any:
        """Read the body of a request, a message as a chat; raise BadRequestError for another."""
        refuse({"no JSON type": request.content_type != "application/json"})
        try:
            async with asyncio.timeout(READ_SECONDS):
                data = await request.read()
        except TimeoutError:
            raise BadRequestError.of("slow body") from None
        except web.HTTPRequestEntityTooLarge:
            raise BadRequestError.of("long body", most=MOST_BYTES) from None
        body = read_types(bodies.parse_json(data), kind)
        read_types(body.model_extra or {}, bodies.UNREAD)
        if isinstance(body, ResponsesBody):
            return read_types(body.chat(self.responses.before(body)), ResponseChat)
        return read_types(body.chat(), ChatBody) if isinstance(body, CountTokensBody) else body

    def _said(self, wanted: Wanted, tokens: Sequence[int], index: int) -> tuple[Said, int]:
        """Draw what an answer says, and how many tokens it would have.

        A seed draws it again, as does greedy sampling.
        """
        random, offset, seed = self._random, self._serial * 7919, wanted.asked.seed
        if wanted.asked.temperature == 0:
            seed = 0  # greedy: the same prompt has the same answer
        if seed is not None:
            numbers = self._seed, seed, hash(tuple(tokens)), index
            random = np.random.default_rng([number % 2**64 for number in numbers])
            offset = int(random.integers(2**31))
        said = Said(self.reader.counter.words, offset)
        self._serial += 1
        if wanted.length is not None:
            return said, wanted.length
        if wanted.asked.ignore_eos:
            return said, wanted.max_tokens + 1
        return said, int(random.choice(self._lengths))

    def _choice(self, wanted: Wanted, index: int) -> Choice:
        """Settle what one of the answers to a request says, and where it ends."""
        asked, most = wanted.asked, wanted.max_tokens
        prompt = wanted.prompts[index // (asked.n or 1)]
        said, length = self._said(wanted, prompt.tokens, index)
        # As in vLLM an answer can end by itself only behind `min_tokens`.
        length = max(length, asked.min_tokens + (asked.min_tokens >= most), 1)
        if wanted.fixed is not None:
            length = said.fix(wanted.fixed, min(length, most), self.reader.counter)
        if asked.stops:
            keep = asked.include_stop_str_in_output
            end = said.stop_at(asked.stops, asked.min_tokens, min(length, most), keep=keep)
            length = length if said.stop is None else end
        elif prompt.echo and asked.max_tokens == 0:
            said.pieces = []  # the token is computed, and not told
        return Choice(index, prompt, said, length, min(length, most))

    async def generate(
        self, kind: type[BaseModel], answers: type[Answer], request: web.Request
    ) -> web.StreamResponse:
        """Answer a request."""
        refuse({"full": self.open >= MOST_REQUESTS}, most=MOST_REQUESTS)
        self.engine.clock.advance()
        refuse({"down": not self.engine.is_open()})
        if self.failures.rates and (failure := self.failures.draw()):  # whatever is asked for
            raise BadRequestError.of(failure)
        came = request["came"]
        asked = await self.body(request, kind)
        if re.fullmatch("-?[0-9]{1,18}", told := request.headers.get("X-Vllm-Priority", "")):
            asked.priority = int(told)
        wanted = self.reader.read(asked)
        wanted.request_id = request.headers.get("X-Request-Id", wanted.request_id)
        if "X-Client" in request.headers:
            wanted.client = client_name(request.headers["X-Client"], "X-Client")
        wanted.length = output_tokens(request.headers, "X-Output-Tokens") or wanted.length
        serial, count = self._serial, len(wanted.prompts) * (wanted.asked.n or 1)
        refuse({"answers": count > MOST_ANSWERS}, most=MOST_ANSWERS)
        choices = [self._choice(wanted, index) for index in range(count)]
        answer = answers(wanted, self.reader.models[0], serial, choices)
        answer.fingerprint = {"system_fingerprint": self.fingerprint}
        if self._caches:
            answer.cached_block = self.engine.block_size
        self.open += 1
        try:
            answer.due = await self._pass_frontend(came, len(wanted.tokens))
            why = self.engine.refuses(self._asked(answer, choices[0]), count)
            refuse({why: why})
            found = await (self._stream if wanted.asked.stream else self._whole)(request, answer)
            if isinstance(answer, ResponseAnswer):
                self.responses.keep(answer)
            return found
        except (asyncio.CancelledError, ConnectionError):  # the client has hung up
            for one in choices:
                if one.stream is not None:
                    self.said.pop(one.stream.request.id, None)
                    self.engine.cancel(one.stream)
            raise
        finally:
            self.open -= 1

    async def _pass_frontend(self, came: float, prompt_tokens: int) -> float:
        """Wait as long as the scenario's frontend takes, less what reading the request took.

        Return when the engine should have got the request, simulated s.
        """
        if self._frontend is None:
            return came
        delay, self._free = self._frontend.delay(came, self._free, prompt_tokens)
        clock = self.engine.clock
        await asyncio.sleep(max(came + delay - clock.now, 0.0) / clock.speed)
        return came + delay

    # Answers.

    def _submit(
        self, answer: Answer, choice: Choice, on_tokens: Callable[[int, int], None]
    ) -> None:
        """Hand a request for one answer to the engine; `choice.over` becomes why it has ended."""
        choice.over = over = asyncio.get_running_loop().create_future()
        number = self.engine.next_id
        self.said[number] = choice.prompt.tokens, choice.said.offset

        def end(ended: Request, reason: str) -> None:
            choice.request = ended
            self.said.pop(number, None)
            if not over.done():
                over.set_result(reason)

        asked = self._asked(answer, choice)
        choice.stream = self.engine.submit(asked, on_tokens, end, answer.due)

    def _asked(self, answer: Answer, choice: Choice) -> Asked:
        """Return one of the answers to a request as the engine is asked for it."""
        wanted, size = answer.wanted, len(choice.prompt.tokens)
        asked = Asked(size, choice.length, wanted.max_tokens, wanted.client)
        asked.priority, asked.hint = wanted.priority, wanted.hint
        asked.answer, asked.n = answer.head["id"], wanted.asked.n or 1
        asked.ended = answer.ended[choice.index // asked.n]
        salt = wanted.asked.cache_salt or ""
        asked.segments = choice.prompt.segments(self.engine.block_size, salt)
        return asked

    async def _whole(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        for choice in answer.choices:
            self._submit(answer, choice, lambda *_: None)
        await self._ends(request, answer)
        body, head = answer.whole(), _notes(answer.wanted)
        return web.Response(body=body, content_type="application/json", headers=head)

    async def _ends(self, request: web.Request, answer: Answer) -> None:
        """Wait for all answers; raise BadRequestError for one that was refused or lost."""
        reasons = await asyncio.gather(*(choice.over for choice in answer.choices))
        if LOST in reasons and request.transport is not None:
            request.transport.abort()  # as the connections of a server that is killed
        refuse({"engine": not {*reasons} <= {*ANSWERED}})

    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        early = [answer.start()]  # what came before the head of the answer was out
        transport: asyncio.Transport | None = None  # where the rest goes

        def tokens(choice: Choice, new: int, count: int) -> None:
            """Write to the socket: a task that wakes up per token costs half as much again."""
            if transport is None:
                early.append(answer.chunk(choice, new, count))
            elif not transport.is_closing():
                transport.write(answer.framed(choice, new, count))
                if not count % LOOK and transport.get_write_buffer_size() > MOST_UNSENT:
                    transport.abort()

        for one in answer.choices:
            self._submit(answer, one, partial(tokens, one))
        chunked = request.version >= (1, 1)
        overs = [one.over for one in answer.choices]
        if not chunked or any(one.done() and one.result() not in ANSWERED for one in overs):
            await self._ends(request, answer)
        response = web.StreamResponse(headers=STREAM_HEADERS | _notes(answer.wanted))
        if chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)  # at once, as vLLM: tokens may take their time
        while early:
            data = b"".join(early)
            early.clear()
            if data:
                await response.write(data)
        if chunked:
            transport = request.transport
        try:
            await self._ends(request, answer)
            await response.write(answer.end())
        except BadRequestError as error:
            await response.write(answer.error_chunk(error))
        await response.write_eof()
        return response

    # What needs no engine.

    async def response(self, request: web.Request) -> web.Response:
        """Return a response that is kept."""
        found, _ = self.responses.get(name := request.match_info["id"])
        streams = request.query.get("stream", "").lower() in {"true", "1"}
        refuse({"events": streams}, value=name)  # only of responses in the background
        return web.json_response(found)

    async def cancel_response(self, request: web.Request) -> web.Response:
        """Refuse to cancel a response: there is none in the background."""
        self.responses.get(request.match_info["id"])
        raise BadRequestError.of("cancel")

    async def tokenize(self, request: web.Request) -> web.Response:
        """Tell the tokens of a prompt or a chat."""
        body = await self.body(request, bodies.TokenizeBody)
        kind = CompletionBody if body.messages is None else ChatBody
        wanted = self._count(read_types(body.model_dump(exclude_unset=True), kind))
        prompt = wanted.prompts[0]
        found: dict[str, Any] = {"count": len(prompt.tokens), "tokens": [*prompt.tokens]}
        found |= {"max_model_len": self.reader.max_model_len, "token_strs": None}
        if body.return_token_strs:
            found["token_strs"] = self.reader.counter.names(prompt.tokens, prompt.text)
        return web.json_response(found, headers=_notes(wanted))

    def _count(self, asked: Any) -> Wanted:
        """Understand a prompt, however long it is."""
        reader = dataclasses.replace(self.reader, max_model_len=MOST_TOKENS, parses_tools=True)
        return reader.read(asked)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Tell the text of tokens."""
        body = await self.body(request, bodies.DetokenizeBody)
        self.reader.check_model(body.model)
        text = self.reader.counter.decode(body.tokens)
        refuse({"tokenizer": text is None}, key="detokenize: needs")
        return web.json_response({"prompt": text})

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a chat in Anthropic's words."""
        wanted = self._count(await self.body(request, CountTokensBody))
        count = len(wanted.tokens)
        found = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        return web.json_response(found, headers=_notes(wanted))


def _notes(wanted: Wanted) -> dict[str, str]:
    """Return headers that tell what of a request is not simulated, and what is estimated."""
    found = {"X-Headway-Ignored": ", ".join(wanted.notes)} if wanted.notes else {}
    return found | ({"X-Headway-Estimated": "prompt_tokens"} if wanted.estimated else {})
