"""What one request may cost: each piece of work has a bound before it starts."""

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from fastapi import FastAPI, Request
from pydantic import ValidationError

from paceline.clients.http import _score_batches
from paceline.config.serve import ServeConfig
from paceline.engine import grammar
from paceline.engine.base import EngineLimits, Grammar
from paceline.engine.grammar import grammar_matcher_factory
from paceline.engine.schemas import MOST_STATES, prepare_schema, rewrite_pattern
from paceline.errors import RequestError
from paceline.server import http
from paceline.server.bodies import MOST_MESSAGES, MOST_TOKENS, ChatBody, CompletionBody
from paceline.server.completions import build_requests
from paceline.server.errors import Refusal, install_error_handlers
from paceline.server.guard import REQUESTS_PER_TURN, Meter, ServerGuard
from paceline.server.http import BYTES_PER_COST, FastJsonResponse, json_cost, read_body
from paceline.server.service import Service
from paceline.server.tokenizer import ServerTokenizer, count_characters
from paceline.util import connections
from paceline.util.connections import BoundedProtocol, LenientTransport

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def scribe(load):
    return ServerTokenizer(load("quickstart"), [1], max_context=64)


def test_equal_prompts_are_tokenised_once_and_many_on_another_thread(scribe, monkeypatch):
    encode, threads = scribe.tokenizer.encode, []

    def noted(text, **more):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text, **more)

    monkeypatch.setattr(scribe.tokenizer, "encode", noted)
    few, many = ["ab", "cd", "ab"], ["".join(pair) for pair in itertools.product("abcdefgh", repeat=2)]
    for texts in (few, many * 2):
        tokens = asyncio.run(scribe.encode_all(texts, special=True))
        assert tokens == [tuple(encode(text, add_special_tokens=True)) for text in texts]
    assert threads == [True] * 2 + [False] * 64


@pytest.mark.parametrize(
    ("has_key", "asked", "place"), [(False, -5, 0), (False, 3, 3), (False, None, 0), (True, -1, -1)]
)
def test_without_a_key_no_client_comes_before_others(scribe, has_key, asked, place):
    limits = EngineLimits(max_context=64, vocabulary=100)
    service = Service(None, scribe, "m", limits, has_key, None, Meter())  # ty: ignore
    body = CompletionBody(prompt=[5], order=asked)
    planned = build_requests(service, body, [(5,)], max_tokens=4, top_logprobs=0, grammar=None)
    assert [request.order for request in asyncio.run(planned)] == [place]


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HELLO, "unknown": [[]] * 100_000},
        {"messages": HELLO, "metadata": {str(n): 1 for n in range(100_000)}},
        {"messages": [{"role": "user", "content": "a"}] * 20_000},
        {"messages": HELLO, "unknown": list(range(500_000))},
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body):
    assert json_cost(json.dumps({"model": "m", **body}).encode()) > ServeConfig().max_body_bytes // BYTES_PER_COST


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [list(range(120_000, 120_064))] * 2048},
        {"prompt": list(range(131_072))},
        {"messages": [{"role": "user", "content": 'print({"a": [1, 2]})\n' * 12_000}]},
        {"messages": HELLO * 4096, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 1024},
    ],
)
def test_what_clients_send_is_within_the_limit(body):
    text = json.dumps({"model": "m", **body}).encode()
    assert len(text) <= ServeConfig().max_body_bytes
    assert json_cost(text) <= ServeConfig().max_body_bytes // BYTES_PER_COST


def test_scores_are_asked_for_a_request_at_a_time():
    sequences = [[1] * 60_000] * 5 + [[2] * 300_000] + [[3]] * 600
    asked = list(_score_batches(sequences))
    assert [len(some) for some in asked] == [2, 2, 1, 1, 256, 256, 88]
    assert [ids for some in asked for ids in some] == sequences


# -- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["chat_template", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs", "eos_token"],
)
def test_a_client_cannot_set_what_the_server_says(scribe, name):
    with pytest.raises(Refusal, match=f"cannot set `{name}`"):
        asyncio.run(scribe.render(HELLO, None, {name: "{{ 'a' * 2000000000 }}"}))


