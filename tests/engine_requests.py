"""Requests for a started engine, and the trainer's log probabilities of what it sampled."""

import asyncio
import contextlib
import random
import socket
import threading

import torch

from backends import engine_of
from conftest import VOCABULARY
from paceline.clients.link import EngineLink
from paceline.clients.rpc import EngineHost
from paceline.config.inference import EngineConfig
from paceline.engine import Completion, GenerateRequest, noise_key
from paceline.model import LMHead, PackedPlan, hidden_states, token_logprobs


def requests(groups: int = 5, members: int = 3, seed: int = 0, **settings) -> list[GenerateRequest]:
    rng = random.Random(seed)
    out = []
    for group in range(groups):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 20, 45])))
        for member in range(members):
            defaults = {"max_tokens": rng.randrange(1, 25), "temperature": rng.choice([0.6, 1.0, 1.7])}
            noise = noise_key(seed, group, member)
            out.append(GenerateRequest(prompt_ids=prompt, noise=noise, order=group, **(defaults | settings)))
    return out


def serve(model, work, deterministic=False, **config):
    """Run `work(engine)` against a started engine."""

    async def run():
        engine = engine_of(model, EngineConfig(threads=1, **config), deterministic=deterministic)
        engine.start()
        try:
            return await asyncio.wait_for(work(engine), 240)
        finally:
            engine.close()

    return asyncio.run(run())


def complete(model, wanted: list[GenerateRequest], order: list[int] | None = None, **config) -> list[Completion]:
    async def work(engine):
        tasks = {i: asyncio.create_task(engine.generate(wanted[i])) for i in order or range(len(wanted))}
        return [await tasks[i] for i in range(len(wanted))]

    return serve(model, work, **config)


async def until(condition) -> None:
    """Poll the engine's thread; the test's own deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - another thread changes it
        await asyncio.sleep(0.001)


async def together(engine, crowd: list[GenerateRequest], listeners=None, stop_at: int | None = None) -> list:
    """All begin in one step, so that two runs see the same batches; `stop_at` as of `stopped_at`."""
    await engine.pause()
    listeners = listeners or [None] * len(crowd)
    tasks = [asyncio.create_task(engine.generate(r, listener)) for r, listener in zip(crowd, listeners, strict=True)]
    await until(lambda: engine._scheduler.num_waiting == len(crowd))
    await (engine.resume() if stop_at is None else stopped_at(engine, stop_at))
    return tasks


async def stopped_at(engine, tokens: int) -> None:
    """Let the engine go on until it has drawn so many tokens, and pause it there, between two steps.

    A test that only looks, and then pauses, is too late on a busy machine: all that ran is over by then.
    """
    step = engine._step

    def stepping() -> None:
        step()
        if engine.tokens >= tokens:
            engine._set_paused(True)

    engine._step = stepping
    await engine.resume()
    await until(lambda: engine.tokens >= tokens and engine._paused)
    engine._step = step


def trainer_logprobs(model, request: GenerateRequest, completion: Completion) -> torch.Tensor:
    """The same tokens through the trainer's code path: packed attention, chunked head."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
    plan = PackedPlan([len(ids)], "cpu")
    positions = torch.arange(len(ids))
    with torch.no_grad():
        hidden = hidden_states(model.get_decoder(), ids, positions, plan)
        temperatures = torch.full((len(ids) - 1,), request.temperature)
        logprobs, _ = token_logprobs(LMHead(model), hidden[:-1], ids[1:], temperatures)
    return logprobs[len(request.prompt_ids) - 1 :]


@contextlib.contextmanager
def linked(engine):
    """The host in a thread with its own event loop, the link in ours."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lambda: asyncio.run(EngineHost(engine, [5]).serve(theirs)))
    thread.start()
    link = EngineLink(ours)
    try:
        link.start()
        yield link
    finally:
        link.close()
        thread.join(60)
        assert not thread.is_alive()
