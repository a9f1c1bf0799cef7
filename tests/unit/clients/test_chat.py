"""Laws of asking an endpoint for chat completions: its limits hold, and only what may pass is asked again."""

import asyncio
import threading
import time

import pytest

from judge_server import in_turn, judge_server
from paceline.clients.chat import ChatEndpoint
from paceline.errors import EngineError, RequestError, UnknownModel, Unreachable

BODY = {"model": "judge", "messages": [{"role": "user", "content": "?"}]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("paceline.config.filters.FIRST_PAUSE", 0.01)


def ask(url, times: int = 1, *, key=None, seconds=30.0, retries=4, limits=((16, None),), method="chat"):
    async def run():
        endpoint = ChatEndpoint(url, key)
        for concurrency, per_minute in limits:
            endpoint.limit(concurrency, per_minute)
        try:
            if method == "check":
                return await endpoint.check()
            asked = (endpoint.chat(BODY, seconds, retries) for _ in range(times))
            return [choice["message"]["content"] for choice, _ in await asyncio.gather(*asked)]
        finally:
            await endpoint.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("trouble", [429, 500, 503, 529, 408, b"not JSON", b'{"choices": []}', b"[]", b""])
def test_what_may_pass_is_asked_again(trouble):
    with judge_server(in_turn(trouble, trouble, "fine")) as server:
        assert ask(server.url) == ["fine"]
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestError), (401, EngineError), (403, EngineError), (404, UnknownModel)]
)
def test_what_stays_refused_is_asked_once(status, kind):
    with judge_server(status) as server:
        with pytest.raises(kind, match=f"answered {status}: as told"):
            ask(server.url)
        assert len(server.asked) == 1


def test_retries_are_bounded_and_counted():
    with judge_server(500) as server:
        with pytest.raises(EngineError, match=r"answered 500: as told \(3 tries\)"):
            ask(server.url, retries=2)
        assert len(server.asked) == 3


def test_an_endpoint_that_hangs_is_left_at_its_timeout():
    with judge_server(None) as server, pytest.raises(EngineError, match=r"took longer than 0.2 s \(2 tries\)"):
        ask(server.url, seconds=0.2, retries=1)


def test_a_dead_endpoint_is_named():
    with judge_server("x") as server:
        url = server.url
    with pytest.raises(EngineError, match="does not answer"):
        ask(url, retries=1)
    with pytest.raises(Unreachable, match="does not answer"):
        ask(url, method="check")


def test_an_endpoint_says_when_to_come_back():
    with judge_server(in_turn((429, {"Retry-After": "0.5"}), "fine")) as server:
        assert ask(server.url) == ["fine"]
        assert server.times[1] - server.times[0] >= 0.5
    with judge_server(in_turn((429, {"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"}), "fine")) as server:
        assert ask(server.url) == ["fine"]


def test_no_more_are_asked_at_once_than_the_smallest_limit():
    meeting = threading.Barrier(3)  # no answer comes before three were asked for

    def answer(body):
        meeting.wait(30)
        return "fine"

    with judge_server(answer) as server:
        assert ask(server.url, 12, limits=((8, None), (3, None), (5, None))) == ["fine"] * 12
        assert server.most == 3


def test_requests_are_spaced_by_the_smallest_rate():
    with judge_server("fine") as server:
        began = time.monotonic()
        assert ask(server.url, 4, limits=((16, 6000), (16, 300))) == ["fine"] * 4
        assert time.monotonic() - began >= 0.99 * 3 * 60 / 300


def test_a_key_is_sent_and_never_shown():
    with judge_server(b'{"error": "no, s3cret-key"}') as server:
        with pytest.raises(EngineError, match=r"\*\*\*") as caught:
            ask(server.url, key="s3cret-key", retries=0)
        assert "s3cret-key" not in str(caught.value)
        assert server.keys == ["Bearer s3cret-key"]


def test_a_path_of_the_services_own_is_kept():
    for url, path in [
        ("http://h:1", "/v1"), ("http://h:1/v1/", "/v1"), ("http://h:1/api/v4", ""), ("http://h:1/x/v1", "/v1"),
        ("http://h:1/v1/chat/completions", "/v1"), ("http://h:1/api/v4/chat/completions/", ""),
    ]:  # fmt: skip
        endpoint = ChatEndpoint(url)
        plain = url.rstrip("/").removesuffix("/chat/completions")
        assert endpoint.address == (plain if url != "http://h:1" else "http://h:1/v1")
        assert endpoint._prefix == path


def test_a_check_takes_any_endpoint_that_lives_and_takes_the_key():
    with judge_server("fine") as server:
        for status in (200, 404, 429, 500):
            server.model_status = status
            ask(server.url, method="check")
        server.model_status = 401
        with pytest.raises(EngineError, match="answered 401"):
            ask(server.url, method="check")
