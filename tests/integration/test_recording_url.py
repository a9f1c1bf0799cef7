"""The recording URL: real engine, real server, real `openai` clients; the record is what a direct seat would hold."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from live_server import MODEL, PLAIN

from child_processes import Launched
from paceline.clients import Pool
from paceline.config import RunConfig
from paceline.config.inference import SamplingConfig
from paceline.data import Ticket
from paceline.engine import Completion
from paceline.model import load_tokenizer
from paceline.rollout import RecordingServer, Renderer, Rollout, SamplingClient, Seat, SeatClosed, assemble
from paceline.runtime.serving import embedded_engine

ASK = [{"role": "user", "content": "reverse: planet"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}


class House:
    """The quickstart model's engine, and seats at it."""

    def __init__(self, engine, ends, tokenizer) -> None:
        self.engine, self.ends, self.tokenizer = engine, frozenset(ends), tokenizer
        self.renderer = Renderer(tokenizer, ends)

    @asynccontextmanager
    async def open(self, engine=None, **sampling):
        """Makes seats by number; the number alone decides what noise a seat draws."""
        recorder = RecordingServer()
        settings = SamplingConfig(**{"max_tokens": 12, **sampling})
        client = SamplingClient(Pool([engine or self.engine]), self.renderer, settings, self.ends, recorder)

        def seat(number: int = 0) -> Seat:
            return Seat(client, (1, 0, number, 0), number)

        seat.recorder = recorder
        try:
            yield seat
        finally:
            await recorder.close()


@pytest.fixture(scope="module")
def house():
    settings = {"model": {"name": MODEL}, "device": "cpu", "deterministic": True, "engine": {"max_context": 256}}
    config = RunConfig.model_validate(settings)
    with embedded_engine(config) as (engine, ends):
        yield House(engine, ends, load_tokenizer(config.model))


class Parrot:
    """An engine that says one thing; before that, it waits to be let."""

    busy_seconds = 0.0

    def __init__(self, ids: list[int], waits: bool = False) -> None:
        self.ids = ids
        self.asked, self.may_speak, self.hung_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        if not waits:
            self.may_speak.set()

    async def generate(self, request, listener=None) -> Completion:
        self.asked.set()
        try:
            await self.may_speak.wait()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        many = len(self.ids)
        return Completion(token_ids=self.ids, logprobs=[-1.0] * many, versions=[0] * many, finish="stop")


def asynchronous(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=httpx.AsyncClient(**PLAIN))


async def create(url: str, **body):
    async with asynchronous(url) as client:
        return await client.chat.completions.create(**{"model": "any", "messages": ASK, **body})


def in_a_thread(url: str, **body):
    def call():
        plain = httpx.Client(**PLAIN)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
            return client.chat.completions.create(**{"model": "any", "messages": ASK, **body})

    return asyncio.to_thread(call)


def tokens(seat: Seat) -> list:
    return [(turn.prompt_ids, turn.completion_ids, turn.logprobs, turn.versions, turn.finish) for turn in seat.turns]


# -- the same record ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [create, in_a_thread])
@pytest.mark.parametrize("body", [{}, {"tools": [TOOL]}, {"n": 2}, {"tools": [TOOL], "tool_choice": "none"}])
def test_what_a_client_asks_is_recorded_as_if_the_seat_had_been_asked(house, client, body):
    async def story() -> None:
        async with house.open() as seats:
            over_http, direct = seats(3), seats(3)
            answer = await client(await over_http.base_url(), **body)
            tools = body.get("tools") if "tool_choice" not in body else None
            replies = await asyncio.gather(*(direct.chat(ASK, tools) for _ in range(body.get("n", 1))))
            assert tokens(over_http) == tokens(direct)
            assert [choice.message.content for choice in answer.choices] == [reply.text for reply in replies]
            assert answer.usage.completion_tokens == sum(len(turn.completion_ids) for turn in direct.turns)
            assert answer.usage.prompt_tokens == len(direct.turns[0].prompt_ids)

    asyncio.run(story())


def test_a_stream_says_and_records_the_same(house):
    async def story() -> None:
        async with house.open() as seats:
            over_http, direct = seats(4), seats(4)
            async with asynchronous(await over_http.base_url()) as client:
                usage = {"include_usage": True}
                stream = await client.chat.completions.create(
                    model="any", messages=ASK, stream=True, stream_options=usage, n=2
                )
                chunks = [chunk async for chunk in stream]
            replies = await asyncio.gather(direct.chat(ASK), direct.chat(ASK))
            assert tokens(over_http) == tokens(direct)
            for index, reply in enumerate(replies):
                mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
                assert "".join(choice.delta.content or "" for choice in mine) == reply.text
                assert mine[-1].finish_reason == ("length" if reply.truncated else "stop")
            assert chunks[-1].usage.completion_tokens == sum(reply.tokens for reply in replies)

    asyncio.run(story())


