"""Listeners hear every token once, in order; a crowd hears of several at a time."""

import asyncio
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import tiny_model
from engine_requests import serve, together
from paceline.engine import EmbeddedEngine, GenerateRequest, Piece
from paceline.engine.sequence import LISTENER_SECONDS, MOST_DELAY_SECONDS, DecodeSequence, SampledToken, TokenStreamer


class Hall:
    """Sequences with a listener, and a clock that is set by hand."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.herald = TokenStreamer(lambda: self.now)
        self.heard: list[list[Piece]] = [[] for _ in range(count)]
        request = GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=1000)
        self.sequences = [DecodeSequence(request, Future(), [1, 2, 3], 1000, pieces.append) for pieces in self.heard]

    def draw(self, index: int, token: int) -> None:
        self.sequences[index].append(SampledToken(token, -float(token)), version=token % 3)
        self.herald.add(self.sequences[index])

    def tokens(self, index: int) -> list[int]:
        return [token for piece in self.heard[index] for token in piece.token_ids]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["draw", "tell", "now", "wait", "finish"])), max_size=60))
def test_every_token_is_told_once_in_order_whenever_it_is_told(script: list[tuple[int, str]]) -> None:
    hall = Hall(4)
    drawn: list[list[int]] = [[] for _ in hall.heard]
    for number, (index, what) in enumerate(script):
        if what == "draw":
            hall.draw(index, number)
            drawn[index].append(number)
        elif what == "finish":
            hall.herald.finish(hall.sequences[index])
            assert hall.tokens(index) == drawn[index]
        elif what == "wait":
            hall.now += MOST_DELAY_SECONDS
        else:
            hall.herald.flush(now=what == "now")
    hall.herald.flush(now=True)
    assert [hall.tokens(index) for index in range(4)] == drawn
    for pieces in hall.heard:
        for piece in pieces:
            assert piece.token_ids, "no listener is called without tokens"
            assert piece.logprobs == [-float(token) for token in piece.token_ids]
            assert piece.versions == [token % 3 for token in piece.token_ids]


@pytest.mark.parametrize("crowd", [1, 10, 400, 2000])
def test_a_crowd_is_told_as_rarely_as_telling_it_takes(crowd: int) -> None:
    hall = Hall(crowd)
    pause = min(crowd * LISTENER_SECONDS, MOST_DELAY_SECONDS)
    for index in range(crowd):
        hall.draw(index, 5)
    hall.herald.flush()
    assert all(len(pieces) == 1 for pieces in hall.heard), "the first token is told at once"
    hall.draw(0, 6)
    hall.now = pause * 0.99
    hall.herald.flush()
    assert hall.tokens(0) == [5]
    hall.now = pause
    hall.herald.flush()
    assert hall.tokens(0) == [5, 6]


def test_the_forgotten_hear_nothing_more() -> None:
    hall = Hall(2)
    hall.draw(0, 5)
    hall.draw(1, 6)
    hall.herald.discard(hall.sequences[0])
    hall.herald.flush(now=True)
    assert (hall.tokens(0), hall.tokens(1)) == ([], [6])


def test_a_paused_engine_owes_its_listeners_nothing() -> None:
    """What was sampled before a pause is told before it, not when the engine goes on."""
    pieces: list[Piece] = []

    async def work(engine: EmbeddedEngine) -> None:
        crowd = [GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=100)] * 8
        tasks = await together(engine, crowd, [pieces.append, *[lambda _: None] * 7], stop_at=80)
        (running,) = [s for s in engine._scheduler.running.values() if s.listener == pieces.append]
        assert sum(len(piece.token_ids) for piece in pieces) == len(running.logprobs) > 0
        await engine.resume()
        completion = await tasks[0]
        assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
        assert [value for piece in pieces for value in piece.logprobs] == completion.logprobs
        await asyncio.gather(*tasks)

    serve(tiny_model(), work, max_running=8)
