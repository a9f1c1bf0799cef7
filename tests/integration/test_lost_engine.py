"""A server whose engine has failed for good answers waiting requests, then ends, so that its supervisor restarts it.
One that lived on would refuse every request, for ever."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import served

from child_processes import Launched

BREAKS = """
import sys
import threading
from paceline.runtime import scorer, serving
from paceline.engine.engine import DecodingEngine
from paceline.engine.scheduler import Scheduler

scheduled, scored, started = Scheduler.schedule, scorer.score_samples, serving.subprocess.Popen
asked = threading.Semaphore(0)


def fail():
    for _ in range(ASKED):  # a later request finds no server, and gets no reason
        assert asked.acquire(timeout=120)
    raise RuntimeError("the device is gone")


def schedule(self):
    chunks = scheduled(self)
    if any(13 in chunk.sequence.tokens for chunk in chunks):
        fail()
    return chunks


def score(forward, samples, budget):
    if any(13 in sample.token_ids for sample in samples):
        fail()
    return scored(forward, samples, budget)


def counted(ask):
    async def score(self, *given, **named):
        answer = asyncio.ensure_future(ask(self, *given, **named))
        await asyncio.sleep(0)  # it stands in line now
        asked.release()
        return await answer

    return score


def start(command, **more):
    code = CODE + "config = serving.RunConfig.model_validate_json(sys.stdin.buffer.read())\\n"
    code += "serving.host_engine(int(sys.argv[1]), config)"
    start = getattr(sys.modules.get("child_processes"), "Launched", started)  # it need not import everything again
    return start([sys.executable, "-c", code, command[-1]], **more)


Scheduler.schedule, scorer.score_samples, serving.subprocess.Popen = schedule, score, start
DecodingEngine.score, scorer.Scorer.score = counted(DecodingEngine.score), counted(scorer.Scorer.score)
"""
OTHERS = [4, 13, 4, 4]
BREAKS = f"import asyncio\nASKED = {1 + len(OTHERS)}\n" + BREAKS
BREAKS = f"CODE = {BREAKS!r}\nexec(CODE)\n"
SERVES = "from paceline.commands import main\nsys.exit(main(sys.argv[1:]))\n"


def breaking(command, **more):
    """The same command, with an engine that fails over token 13, once all have asked."""
    return Launched([sys.executable, "-c", BREAKS + SERVES, *command[3:]], **more)


@pytest.mark.parametrize("how", ["--no-isolate", "--isolate", "--scores-only"])
def test_a_server_ends_with_its_engine_once_all_are_answered(how):
    with served(how, "--engine.max_running", "8", "--engine.threads", "1", starts=breaking) as server:

        def ask(token: int):
            return server.post("/v1/score", {"token_ids": [[token, 5, 6]]})

        assert ask(4).status_code == 200
        with ThreadPoolExecutor(4) as others:
            answers = list(others.map(ask, OTHERS))
        assert all(answer.status_code in (200, 500, 503) for answer in answers)
        assert "the device is gone" in answers[1].text
        assert server.process.wait(240) == 1
        assert "the device is gone" in server.log.read_text()