def test_every_chunk_may_count_tokens(house):
    async def story() -> None:
        async with house.open() as seats, asynchronous(await seats().base_url()) as client:
            usage = {"include_usage": True, "continuous_usage_stats": True}
            stream = await client.chat.completions.create(
                model="any", messages=ASK, stream=True, stream_options=usage, n=2
            )
            *chunks, last = [chunk async for chunk in stream]
            counts = {chunk.choices[0].index: chunk.usage.completion_tokens for chunk in chunks}
            assert sum(counts.values()) == last.usage.completion_tokens > 0

    asyncio.run(story())


def call_of(response) -> list[dict]:
    return [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_records_what_a_chat_records(house, stream):
    """Two turns with a call between them: what the client hands back goes on from the recorded tokens."""
    spelled = 'ok <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    ids = [*house.tokenizer.encode(spelled, add_special_tokens=False), min(house.ends)]
    tool = {"type": "function", **TOOL["function"], "strict": False}
    agents = {"model": "any", "tools": [tool], "tool_choice": "required", "temperature": 0.0, "max_output_tokens": 5}

    async def respond(client, **body):
        if not stream:
            return await client.responses.create(**agents, **body)
        async with client.responses.stream(**agents, **body) as events:
            return await events.get_final_response()

    async def story() -> None:
        async with house.open(Parrot(ids)) as seats:
            seat, direct = seats(), seats()
            async with asynchronous(await seat.base_url()) as client:
                answer = await respond(client, input="reverse: planet", instructions="be brief")
                assert (answer.status, answer.output_text, answer.temperature) == ("completed", "ok", 1.0)
                assert answer.usage.output_tokens == len(ids)
                call = answer.output[-1]
                assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
                await respond(client, input=[*ASK, *call_of(answer), result], instructions="be brief")
            first, second = seat.turns
            told = [{"role": "system", "content": "be brief"}, *ASK]
            await direct.chat(told, [TOOL | {"function": TOOL["function"] | {"strict": False}}])
            assert first.prompt_ids == direct.turns[0].prompt_ids
            before = first.prompt_ids + ids
            assert second.prompt_ids[: len(before)] == before
            assert seat.overrides == {"temperature": 2, "tool_choice": 2, "max_completion_tokens": 2}

    asyncio.run(story())


def test_a_conversation_over_http_goes_on_from_the_recorded_ids(house):
    """Whatever client object the agent hands back: the message, its dump, or its dump without the empty fields."""

    async def story() -> None:
        async with house.open(max_tokens=24) as seats:
            for number in range(4):
                over_http, direct = seats(number), seats(number)
                url, mine, theirs = await over_http.base_url(), list(ASK), list(ASK)
                for hand_on in (lambda m: m, lambda m: m.model_dump(), lambda m: m.model_dump(exclude_none=True)):
                    answer = (await create(url, messages=mine)).choices[0]
                    again = {"role": "user", "content": "reverse: " + "abc"[len(mine) % 3]}
                    mine += [hand_on(answer.message), again]
                    theirs += [(await direct.chat(theirs)).message, again]
                assert tokens(over_http) == tokens(direct)
                for before, after in zip(over_http.turns, over_http.turns[1:], strict=False):
                    ids = before.prompt_ids + before.completion_ids
                    assert before.finish == "length" or after.prompt_ids[: len(ids)] == ids
                samples = assemble(Rollout(ticket=Ticket(0, "e", 0, 0, 0), member=0, turns=over_http.turns))
                assert len(samples) == 1 + sum(turn.finish == "length" for turn in over_http.turns[:-1])

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_travels_to_the_agent_and_back(house, stream):
    spelled = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    ids = [*house.tokenizer.encode(spelled, add_special_tokens=False), min(house.ends)]

    async def story() -> None:
        async with house.open(Parrot(ids)) as seats:
            seat = seats()
            url = await seat.base_url()
            if stream:
                async with asynchronous(url) as client:
                    body = {"model": "any", "messages": ASK, "tools": [TOOL]}
                    async with client.chat.completions.stream(**body) as events:
                        answer = (await events.get_final_completion()).choices[0]
            else:
                answer = (await create(url, tools=[TOOL])).choices[0]
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            said = {
                "role": "assistant",
                "content": None,
                "tool_calls": [call.model_dump(include={"id", "type", "function"})],
            }
            said["tool_calls"][0]["function"] = {"name": "add", "arguments": '{ "a" : 1 }'}
            await create(url, messages=[*ASK, said, result], tools=[TOOL])
            first, second = seat.turns
            assert first.completion_ids == ids
            before = first.prompt_ids + ids
            assert second.prompt_ids[: len(before)] == before
            assert house.tokenizer.decode(second.prompt_ids).count("add") == 1

    asyncio.run(story())


def test_two_episodes_never_mix(house):
    async def agent(url: str, turns: int) -> None:
        messages = list(ASK)
        for _ in range(turns):
            answer = (await create(url, messages=messages)).choices[0]
            messages += [{"role": "assistant", "content": answer.message.content}, ASK[0]]

    async def story() -> None:
        async with house.open() as seats:
            over_http, direct = [seats(n) for n in range(6)], [seats(n) for n in range(6)]
            urls = [await seat.base_url() for seat in over_http]
            assert len(set(urls)) == 6
            assert await over_http[0].base_url() == urls[0]
            await asyncio.gather(*(agent(url, 1 + n % 3) for n, url in enumerate(urls)))
            for n, seat in enumerate(direct):
                messages = list(ASK)
                for _ in range(1 + n % 3):
                    messages += [(await seat.chat(messages)).message, ASK[0]]
                assert tokens(over_http[n]) == tokens(seat)

    asyncio.run(story())


# -- whose settings ----------------------------------------------------------------------------------------------------


def test_the_runs_settings_win_and_only_differences_are_counted(house):
    same = {"temperature": 0.5, "top_p": 1, "max_tokens": 12, "max_completion_tokens": 12}
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "stop": []}
    other = {"temperature": 0.0, "top_p": 0.1, "max_tokens": 1, "seed": 5, "stop": ["a"], "presence_penalty": 1.5}

    async def story() -> None:
        async with house.open(temperature=0.5) as seats:
            over_http, direct = seats(9), seats(9)
            url = await over_http.base_url()
            await create(url, **same, **nothing, extra_body={"top_k": -1, "min_p": 0.0, "stop_token_ids": []})
            assert not over_http.overrides
            await create(url, **other, response_format={"type": "json_object"}, extra_body={"top_k": 3})
            await create(url, temperature=1.0)
            assert over_http.overrides == dict.fromkeys([*other, "response_format", "top_k"], 1) | {"temperature": 2}
            for _ in range(3):
                await direct.chat(ASK)
            assert tokens(over_http) == tokens(direct)

    asyncio.run(story())


