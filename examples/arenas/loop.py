"""Self-play without a run file: an arena, a trainer and a server, in a few lines.

    export PACELINE_API_KEY=mine                                    in two terminals, any word
    paceline serve paceline:quickstart --engine.adapters 1          in one
    python examples/arenas/loop.py                                  in the other

`training_loop` generates and trains at once; the weights go to the server after every step, which takes them from the
holder of its key.
"""

import asyncio
import sys
from pathlib import Path

from paceline.config.inference import SamplingConfig
from paceline.runtime.selfplay import (
    GRPOCredit,
    OpenAIClient,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    load,
    optim,
    training_loop,
)

sys.path.insert(0, str(Path(__file__).parent))
from tic_tac_toe import TicTacToe


async def main(base_url: str = "http://localhost:8000/v1", num_steps: str = "20") -> None:
    # 1. Initialize components
    model, _tokenizer = load("paceline:quickstart")
    optimizer = optim.Adam(learning_rate=1e-3)
    config = SelfPlayTrainerConfig(micro_batch_tokens=4096, staleness_limit=3, kl_coef=0.1, use_kl_penalty=False)

    client = OpenAIClient(base_url=base_url, sampling=SamplingConfig(max_tokens=4))
    trainer = SelfPlayTrainer(model, optimizer, config, client)

    arena = TicTacToe(client, credit_assigner=GRPOCredit())

    # 2. Run training
    await training_loop(arena=arena, trainer=trainer, num_steps=int(num_steps), episode_concurrency=32)

    print(f"trained {trainer.version} versions; {trainer.stale} samples were too old")
    await client.aclose()
    trainer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
