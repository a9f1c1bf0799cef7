"""The real server process and the real `openai` client."""

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from live_server import MODEL, PLAIN, Server, becomes, served
from openai import AsyncOpenAI
from safetensors.torch import load_file, save, save_file

from child_processes import Launched
from paceline.commands import main
from paceline.model import WeightUpdate, resolve

CHAT = [{"role": "user", "content": "reverse: paceline"}]
LONG = {"messages": CHAT, "max_tokens": 480, "ignore_eos": True}
"""A request that keeps the engine busy for a while."""


@pytest.fixture(scope="module")
def allowed(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(allowed):
    with served(
        "--allow",
        str(allowed),
        "--max-body-bytes",
        "1000000",
        "--engine.max_running",
        "32",
        "--engine.adapters",
        "2",
        key="of the trainer",
    ) as running:
        yield running


@pytest.fixture
def client(server):
    return server.openai


def chunks_of(stream) -> tuple[str, list]:
    chunks = list(stream)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


# -- the openai client ------------------------------------------------------------------------------------------------


def test_a_stream_says_what_the_whole_answer_says(client):
    ask = {"model": MODEL, "messages": CHAT, "seed": 3, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    text, chunks = chunks_of(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[0].choices[0].delta.role == "assistant"


def test_every_chunk_may_count_tokens(client):
    """guidellm and vLLM's benchmark ask for it."""
    ask = {"model": MODEL, "prompt": "Q", "max_tokens": 12, "n": 2, "extra_body": {"ignore_eos": True}}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = list(client.completions.create(**ask, stream=True, stream_options=usage))
    counts = [[c.usage.completion_tokens for c in chunks if c.choices[0].index == index] for index in range(2)]
    assert all(some == sorted(some) and some[-1] == 12 for some in counts)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {1}
    assert (last.choices, last.usage.completion_tokens) == ([], 24)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_do_not_exist_are_ignored_and_named(server, path, stream):
    said = {"role": "user", "content": "copy: abc", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [said], "max_tokens": 2} if "chat" in path else {"input": [said], "max_output_tokens": 2}
    answer = server.post(path, body | {"colour": 1, "bad\r\nname": 1, "nothing": None, "stream": stream})
    assert answer.status_code == 200, answer.text
    named = answer.headers["paceline-ignored"].split(", ")
    assert sorted(named) == ["(no identifier)", "colour", f"{'messages' if 'chat' in path else 'input'}.cache_control"]
    assert "paceline-ignored" not in server.post(path, body | {next(iter(body)): "x"}).headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_what_a_chat_says(client, stream):
    system = {"role": "system", "content": "be brief"}
    ask = {"model": MODEL, "temperature": 0}
    chat = client.chat.completions.create(**ask, messages=[system, *CHAT], max_tokens=5)
    body = ask | {"input": CHAT, "instructions": "be brief", "max_output_tokens": 5, "metadata": {"a": "b"}}
    if stream:
        with client.responses.stream(**body) as events:
            first, *_, last = list(events)
        assert (first.type, last.type) == ("response.created", f"response.{last.response.status}")
        answer = last.response
    else:
        answer = client.responses.create(**body)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    cut = chat.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if cut else "completed")
    assert (answer.metadata, answer.store) == ({"a": "b"}, False)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_response_echoes_may_be_any_json(server, stream):
    metadata = {"huge": [10**400]}
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "metadata": metadata, "stream": stream}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert "1" + "0" * 400 in answer.text


def test_a_seed_repeats_and_choices_differ(client):
    def texts(seed):
        ask = {"model": MODEL, "prompt": "Q", "max_tokens": 12, "temperature": 3.0, "n": 4, "seed": seed}
        return [choice.text for choice in client.completions.create(**ask).choices]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(2)}) == 8
    assert texts(None) != texts(None)