def test_an_agents_wishes_are_counted_and_change_nothing(house):
    wishes = {"tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "low"}
    unknown = {"guided_json": {}, "colour": 1, "caching": {"a": 1}, "skip_special_tokens": True}

    async def story() -> None:
        async with house.open() as seats:
            over_http, direct = seats(5), seats(5)
            url = await over_http.base_url()
            said = {"role": "user", "content": "reverse: planet", "cache_control": {"type": "ephemeral"}}
            await create(url, messages=[said], tools=[TOOL], **wishes, extra_body=unknown)
            await direct.chat(ASK, [TOOL])
            assert tokens(over_http) == tokens(direct)
            noted = [*wishes, "guided_json", "colour", "caching", "messages.cache_control"]
            assert over_http.overrides == dict.fromkeys(noted, 1)

    asyncio.run(story())


# -- refusals ----------------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BAD = [
    ("chat/completions", b"{", JSON, 400, "not JSON"),
    ("chat/completions", b"[]", JSON, 400, ""),
    ("chat/completions", b"{}", JSON, 400, "`messages` is missing"),
    ("chat/completions", {"messages": []}, JSON, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "?"}]}, JSON, 400, "role"),
    ("chat/completions", {"messages": ASK, "tols": []}, JSON, 400, "did you mean `tools`"),
    ("chat/completions", {"messages": ASK, "chat_template": "x"}, JSON, 400, "not supported"),
    ("chat/completions", {"messages": ASK, "n": 0}, JSON, 400, "n"),
    ("responses", {"input": "a", "previous_response_id": "resp_1"}, JSON, 400, "not supported"),
    ("responses", {"input": [{"type": "reasoning"}]}, JSON, 400, "only items of type"),
    ("responses", {"messages": ASK}, JSON, 400, "input"),
    ("chat/completions", {"messages": ASK, "chat_template_kwargs": {"a": 1}}, JSON, 400, "chat template"),
    ("chat/completions", {"messages": ASK, "stream_options": {}}, JSON, 400, "stream"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a" * 2000}]}, JSON, 400, "tokens"),
    ("chat/completions", {"messages": ASK}, {"Content-Type": "text/plain"}, 415, "JSON"),
    ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, JSON, 400, "images are not supported"),
    ("completions", {"prompt": "a"}, JSON, 404, "/v1/chat/completions"),
]


