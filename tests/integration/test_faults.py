"""Faults that need real parts: the only engine of a pool is killed and comes back; the disk of a run is full."""

import asyncio
import errno
import signal
import socket
from contextlib import ExitStack

from serving import served

from paceline.cluster import train
from paceline.config import Checkpoint, Eval, RunConfig
from paceline.config.env import CustomEnv
from paceline.config.inference import Sampling
from paceline.config.model import Model
from paceline.data import Ticket
from paceline.envs import Environment, Outcome
from paceline.inference import HttpEngine, Pool
from paceline.model import WeightUpdate, load_model, load_tokenizer
from paceline.monitor import Recorder
from paceline.orchestrator import RealClock, lay_out
from paceline.orchestrator.episodes import Player
from paceline.rollout import Group, Renderer, Voice

SMALL = ("--engine.max_running", "8", "--engine.max_context", "128", "--engine.threads", "1")


class Chatter(Environment):
    """Three turns each. When the first of them has been said by all, something may happen to the world."""

    def __init__(self, happens=None) -> None:
        self.happens, self.waiting, self.tries = happens, 0, 0
        self.go = asyncio.Event()

    def examples(self, split):
        return [{"words": "once upon a time"}]

    async def play(self, example, seats):
        self.tries += 1
        messages = [{"role": "user", "content": example["words"]}]
        for turn in range(3):
            messages += [(await seats["policy"].chat(messages)).message, {"role": "user", "content": "and then?"}]
            if turn == 0 and not self.go.is_set():
                await self._meet()
        return Outcome.solo(float(len(messages)))

    async def _meet(self):
        self.waiting += 1
        if self.waiting == 4:
            if self.happens is not None:
                asyncio.get_running_loop().call_soon(self.happens)
            self.go.set()
        await self.go.wait()


def said(group: Group) -> list[list[list[int]]]:
    return [[turn.completion_ids for turn in rollout.turns] for rollout in group.rollouts]


def test_a_killed_engine_that_comes_back_with_old_weights_costs_time_and_no_episode(tmp_path):
    """The heir is born with other weights than those the run has published, and gets them before it serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--port", str(port), "--allow", str(tmp_path), *SMALL)
    config = RunConfig(env=[CustomEnv(name="chat", import_path="x:y")], group_size=4, batch_size=4)
    tokenizer = load_tokenizer(Model())
    ends = [tokenizer.eos_token_id]
    changed = {name: value.detach() + 0.001 for name, value in load_model(Model(), "cpu").named_parameters()}

    async def run(stack: ExitStack) -> tuple[Group, Group, Chatter]:
        first = await asyncio.to_thread(stack.enter_context, served(*flags))
        engine = HttpEngine(first.url, folder=tmp_path)
        pool = Pool([engine])
        voice = Voice(pool, Renderer(tokenizer, ends), Sampling(max_tokens=16), frozenset(ends))
        player, ticket = Player(voice, RealClock(), seed=0), Ticket(4, "chat", 0, 0, 0)
        births: list[asyncio.Task] = []

        async def succeed() -> None:
            await asyncio.to_thread(first.process.wait)
            await asyncio.to_thread(stack.enter_context, served(*flags))

        def die() -> None:
            first.process.send_signal(signal.SIGKILL)
            births.append(asyncio.ensure_future(succeed()))

        try:
            await pool.load_weights(WeightUpdate(7, changed))
            undisturbed = await player.group(lay_out(config, {"chat": Chatter()})["chat"], ticket)
            chatter = Chatter(die)
            disturbed = await player.group(lay_out(config, {"chat": chatter})["chat"], ticket)
            await asyncio.gather(*births)
            return undisturbed, disturbed, chatter
        finally:
            pool.close()
            await engine.aclose()

    with ExitStack() as stack:
        undisturbed, disturbed, chatter = asyncio.run(asyncio.wait_for(run(stack), 200))
    assert undisturbed.failed == disturbed.failed == []
    assert chatter.tries >= 4
    assert said(disturbed) == said(undisturbed)
    assert {v for r in disturbed.rollouts for t in r.turns for v in t.versions} == {7}


def test_a_run_whose_disk_is_full_at_the_metrics_says_so_and_can_go_on(tmp_path, monkeypatch):
    whole = Recorder.step

    def full(self, step, metrics):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(self, step, metrics)

    monkeypatch.setattr(Recorder, "step", full)
    settings = {"runs": str(tmp_path), "steps": 3, "batch_size": 8, "group_size": 4, "eval": Eval(every=0)}
    settings |= {"sampling": Sampling(max_tokens=8), "checkpoint": Checkpoint(every=1), "device": "cpu"}
    done = train(RunConfig(**settings))
    assert (done.outcome.status, done.outcome.step) == ("failed", 1)
    sentence = f"{tmp_path / 'run'} cannot be written (No space left on device): make room, then add --resume latest"
    assert sentence in str(done.error)
    monkeypatch.undo()
    again = train(RunConfig(**settings, resume="latest"))
    assert again.outcome.status == "finished", again.error
    assert [line["step"] for line in again.metrics] == [1, 2, 3]