def test_n_choices_of_several_prompts_come_in_order(client):
    answer = client.completions.create(model=MODEL, prompt=["aa", "bb"], n=2, max_tokens=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["aa", "aa", "bb", "bb"]
    assert answer.usage.prompt_tokens == 4


async def ask_all(server: Server, count: int) -> list[str]:
    plain = httpx.AsyncClient(**PLAIN)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, http_client=plain) as client:

        async def one(index: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "copy: abc"}],
                temperature=0,
                max_tokens=8,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(one(index) for index in range(count)))


def test_async_clients_share_the_engine(server):
    assert len(set(asyncio.run(ask_all(server, 40)))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_across_tokens_and_frees_the_engine(server, client, stream):
    """Tokens of this model are letters, so a stop string of two always spans a border."""
    ask = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    free = client.chat.completions.create(**ask | {"max_tokens": 30}).choices[0].message.content
    stop = free[4:7]
    before = server.get("/stats").json()["tokens"]
    if stream:
        text, chunks = chunks_of(client.chat.completions.create(**ask, stop=["~~~", stop], stream=True))
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**ask, stop=["~~~", stop]).choices[0]
        text, finish = choice.message.content, choice.finish_reason
    assert (text, finish) == (free[: free.index(stop)], "stop")
    assert server.idle()
    assert server.get("/stats").json()["tokens"] - before < 480, "the engine was not told"


# -- token ids and log probabilities ----------------------------------------------------------------------------------


def test_logprobs_are_those_the_engine_scores(server, client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=3, seed=5, max_tokens=12, extra_body={
            "return_token_ids": True, "prompt_logprobs": True, "return_versions": True}
    )  # fmt: skip
    choice = answer.choices[0]
    extra = choice.model_extra
    ids = extra["prompt_token_ids"] + extra["token_ids"]
    scored = server.post("/v1/score", {"token_ids": [ids]}).json()["logprobs"][0]
    sampled = [entry.logprob for entry in choice.logprobs.content]
    assert len(sampled) == len(extra["token_ids"]) == len(extra["versions"]) == answer.usage.completion_tokens
    assert sampled == pytest.approx(scored[len(extra["prompt_token_ids"]) :], abs=1e-4)
    assert extra["prompt_logprobs"][0] is None
    assert extra["prompt_logprobs"][1:] == pytest.approx(scored[1 : len(extra["prompt_token_ids"])], abs=1e-4)
    for entry in choice.logprobs.content:
        best = [other.logprob for other in entry.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert best[0] >= entry.logprob - 1e-6
    said = "".join(entry.token for entry in choice.logprobs.content).removesuffix("<|end|>")
    assert said == choice.message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in choice.logprobs.content)


def test_completions_logprobs_line_up_with_the_text(client):
    ask = {"model": MODEL, "prompt": "copy: abc", "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 1}
    choice = client.completions.create(**ask).choices[0]
    arrays = choice.logprobs
    assert arrays.token_logprobs[0] is None
    assert all(choice.text[at:].startswith(token) for at, token in zip(arrays.text_offset, arrays.tokens, strict=True)
               if token != "<|end|>")  # fmt: skip
    only = client.completions.create(**ask | {"max_tokens": 0}).choices[0]
    assert only.text == "copy: abc"
    assert only.logprobs.token_logprobs == pytest.approx(arrays.token_logprobs[:9])


def test_token_ids_in_and_flat_arrays_out(server):
    ask = {"prompt": [[3, 73, 74, 4], [3, 75, 4]], "max_tokens": 8, "noise": 77, "n": 2, "ignore_eos": True}
    flat = server.post("/v1/completions", ask | {"flat": True}).json()["choices"]
    full = server.post("/v1/completions", ask | {"return_token_ids": True, "logprobs": 0}).json()["choices"]
    assert [choice["index"] for choice in flat] == [0, 1, 2, 3]
    for ours, theirs in zip(flat, full, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)
        assert ours["versions"] == [ours["versions"][0]] * 8
        assert "text" not in ours
    assert len({tuple(choice["token_ids"]) for choice in flat[:2]}) == 2
    cut = server.post(
        "/v1/completions", {"prompt": [3, 73, 4], "flat": True, "max_tokens": 20, "temperature": 0}
    ).json()
    first = cut["choices"][0]["token_ids"][0]
    ended = server.post(
        "/v1/completions",
        {"prompt": [3, 73, 4], "flat": True, "max_tokens": 20, "temperature": 0, "stop_token_ids": [first]},
    ).json()["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"]) == ([first], "stop")


