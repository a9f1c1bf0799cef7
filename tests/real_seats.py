"""A table with real seats: the quickstart model, its engine, and the recording server."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.clients import Pool
from paceline.config.inference import EngineConfig, SamplingConfig
from paceline.config.model import ModelConfig
from paceline.engine import EmbeddedEngine
from paceline.model import end_tokens, load_model, load_tokenizer, resolve
from paceline.rollout import RecordingServer, Renderer, SamplingClient, SessionMap

CONTEXT = 8192
"""The model knows 512 positions; its nonsense beyond them is as good as any for what is tested here."""


class Stage:
    """Plays episodes on a running engine, each at a table of its own."""

    def __init__(self, pool: Pool, renderer: Renderer, ends: Sequence[int]) -> None:
        self._pool, self._renderer, self._ends = pool, renderer, ends

    def play(self, *episodes: Callable[[SessionMap], Awaitable[Any]], actors=("policy",), **sampling) -> list[tuple]:
        """What each episode returned (or raised), and the table it was played at."""
        return asyncio.run(self._play(episodes, actors, SamplingConfig(**{"max_tokens": 8, **sampling})))

    async def _play(self, episodes, actors, sampling) -> list[tuple]:
        recorder = RecordingServer()
        client = SamplingClient(self._pool, self._renderer, sampling, frozenset(self._ends), recorder)
        tables = [SessionMap(client, (0, at), at, actors) for at in range(len(episodes))]
        try:
            ends = await asyncio.gather(
                *(episode(table) for episode, table in zip(episodes, tables, strict=True)), return_exceptions=True
            )
        finally:
            for table in tables:
                table.leave()
            await client.close()
        return list(zip(ends, tables, strict=True))


@contextmanager
def stage(*lessons: list[dict]) -> Generator[Stage]:
    """An engine with the quickstart model, taught until it says word for word what its part in the lessons is."""
    config = ModelConfig()
    tokenizer, model = load_tokenizer(config), load_model(config)
    model.config.max_position_embeddings = CONTEXT
    ends = end_tokens(tokenizer, model)
    renderer = Renderer(tokenizer, ends)
    if lessons:
        taught = AutoModelForCausalLM.from_pretrained(resolve(config.name), attn_implementation="sdpa")
        teach(taught, [part for lesson in lessons for part in parts(lesson, renderer, tokenizer, ends[0])])
        model.load_state_dict(taught.state_dict())
    engine = EmbeddedEngine(model, EngineConfig(max_running=16, threads=1))
    engine.start()
    try:
        yield Stage(Pool([engine]), renderer, ends)
    finally:
        engine.close()


def parts(lesson: list[dict], renderer: Renderer, tokenizer, end: int) -> Generator[tuple[list[int], list[int]]]:
    """Each reply of a conversation with the prompt before it, as tokens."""
    for at, message in enumerate(lesson):
        if message["role"] == "assistant":
            said = tokenizer.encode(message["content"], add_special_tokens=False)
            yield renderer.prompt(lesson[:at]), [*said, end]


def teach(model, parts: list[tuple[list[int], list[int]]]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(300):
        losses = []
        for prompt, said in parts:
            logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(said)))
        loss = torch.stack(losses).max()
        if loss < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05, f"the model has not learned its lines: {loss}"