@pytest.mark.parametrize(
    ("messages", "tools", "options"),
    [
        ([{"role": "user", "content": "a"}] * 100_000, None, {}),
        ([{"role": "user", "content": "a" * 1_000_000}], None, {}),
        (HELLO, [{"function": {"name": "a", "parameters": {"x": ["b"] * 100_000}}}], {}),
        (HELLO, None, {"thinking": {str(n): n for n in range(100_000)}}),
    ],
)
def test_what_cannot_fit_is_refused_before_a_template_runs(scribe, monkeypatch, messages, tools, options):
    monkeypatch.setattr(type(scribe.tokenizer), "apply_chat_template", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(Refusal, match="far more than a context of 64 tokens holds"):
        asyncio.run(scribe.render(messages, tools, options))


def test_letters_are_counted_wherever_they_stand():
    assert count_characters(["ab", {"cd": ["e", 1, None]}], 100) == 2 + 2 + 1 + 5
    assert 10 < count_characters([[1] * 100] * 100, 10) < 500, "it is not counted to the end"


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_lists_have_a_longest_length():
    for kind, body in (
        (ChatBody, {"messages": HELLO * (MOST_MESSAGES + 1)}),
        (ChatBody, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a"}}] * 1025}),
        (CompletionBody, {"prompt": [1] * (MOST_TOKENS + 1)}),
        (CompletionBody, {"prompt": ["a"] * 2049}),
    ):
        with pytest.raises(ValidationError, match="too_long"):
            kind.model_validate_json(json.dumps(body))


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_a_prompt_has_four_forms(prompt):
    assert CompletionBody.model_validate_json(json.dumps({"prompt": prompt})).prompt == prompt


# -- grammars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["((.{0,99}){0,99}){0,99}b", f"a{{{MOST_STATES + 1}}}", "(a|b{50}){100}", "((((a{9}){9}){9}){9}){9}"]
)
def test_a_pattern_that_spells_out_to_too_many_states_is_refused(pattern):
    with pytest.raises(RequestError, match="the regular expression is too large"):
        rewrite_pattern(pattern)
    with pytest.raises(RequestError, match="too large"):
        prepare_schema(json.dumps({"type": "string", "pattern": pattern}))


def test_a_pattern_that_nests_too_deeply_is_refused():
    with pytest.raises(RequestError, match="the regular expression nests its groups too deeply"):
        rewrite_pattern("(" * 5000 + "a" + ")" * 5000)


def test_usual_patterns_are_taken():
    for pattern in (r"\d{4}-\d{2}-\d{2}", r"(yes|no)", r".{0,1000}", r"[a-z]+(, [a-z]+){0,20}"):
        rewrite_pattern(pattern)


def nested(depth: int, **bounds: int) -> dict:
    return {"type": "array", "items": nested(depth - 1, **bounds), **bounds} if depth else {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        nested(3, maxItems=50),
        nested(1, minItems=1_000_000),
        {"type": "array", "items": {"type": "string", "maxLength": 100}, "maxItems": 100},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 100}, "maxProperties": 100},
        {"type": "string", "maxLength": 1_000_000},
    ],
)
def test_a_schema_that_spells_out_to_too_many_states_is_refused(schema):
    with pytest.raises(RequestError, match="the JSON schema is too large"):
        prepare_schema(json.dumps(schema))


def test_a_reference_that_leads_nowhere_is_refused():
    item = {"type": "object", "properties": {"next": {"$ref": "#/$defs/item"}}}
    assert prepare_schema(json.dumps({"$ref": "#/$defs/item", "$defs": {"item": item}}))
    for reference in ("#/$defs/other", "other.json", "#/$defs/item/properties/none", "http://host/schema"):
        with pytest.raises(RequestError, match="which is not in the schema"):
            prepare_schema(json.dumps({"type": "array", "items": {"$ref": reference}, "$defs": {"item": item}}))


def test_a_grammar_that_takes_too_long_is_given_up_and_others_are_not_held_up(load, monkeypatch):
    """A pattern of a few states whose repeats within repeats can be read in countless ways."""
    pytest.importorskip("xgrammar")
    made = grammar_matcher_factory(load("quickstart"), [1])
    assert made(Grammar("regex", "(ab{1,3}){1,3}")).allowed_mask(103).any()
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 1)
    monkeypatch.setattr(made._workers, "_idle", [])
    monkeypatch.setattr(grammar, "_start_worker", sleeping)
    with pytest.raises(RequestError, match="compiling the grammar takes more than 1 s"):
        made(Grammar("regex", "(ab{1,4}){1,4}"))
    monkeypatch.undo()
    assert made(Grammar("regex", "(ab{1,4}){1,4}")).allowed_mask(103).any()


def test_one_small_worker_stays_for_the_next_grammar(load, monkeypatch):
    pytest.importorskip("xgrammar")
    made = grammar_matcher_factory(load("quickstart"), [1])
    workers = made._workers
    with ThreadPoolExecutor(2) as threads:  # two workers, of which one stays
        assert all(threads.map(lambda most: made(Grammar("regex", f"(ab{{1,{most}}}){{1,3}}")), (3, 4)))
    (first,) = workers._idle
    assert first.poll() is None
    made(Grammar("regex", "(ab{1,5}){1,3}"))
    assert workers._idle == [first]
    monkeypatch.setattr(grammar, "MOST_GROWTH", -1)
    made(Grammar("regex", "(ab{1,6}){1,3}"))
    assert workers._idle == []
    assert first.wait(240) != 0


ALIKE = {"type": "object", "properties": {f"p{n}": {"enum": ["0"]} for n in range(20)}}
WIDE = Grammar("json_schema", json.dumps({"oneOf": [ALIKE] * 20}))
"""As JSON its compiled form takes a hundred times its memory."""