# -- tools and grammars -----------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_answered(client, stream):
    """The tiny model calls nothing; its answer stays text, and the whole history of a call can be sent."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "copy: "}, {"type": "text", "text": "cab"}]},
    ]
    ask = {"model": MODEL, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 9}
    plain = client.chat.completions.create(**ask | {"tool_choice": "none"}).choices[0].message.content
    if stream:
        assert chunks_of(client.chat.completions.create(**ask, stream=True))[0] == plain
    else:
        message = client.chat.completions.create(**ask).choices[0].message
        assert (message.content, message.tool_calls) == (plain, None)


# -- refusals ---------------------------------------------------------------------------------------------------------


def adapter(**tensors) -> str:
    return base64.b64encode(save(tensors or {"x.lora_A.weight": torch.zeros(2, 2)})).decode()


ASK = {"messages": CHAT, "max_tokens": 2}
LIST = {"type": "array", "items": {"$ref": "other.json"}}
NOWHERE = {"type": "json_schema", "json_schema": {"name": "a", "schema": LIST}}
REFUSED = [
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"max_tokens": 1}, 400, "messages"),
    ("/v1/chat/completions", ASK | {"tempurature": 1}, 400, "tempurature"),
    ("/v1/chat/completions", ASK | {"guided_json": {"type": "object"}}, 400, "guided_json"),
    ("/v1/chat/completions", ASK | {"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ("/v1/chat/completions", ASK | {f"x{i}": i for i in range(65)}, 400, None),
    ("/v1/chat/completions", ASK | {"temperature": -1}, 400, "temperature"),
    ("/v1/chat/completions", ASK | {"temperature": "hot"}, 400, "temperature"),
    ("/v1/chat/completions", ASK | {"top_p": 0}, 400, "top_p"),
    ("/v1/chat/completions", ASK | {"top_p": 1.5}, 400, "top_p"),
    ("/v1/chat/completions", ASK | {"n": 0}, 400, "n"),
    ("/v1/chat/completions", ASK | {"n": 100_000}, 400, "n"),
    ("/v1/chat/completions", ASK | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/chat/completions", ASK | {"max_tokens": -5}, 400, "max_tokens"),
    ("/v1/chat/completions", ASK | {"seed": 1 << 70}, 400, "seed"),
    ("/v1/chat/completions", ASK | {"stop": ""}, 400, "stop"),
    ("/v1/chat/completions", ASK | {"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ("/v1/chat/completions", ASK | {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ("/v1/chat/completions", ASK | {"top_logprobs": 3}, 400, "top_logprobs"),
    ("/v1/chat/completions", ASK | {"tool_choice": "required"}, 400, "tool_choice"),
    ("/v1/chat/completions", ASK | {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ("/v1/chat/completions", ASK | {"model": "gpt-4"}, 404, "model"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 20_000}]}, 400, None),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
    ("/v1/chat/completions", ASK | {"chat_template_kwargs": {"chat_template": "a"}}, 400, "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}, 413, None),
    ("/v1/chat/completions", ASK | {"regex": "((a{0,99}){0,99}){0,99}b"}, 400, None),
    ("/v1/chat/completions", ASK | {"response_format": NOWHERE}, 400, None),
    ("/v1/responses", {"input": []}, 400, "input"),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ("/v1/responses", {"input": "a", "reasoning": {"effort": "high"}}, 400, "reasoning"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools.0"),
    ("/v1/responses", {"input": "a", "max_tokens": 5}, 400, "max_tokens"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, None),
    ("/v1/completions", {"prompt": [103]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1 << 80]}, 400, None),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "flat": True, "stream": True}, 400, "flat"),
    ("/v1/completions", {"prompt": ["a"] * 2048, "n": 100}, 400, "n"),
    ("/v1/score", {"token_ids": [[5, 103]]}, 400, "token_ids"),
    ("/v1/score", {"token_ids": [[]]}, 400, None),
    ("/v1/score", {"token_ids": [[5] * 513]}, 400, "token_ids"),
    ("/v1/score", {"token_ids": [[5]], "temperature": 0}, 400, "temperature"),
    ("/adapters/load", {"weights": "%%%", "version": 1}, 400, "weights"),
    ("/adapters/load", {"weights": base64.b64encode(b"pickle").decode(), "version": 1}, 400, "weights"),
    ("/adapters/load", {"weights": adapter()[:-40], "version": 1}, 400, "weights"),
    ("/adapters/load", {"weights": adapter(other=torch.zeros(2)), "version": 1}, 400, "weights"),
    ("/adapters/load", {"weights": adapter(), "version": 1}, 400, None),
    ("/adapters/load", {"weights": adapter(), "version": -1}, 400, "version"),
    ("/weights/load", {"path": "/etc/passwd", "version": 1}, 403, "path"),
    ("/weights/load", {"path": "a\0b", "version": 1}, 400, "path"),
    ("/nowhere", {}, 404, None),
    ("/policy", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_bad_requests_get_openais_error_and_the_right_status(server, path, body, status, param):
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    if param:
        assert error["param"] is not None
        assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "images are not supported"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "type `input_audio` are not"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(server, client, part, sentence):
    """A model that reads text must not answer as if it had seen the image, nor complain of a string."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}]
    error = server.post("/v1/chat/completions", {"messages": messages}).json()["error"]
    assert sentence in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages.0.content")
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.chat.completions.create(model="policy", messages=messages)


