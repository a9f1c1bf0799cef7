"""What the engines did in a step, from their own counters."""

import asyncio

import pytest

from paceline.engine import EngineStats
from paceline.errors import EngineError
from paceline.orchestrator.metrics import EngineLoad


class CountingPool:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def stats(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def laps(*answers) -> list[dict[str, float]]:
    load, pool = EngineLoad(), CountingPool(*answers)

    async def run() -> list[dict[str, float]]:
        return [await load.lap(pool) for _ in answers]

    return asyncio.run(run())


def stats(steps: int, tokens: int, **others) -> EngineStats:
    return EngineStats(steps=steps, tokens=tokens, **others)


def test_a_step_tells_what_two_engines_did_since_the_last():
    first = [stats(10, 400, prompt_tokens=100, cached_tokens=80), stats(10, 600)]
    second = [
        stats(15, 700, prompt_tokens=200, cached_tokens=90, waiting=3, preempted=2, cache_used=0.4),
        stats(15, 800),
    ]
    before, after = laps(first, second)
    assert before["engine/batch"] == 50
    assert after == {
        "engine/batch": 50.0,
        "engine/shared_prompts": pytest.approx(0.1),
        "engine/preempted": 2.0,
        "engine/waiting": 3.0,
        "engine/cache_used": 0.4,
    }


def test_a_step_without_work_an_engine_that_began_anew_or_does_not_answer_tells_nothing():
    lost = EngineError("gone")
    first, idle, anew, gone, after = laps([stats(10, 40)], [stats(10, 40)], [stats(2, 8)], lost, [stats(4, 16)])
    assert first
    assert after["engine/batch"] == 4
    assert idle == anew == gone == {}
