"""The server's application in this process, around an engine that says one thing: what clients see of tool calls."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from paceline.config import RunConfig
from paceline.engine import Completion, EngineLimits
from paceline.engine.base import Piece
from paceline.model import load_tokenizer
from paceline.server import build_app

CALL = '<tool_call>{{"name":"add","arguments":{{"a":{}}}}}</tool_call>'
SAID = "ok " + CALL.format(1) + CALL.format(2)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Parrot:
    """An engine that says one thing, a token at a time."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, request, listener=None) -> Completion:
        for token in self.ids if listener else ():
            listener(Piece([token], [-1.0], [0]))
        many = len(self.ids)
        return Completion(token_ids=self.ids, logprobs=[-1.0] * many, versions=[0] * many, finish="stop")

    async def limits(self) -> EngineLimits:
        return EngineLimits(512, 103)


@asynccontextmanager
async def client_of(text: str):
    tokenizer = load_tokenizer(RunConfig.model_validate({"model": {"name": "paceline:quickstart"}}).model)
    engine = Parrot(tokenizer.encode(text, add_special_tokens=False))
    app = build_app(engine, tokenizer, [], name="policy", max_body_bytes=1 << 20)
    wire = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    async with app.router.lifespan_context(app), wire:
        yield openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=wire)


async def asked(api: str, stream: bool, **more) -> tuple[str, list[tuple[str, dict]]]:
    """What an `openai` client reads out of an answer: the text, and the calls."""
    async with client_of(SAID) as client:
        if api == "chat":
            tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
            body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "tools": [tool], **more}
            if stream:
                async with client.chat.completions.stream(**body) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**body)
            message = answer.choices[0].message
            calls = [call.function for call in message.tool_calls]
            text = message.content
        else:
            tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
            body = {"model": "policy", "input": "a", "tools": [tool], **more}
            if stream:
                async with client.responses.stream(**body) as events:
                    numbers = [event.sequence_number async for event in events]
                    assert numbers == list(range(len(numbers)))
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**body)
            text, calls = answer.output_text, [item for item in answer.output if item.type == "function_call"]
    return text.strip(), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_text_and_calls_reach_a_client_and_parallel_calls_can_be_declined(api, stream):
    both = [("add", {"a": 1}), ("add", {"a": 2})]
    assert asyncio.run(asked(api, stream)) == ("ok", both)
    assert asyncio.run(asked(api, stream, parallel_tool_calls=False)) == ("ok", both[:1])


def test_an_empty_response_is_a_message_without_text():
    async def story() -> None:
        async with client_of("") as client:
            whole = await client.responses.create(model="policy", input="a")
            async with client.responses.stream(model="policy", input="a") as events:
                streamed = await events.get_final_response()
            for answer in (whole, streamed):
                assert [(item.type, item.status) for item in answer.output] == [("message", "completed")]
                assert answer.output_text == ""

    asyncio.run(story())