def test_bad_bodies_get_openais_error_shape_and_leave_no_trace(house):
    async def story() -> None:
        async with house.open() as seats, httpx.AsyncClient(**PLAIN) as client:
            seat = seats()
            url = await seat.base_url()
            for path, body, headers, status, words in BAD:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await client.post(f"{url}/{path}", content=content, headers=headers)
                assert answer.status_code == status, (body, answer.text)
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert words in error["message"]
            assert (await client.get(f"{url}/chat/completions")).status_code == 405
            assert seat.turns == []
            with pytest.raises(openai.BadRequestError):
                await create(url, temperature=-1)

    asyncio.run(story())


def test_a_conversation_the_template_cannot_express_is_the_agents_mistake(house):
    """And no server error: the sentence reaches the agent."""
    tokenizer = load_tokenizer(RunConfig.model_validate({"model": {"name": MODEL}}).model)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') if messages|length > 1 else 'a' }}"
    strict = House(house.engine, house.ends, tokenizer)

    async def story() -> None:
        async with strict.open() as seats:
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await create(await seats().base_url(), messages=ASK * 2)

    asyncio.run(story())


# -- the end of an episode ---------------------------------------------------------------------------------------------


def gone(error: pytest.ExceptionInfo) -> bool:
    return error.value.status_code == 410 and error.value.code == "episode_over"


def test_an_address_answers_until_its_episode_is_over_and_no_other_ever(house):
    async def story() -> None:
        async with house.open() as seats:
            seat, other = seats(1), seats(2)
            url, stays = await seat.base_url(), await other.base_url()
            async with asynchronous(url) as client:
                assert [model.id async for model in client.models.list()] == ["policy"]
                await client.chat.completions.create(model="policy", messages=ASK)
                seat.leave()
                with pytest.raises(openai.APIStatusError) as over:
                    await client.chat.completions.create(model="policy", messages=ASK)
                assert gone(over)
                with pytest.raises(openai.APIStatusError) as over:
                    await client.models.list()
                assert gone(over)
            key = url.split("/")[-2]
            for guess in (key[:-1], key[::-1], "policy", "%2e%2e"):
                with pytest.raises(openai.APIStatusError) as over:
                    await create(url.replace(key, guess))
                assert gone(over)
            assert len(seat.turns) == 1
            with pytest.raises(SeatClosed):
                await seat.base_url()
            await create(stays)
            assert len(other.turns) == 1

    asyncio.run(story())


def test_a_call_under_way_ends_with_its_episode(house):
    """The agent is told at once, and the engine need not finish what no client will read."""

    async def story() -> None:
        parrot = Parrot([1, 2], waits=True)
        async with house.open(parrot) as seats:
            seat = seats()
            asking = asyncio.ensure_future(create(await seat.base_url(), n=2))
            await parrot.asked.wait()
            seat.leave()
            with pytest.raises(openai.APIStatusError) as over:
                await asking
            assert gone(over)
            assert parrot.hung_up.is_set()
            assert seat.turns == []

    asyncio.run(story())


def test_an_agent_that_hangs_up_takes_its_call_with_it(house):
    async def story() -> None:
        parrot = Parrot([1, 2], waits=True)
        async with house.open(parrot) as seats:
            seat = seats()
            asking = asyncio.ensure_future(create(await seat.base_url()))
            await parrot.asked.wait()
            asking.cancel()
            await parrot.hung_up.wait()
            parrot.may_speak.set()
            await create(await seat.base_url())
            assert len(seat.turns) == 1

    asyncio.run(story())


@pytest.mark.parametrize("again", range(2))
def test_the_server_stops_under_open_connections_and_starts_again(house, again, caplog):
    async def story() -> None:
        parrot = Parrot([1, 2], waits=True)
        async with house.open(parrot) as seats:
            seat = seats(1)
            async with asynchronous(await seat.base_url()) as idle:
                await idle.models.list()
                asking = asyncio.ensure_future(create(await seat.base_url()))
                await parrot.asked.wait()
                await seats.recorder.close()
                with pytest.raises(openai.APIStatusError) as over:
                    await asking
                assert gone(over)
                with pytest.raises(openai.APIConnectionError):
                    await idle.models.list()
            await seats.recorder.close()
            parrot.may_speak.set()
            other = seats(2)
            urls = await asyncio.gather(other.base_url(), seats(3).base_url())
            assert len(set(urls)) == 2
            await create(urls[0])
            assert len(other.turns) == 1

    asyncio.run(story())
    assert not caplog.records


INTERRUPTED = """
import asyncio
from paceline.rollout import RecordingServer

async def run():
    recorder = RecordingServer()
    try:
        print(await recorder.address("actor"), flush=True)
        await asyncio.Event().wait()
    finally:
        await recorder.close()
        print("closed", flush=True)

try:
    asyncio.run(run())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_reaches_the_code_that_runs_the_server():
    with Launched([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(**PLAIN) as client:
            assert client.get(f"{url}/models").status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.stdout.read().split() == ["closed", "interrupted"]
    assert process.returncode == 0