def test_a_worker_hands_over_only_what_was_slow_to_compile_and_is_not_too_large(load, monkeypatch):
    pytest.importorskip("xgrammar")
    made = grammar_matcher_factory(load("quickstart"), [1])
    read: list[int] = []

    def ask(worker, question, real=grammar._request):
        answer = real(worker, question)
        read.append(len(json.dumps(answer)))
        return answer

    monkeypatch.setattr(grammar, "_request", ask)
    monkeypatch.setattr(grammar, "QUICK_SECONDS", 100)
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 300)  # on cores that other tests use too
    assert made(WIDE).allowed_mask(103).any()
    assert read[0] < 100
    monkeypatch.setattr(grammar, "QUICK_SECONDS", 0)
    slow = grammar_matcher_factory(load("quickstart"), [1])
    with pytest.raises(RequestError, match=r"too large: compiled it takes .* MiB, and at most 32 are taken"):
        slow(WIDE)
    pattern = Grammar("regex", "(ab{1,3}){1,3}")
    assert (slow(pattern).allowed_mask(103) == made(pattern).allowed_mask(103)).all()
    assert read[2] > read[3]


def sleeping(info):
    """A worker that never answers."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# -- connections ------------------------------------------------------------------------------------------------------


async def echo(request: Request):
    await read_body(request, CompletionBody)
    return FastJsonResponse("ok")


@contextlib.asynccontextmanager
async def listening():
    app = FastAPI()
    app.state.max_body_bytes = 1 << 20
    app.add_api_route("/", echo, methods=["POST"], response_model=None)
    install_error_handlers(app)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.ensure_future(server.serve(sockets=[door]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield door.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def say(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 240)
    writer.close()
    return answer


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a"}'
WHOLE = HEAD + b"Content-Length: 15\r\n"


def test_a_request_that_is_never_finished_is_given_up(monkeypatch):
    def allow(seconds: float) -> None:
        monkeypatch.setattr(connections, "HEADER_SECONDS", seconds)
        monkeypatch.setattr(http, "BODY_SECONDS", seconds)

    async def work():
        async with listening() as port:
            allow(240.0)  # time enough for one that is whole
            assert b" 200 " in await say(port, WHOLE + b"Connection: close\r\n\r\n" + BODY)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(WHOLE + b"\r\n" + BODY)
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b'"ok"'), 240)
            # A second request on the same connection has a deadline too.
            allow(0.05)
            writer.write(HEAD)
            assert b" 408 " in await asyncio.wait_for(reader.read(), 240)
            writer.close()
            assert b" 408 " in await say(port)
            assert b" 408 " in await say(port, HEAD)
            assert b" 408 " in await say(port, WHOLE + b"\r\n" + BODY[:5])

    asyncio.run(work())


def test_headers_have_a_longest_length():
    async def work():
        async with listening() as port:
            answer = b""
            with contextlib.suppress(ConnectionError):  # it may be closed while we write
                answer = await say(port, HEAD, *[b"X-More: " + b"a" * 8192] * 20)
            assert answer in (b"", connections._TOO_LONG)
            assert b" 200 " in await say(port, WHOLE + b"Connection: close\r\n\r\n" + BODY)

    asyncio.run(work())


def test_a_body_of_too_many_values_gets_a_sentence():
    body = b'{"prompt": "a", "more": [' + b"{}," * 20_000 + b"{}]}"
    head = HEAD + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()

    async def work():
        async with listening() as port:
            return await say(port, head + body)

    answer = asyncio.run(work())
    assert b" 413 " in answer
    assert b"the body holds too many values: send fewer prompts at a time" in answer


def test_an_answer_to_a_connection_that_was_reset_is_no_bug():
    """uvloop's transport, closed by a reset that uvicorn has not heard of yet."""

    class Closed:
        closed, written = False, b""

        def is_closing(self):
            return self.closed

        def write(self, data):
            if self.closed:
                raise RuntimeError("unable to perform operation; the handler is closed")
            self.written += data

    below = Closed()
    transport = LenientTransport(below)
    transport.write(b"a")
    below.closed = True
    transport.write(b"b")
    assert below.written == b"a"


def test_the_protocol_writes_through_it():
    async def work():
        async with listening() as port:
            made = []
            usual = BoundedProtocol.connection_made
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BoundedProtocol, "connection_made", lambda self, t: (usual(self, t), made.append(self)))
                assert b" 200 " in await say(port, WHOLE + b"Connection: close\r\n\r\n" + BODY)
            assert [type(protocol.transport) for protocol in made] == [LenientTransport]

    asyncio.run(work())


# -- turns ------------------------------------------------------------------------------------------------------------


def test_hundreds_that_arrive_together_do_not_keep_health_waiting():
    begun: list[str] = []

    async def app(scope, receive, send):
        begun.append(scope["path"])

    async def work():
        guard = ServerGuard(app, Meter(), ["/health", "/v1/models"], None)
        scope = {"type": "http", "headers": [(b"host", b"localhost")]}
        many = [asyncio.create_task(guard(scope | {"path": "/v1/models"}, None, None)) for _ in range(300)]
        many[5].cancel()
        health = asyncio.create_task(guard(scope | {"path": "/health"}, None, None))
        await asyncio.wait([*many, health])

    asyncio.run(work())
    assert begun.index("/health") <= REQUESTS_PER_TURN
    assert begun.count("/v1/models") == 299
