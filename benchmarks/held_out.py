"""Measures the loss of a model on the answers of tools, in conversations that were not trained on."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.algorithms.echo import MessageLocator
from paceline.commands.rollouts import EpisodePlayer, RolloutOptions, pick_env, play_episodes, split_sampling
from paceline.config import load
from paceline.envs import build_environment
from paceline.model import load_tokenizer
from paceline.rollout import Message, Turn
from paceline.runtime.episode_runtime import open_episode_runtime
from paceline.runtime.local import renderer_of

Conversation = Sequence[Message]


def conversations(run: Path, count: int) -> list[Conversation]:
    """Held-out episodes, one for each row, played by the model a run has exported."""
    config = load(run / "config.toml", ["--model.name", str(run / "export")]).config
    options = RolloutOptions(count=count, split="eval", concurrency=32)
    with open_episode_runtime(config, split_sampling(config, "eval"), None, options.concurrency) as house:
        section = pick_env(config, None)
        player = EpisodePlayer(section, build_environment(section), house, options.split, config.seed)
        played = asyncio.run(play_episodes(player, options))
    return [record["messages"] for record in played]


@torch.no_grad()
def role_loss(run: Path, told: Sequence[Conversation], role: str = "tool") -> float:
    """Mean -log p per token of the messages of a role, bodies only, by the exported model as transformers runs it."""
    config = load(run / "config.toml", ["--model.name", str(run / "export")]).config
    tokenizer = load_tokenizer(config.model)
    renderer = renderer_of(tokenizer, [tokenizer.eos_token_id], config.model)
    bodies = MessageLocator(renderer)
    model: Any = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    for messages in told:
        places = [place for place, message in enumerate(messages) if message["role"] == role]
        ids = renderer.prompt(list(messages[: places[-1] + 1]))
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for _, start, end in bodies.find(_heard(ids, messages[: places[-1] + 1]), places):
            at = torch.arange(start, end)
            total -= float(logprobs[at - 1, torch.tensor(ids[start:end])].sum())
            tokens += end - start
    return total / tokens


def _heard(ids: list[int], messages: Conversation) -> Turn:
    """A turn with nothing said yet."""
    return Turn(
        prompt_ids=ids,
        completion_ids=[],
        logprobs=[],
        versions=[],
        finish="stop",
        temperature=1.0,
        messages=list(messages),
    )