def test_bodies_that_are_no_json_or_too_long_are_refused(server):
    def post(data: bytes | Iterable[bytes], kind: str = "application/json") -> int:
        headers = server.bearer | ({"Content-Type": kind} if kind else {})
        return httpx.post(server.url + "/v1/completions", content=data, headers=headers, **PLAIN).status_code

    assert post(b'{"prompt": "a"') == post(b'{"prompt": "\xff"}') == post(b"[" * 10_000) == 400
    assert post(b'{"prompt": "\\ud800"}') == post(b'{"prompt": "a", "temperature": NaN}') == post(b"") == 400
    assert post(b'{"prompt": "a"}', "text/plain") == post(b'{"prompt": "a"}', "") == 415
    assert post(b" " * 1_000_001) == 413

    def endless():
        for _ in range(200):
            yield b" " * 10_000

    assert post(endless()) == 413


def test_the_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="no model `gpt-4`"):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=-1, stream=True)


# -- clients that leave -----------------------------------------------------------------------------------------------


def alone(server) -> bool:
    """Whether this request is the only one being answered."""
    return "paceline_http_open_requests 1\n" in server.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_places(server, stream):
    """Waiting, or in the middle of its stream: from when the server knows, nothing more is sampled for it."""
    body = json.dumps(LONG | {"n": 32, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    head += f"\r\nAuthorization: {server.bearer['Authorization']}"
    host, port = server.url.removeprefix("http://").split(":")
    if not stream:
        server.post("/pause")
    try:
        with socket.create_connection((host, int(port)), timeout=240) as wire:
            wire.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            assert wire.recv(1) if stream else becomes(lambda: server.load() == 32)
            server.post("/pause")
            told = server.get("/stats").json()["tokens"]
        assert becomes(lambda: alone(server))
    finally:
        server.post("/resume")
    assert server.idle()
    assert server.get("/stats").json()["tokens"] == told


def test_a_client_that_hangs_up_in_its_body_is_not_logged_as_a_bug(server):
    before = server.log.read_text().count("Traceback")
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99"
    head += f"\r\nAuthorization: {server.bearer['Authorization']}"
    with socket.create_connection((host, int(port)), timeout=240) as wire:
        wire.sendall(f'{head}\r\nContent-Type: application/json\r\n\r\n{{"pro'.encode())
        server.get("/health")
    for _ in range(5):  # by then the server has noticed
        server.get("/health")
    assert server.log.read_text().count("Traceback") == before


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_come_from_allowed_folders_only_and_change_the_policy(server, allowed, tmp_path):
    before = server.get("/policy").json()
    tensors = load_file(f"{resolve(MODEL)}/model.safetensors")
    name = "model.norm.weight"
    save_file({name: tensors[name] * 1.5}, allowed / "new.safetensors")
    (allowed / "broken.safetensors").write_bytes((allowed / "new.safetensors").read_bytes()[:-3])
    save_file({"model.norm.weight": torch.ones(7)}, allowed / "shape.safetensors")
    save_file({"model.nrom.weight": tensors[name]}, allowed / "name.safetensors")
    save_file({name: tensors[name]}, tmp_path / "outside.safetensors")
    (allowed / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")

    def load(path, version=7, **more) -> httpx.Response:
        return server.post("/weights/load", {"path": str(path), "version": version, **more})

    assert load(tmp_path / "outside.safetensors").status_code == 403
    assert load(allowed / "link.safetensors").status_code == 403
    assert load(f"{allowed}/../outside.safetensors").status_code == 403
    for bad in ("broken", "shape", "name", "missing"):
        assert load(allowed / f"{bad}.safetensors").status_code == 400
    assert load(allowed).status_code == 403  # a folder with a link that leads out
    assert server.get("/policy").json()["version"] == before["version"]

    done = load(allowed / "new.safetensors")
    assert done.status_code == 200, done.text
    assert done.json()["version"] == 7
    assert done.json()["pause_seconds"] >= 0
    after = server.get("/policy").json()
    assert after["version"] == server.get("/adapters/version").json()["version"] == 7
    assert after["fingerprint"] != before["fingerprint"]
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "flat": True, "ignore_eos": True}).json()
    assert answer["choices"][0]["versions"] == [7, 7, 7]

    save_file({name: tensors[name]}, allowed / "old.safetensors")
    assert load(allowed / "old.safetensors", version=8).status_code == 200
    assert server.get("/policy").json()["fingerprint"] == before["fingerprint"]


LAYER = "model.layers.0.mlp.down_proj"


def lora(seed: int, size: float = 0.1, rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, 384, generator=generator) * size, torch.randn(128, rank, generator=generator) * size
    return {f"{LAYER}.lora_A.weight": a, f"{LAYER}.lora_B.weight": b}


def load_lora(server, tensors: dict[str, torch.Tensor], notes: dict[str, str] | None = None, **more) -> httpx.Response:
    data = base64.b64encode(save(tensors, metadata=notes)).decode()
    return server.post("/adapters/load", {"weights": data, "version": 3, **more})


def test_named_adapters_live_beside_the_base(server):
    def scores(model: str | None) -> list[float]:
        answer = server.post("/v1/score", {"token_ids": [[3, 73, 74, 4, 75, 76]], "model": model})
        assert answer.status_code == 200, answer.text
        return answer.json()["logprobs"][0]

    base = scores(None)
    fingerprint = WeightUpdate(3, lora(0)).fingerprint()
    done = load_lora(server, lora(0), {"alpha": "8", "rank": "4"}, name="first", fingerprint=fingerprint)
    assert done.status_code == 200, done.text
    assert done.json()["fingerprint"] == fingerprint
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in lora(0).items()}
    assert load_lora(server, prefixed, name="second", scale=2.0).status_code == 200
    assert {"first", "second"} <= {model.id for model in server.openai.models.list()}
    assert server.get("/adapters/version").json()["adapters"] == {"first": 3, "second": 3}
    # The same matrices at the same scale, read from the file's notes or given; and the base beside them is untouched.
    assert scores("first") == pytest.approx(scores("second"), abs=1e-4)
    assert scores("first") != pytest.approx(base, abs=1e-3)
    assert scores(None) == scores(MODEL) == pytest.approx(base, abs=1e-4)
    answer = server.openai.chat.completions.create(model="first", messages=CHAT, max_tokens=3)
    assert answer.model == "first"

    for bad in (
        {"tensors": lora(0, rank=64), "name": "first"},
        {"tensors": {"model.nowhere.lora_A.weight": torch.zeros(4, 4)}, "name": "first"},
        {"tensors": lora(0), "name": "third"},
        {"tensors": lora(1), "name": "first", "fingerprint": "0" * 16},
    ):
        assert load_lora(server, **bad).status_code == 400
    assert server.get("/health").status_code == 200
    assert scores("first") == pytest.approx(scores("second"), abs=1e-4)


