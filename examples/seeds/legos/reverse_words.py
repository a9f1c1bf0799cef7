"""Self-play training without a run file: starts a server, trains on it for a minute, prints how the reward rises.

    python examples/seeds/legos/reverse_words.py

The arena asks the quickstart model to reverse words, which it sometimes does. Generation and training run at once: each
optimizer step sends new adapters to the server, which goes on sampling. Held-out words are played every ten steps.
`python examples/seeds/legos/reverse_words.py 20 mlx` takes so many batches, and mlx in place of torch.
"""

import asyncio
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.config.inference import SamplingConfig
from paceline.envs import Split
from paceline.envs.reverse_text import position_accuracy
from paceline.envs.words import words
from paceline.runtime.selfplay import (
    GRPOCredit,
    OpenAIClient,
    Trainer,
    TrainerConfig,
    apply_lora,
    load,
    optim,
    training_loop,
)
from paceline.selfplay import Actor, Arena, Artifact, EpisodeRequest, EpisodeState, Rubric, SingleTurnEpisode

MODEL = "paceline:quickstart"
TRIES = 8


def exact(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """All letters in reverse order."""
    return {"writer": float(state.last_text == state.request.artifact.data[::-1])}


def letters(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """The share of letters in their place."""
    return {"writer": position_accuracy(state.last_text, state.request.artifact.data[::-1])}


class Reverse(SingleTurnEpisode):
    """One word, one answer."""

    episode_type = "reverse"
    rubric = Rubric([exact, letters], [0.8, 0.2])

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        return f"reverse: {artifact.data}"


class ReverseWords(Arena):
    """Sixteen words a batch, eight tries each."""

    def __init__(self, client: Any = None, credit_assigner: Any = None) -> None:
        super().__init__(client, credit_assigner)
        self.add_actor(Actor("writer", max_tokens=12))
        self.add_episode(Reverse())
        self._words = words("train", 1024, seed=0)

    def get_batch(self) -> Sequence[EpisodeRequest]:
        drawn = self.rng.sample(self._words, 16)
        return [EpisodeRequest("reverse", Artifact(word)) for word in drawn for _ in range(TRIES)]

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        held_out = words("eval", 64, seed=0) if split == "eval" else []
        return [EpisodeRequest("reverse", Artifact(word)) for word in held_out]


@contextmanager
def serve(backend: str) -> Iterator[str]:
    """The address of a server with room for one adapter, which takes weights from the holder of its key."""
    os.environ["PACELINE_API_KEY"] = secrets.token_hex(16)
    command = [sys.executable, "-m", "paceline", "serve", MODEL, "--port", "0", "--backend", backend]
    command += ["--engine.adapters", "1", "--engine.max-context", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = re.search(r" at (http://\S+)", process.stdout.readline())
        if ready is None:
            raise SystemExit("the server did not start; its own words are above")
        yield ready[1]
    finally:
        process.terminate()
        process.wait(60)


async def train(base_url: str, num_steps: int, backend: str, folder: str) -> list[dict[str, Any]]:
    model, tokenizer = load(MODEL, backend=backend)
    apply_lora(model, inference_mode=False)
    optimizer = optim.Adam(learning_rate=2e-3)
    config = TrainerConfig(eval_every=10, eval_concurrency=64, checkpoint_every=20, checkpoint_dir=folder)
    client = OpenAIClient(base_url=base_url, sampling=SamplingConfig(max_tokens=12))
    trainer = Trainer(model, optimizer, config, client, tokenizer)
    arena = ReverseWords(client, credit_assigner=GRPOCredit())
    try:
        await training_loop(arena=arena, trainer=trainer, num_steps=num_steps, episode_concurrency=64)
    finally:
        await client.aclose()
        trainer.close()
    return trainer.metrics


def main(num_steps: str = "20", backend: str = "torch") -> None:
    with serve(backend) as base_url, tempfile.TemporaryDirectory() as folder:
        metrics = asyncio.run(train(base_url, int(num_steps), backend, folder))
    for line in metrics:
        held_out = line.get("eval/arena/reward")
        print(
            f"step {line['step']:3d}  reward {line['reward/writer']:.3f}",
            f"  held out {held_out:.3f}" if held_out is not None else "",
        )
    print(f"reward {metrics[0]['reward/writer']:.3f} -> {metrics[-1]['reward/writer']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