# -- looking after it -------------------------------------------------------------------------------------------------


def test_health_models_and_metrics(server):
    assert server.get("/health").status_code == 200
    assert server.openai.models.list().data[0].id == MODEL
    assert server.get("/limits").json()["max_context"] == 512
    text = server.get("/metrics").text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {"paceline_engine_tokens_total", "paceline_engine_running", "paceline_http_requests_total"} <= names
    assert 'paceline_http_requests_total{route="/health",status="200"}' in text
    assert 'le="+Inf"' in text


def test_pausing_holds_requests_and_resuming_answers_them(server):
    assert server.post("/pause").status_code == 200
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.post, "/v1/chat/completions", ASK)
        came = becomes(lambda: server.load() == 1)
        tokens = [server.get("/stats").json()["tokens"] for _ in range(20)]
        held = not answer.done()
        assert server.post("/resume").status_code == 200
        assert answer.result(240).status_code == 200
    assert came
    assert held
    assert len(set(tokens)) == 1


# -- starting and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["paceline:quickstart", "--host", "0.0.0.0"], "give an API key"),
        (["paceline:quickstart", "--allow", "/no/such/folder"], "no such folder"),
        (["paceline:quickstart", "--staleness", "2"], "serving takes"),
        (["paceline:quickstart", "--engine.max_runing", "2"], "engine.max_running"),
        (["paceline:quickstart", "--port", "99999"], "--port"),
        (["./no-such-model", "--port", "0"], "no such folder"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments, sentence, capsys):
    assert main(["serve", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_key_is_asked_for_and_a_signal_lets_requests_finish(monkeypatch):
    """The key comes from the environment; then the grace: a request under way is answered, a new one is not."""
    monkeypatch.setenv("PACELINE_API_KEY", "s3cret")
    with served("--host", "0.0.0.0", "--name", "mine", "--grace", "60") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        keys = [None, "Bearer wrong", "Bearer", "s3cret", "Bearer s3cret"]
        headers = [{"Authorization": key} if key else {} for key in keys]
        with httpx.Client(base_url=url, **PLAIN) as client:
            assert [client.get("/v1/models", headers=h).status_code for h in headers] == [401, 401, 401, 401, 200]
            assert client.get("/health").status_code == 200
            assert client.get("/stats").json()["error"]["code"] == "invalid_api_key"
            assert client.get("/v1/models", headers=headers[-1]).json()["data"][0]["id"] == "mine"

        def closed() -> bool:
            try:
                httpx.get(url + "/health", **PLAIN)
            except httpx.ConnectError:
                return True
            except httpx.HTTPError:  # it had come in and was never looked at
                return False
            return False

        with httpx.stream(
            "POST", url + "/v1/chat/completions", json=LONG | {"stream": True}, headers=headers[-1], timeout=240
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert becomes(closed)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert server.process.wait(240) == 0


def test_requests_that_outlast_the_grace_are_cancelled_and_a_full_queue_says_429():
    with served("--grace", "0", "--engine.max_running", "1", "--engine.max_waiting", "1", key="k") as server:
        assert server.post("/pause").status_code == 200
        refused: list[httpx.Response] = []
        cancelled: list[int] = []

        def ask() -> None:
            try:
                answer = server.post("/v1/chat/completions", LONG)
            except httpx.HTTPError:
                cancelled.append(0)
                return
            if answer.status_code == 429:
                refused.append(answer)
            else:
                cancelled.append(answer.status_code)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        settled = becomes(lambda: len(refused) + server.load() == len(threads))
        assert server.stop(signal.SIGINT) == 0
        for thread in threads:
            thread.join()
        assert settled
        assert refused
        assert all(answer.headers["Retry-After"] for answer in refused)
        assert all(answer.json()["error"]["code"] == "overloaded" for answer in refused)
        assert cancelled
        assert set(cancelled) <= {0, 503}


# -- the engine in its own process ------------------------------------------------------------------------------------


NAMES_ENGINE = """
import sys
from paceline.commands import main
from paceline.runtime import serving

started = serving.subprocess.Popen


def start(command, **more):
    process = started(command, **more)
    print("the engine is process", process.pid, file=sys.stderr, flush=True)
    return process


serving.subprocess.Popen = start
sys.exit(main(sys.argv[1:]))
"""


def naming_its_engine(command, **more):
    """The same command, which also writes the engine's process id into its log."""
    return Launched([sys.executable, "-c", NAMES_ENGINE, *command[3:]], **more)


def test_an_engine_in_its_own_process_serves_alike_and_its_death_is_told(server, tmp_path):
    tensors = load_file(f"{resolve(MODEL)}/model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] * 1.5}, tmp_path / "new.safetensors")
    isolated = ("--isolate", "--allow", str(tmp_path), "--engine.max_running", "32")
    with served(*isolated, starts=naming_its_engine, key="of the trainer") as other:
        engine = int(re.search(r"the engine is process (\d+)", other.log.read_text())[1])
        ask = {"model": MODEL, "messages": CHAT, "seed": 3, "max_tokens": 24, "logprobs": True}
        mine, theirs = (one.openai.chat.completions.create(**ask) for one in (server, other))
        assert mine.choices[0].message == theirs.choices[0].message
        assert [e.logprob for e in mine.choices[0].logprobs.content] == pytest.approx(
            [e.logprob for e in theirs.choices[0].logprobs.content], abs=1e-4
        )
        text, _ = chunks_of(other.openai.chat.completions.create(**ask, stream=True))
        assert text == mine.choices[0].message.content
        scored = {"token_ids": [[3, 73, 74, 4]], "temperature": 0.7}
        assert other.post("/v1/score", scored).json()["logprobs"][0] == pytest.approx(
            server.post("/v1/score", scored).json()["logprobs"][0], abs=1e-4
        )
        # Errors keep their class, weights travel by path, cancellation passes through.
        assert other.post("/adapters/load", {"weights": adapter(), "version": 1}).status_code == 400
        assert other.post("/weights/load", {"path": str(tmp_path / "new.safetensors"), "version": 5}).status_code == 200
        assert other.get("/policy").json()["version"] == 5
        with (
            contextlib.suppress(httpx.ReadTimeout),
            httpx.stream(
                "POST",
                other.url + "/v1/chat/completions",
                json=LONG | {"n": 32},
                headers=other.bearer,
                timeout=httpx.Timeout(60, read=0.3),
            ) as answer,
        ):
            answer.read()
        assert other.idle()
        # The engine dies under a request: that request is answered, then the server ends and says why.
        assert other.post("/pause").status_code == 200
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(other.post, "/v1/chat/completions", LONG)
            assert becomes(lambda: other.load() == 1)
            os.kill(engine, signal.SIGKILL)
            assert answer.result(240).status_code == 503
        assert other.process.wait(240) == 1
        assert "the engine's process ended: killed by SIGKILL" in other.log.read_text()
