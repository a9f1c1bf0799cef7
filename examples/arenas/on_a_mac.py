"""Self-play on a Mac: a 4-bit base, LoRA, an arena, credit within groups, generating and training at once.

mlx_lm.convert --hf-path HF_FOLDER --mlx-path MODEL -q                            a quantised model, if you have none
PACELINE_API_KEY=mine paceline serve MODEL --backend mlx --engine.adapters 1      in one terminal
PACELINE_API_KEY=mine python examples/arenas/on_a_mac.py MODEL                    in another
"""

import asyncio
import sys

from tic_tac_toe import TicTacToe

from paceline.config.inference import SamplingConfig
from paceline.runtime import selfplay as sp


async def main(name: str, base_url: str = "http://localhost:8000/v1", num_steps: str = "20") -> None:
    model, tokenizer = sp.load(name, backend="mlx")
    config = sp.SelfPlayTrainerConfig(micro_batch_tokens=4096, staleness_limit=3, kl_coef=0.1, use_kl_penalty=False)
    client = sp.OpenAIClient(base_url=base_url, sampling=SamplingConfig(max_tokens=4))
    trainer = sp.SelfPlayTrainer(model, sp.optim.Adam(learning_rate=1e-3), config, client, tokenizer)
    arena = TicTacToe(client, credit_assigner=sp.GRPOCredit())
    await sp.training_loop(arena=arena, trainer=trainer, num_steps=int(num_steps), episode_concurrency=32)
    print(f"trained {trainer.version} versions; {trainer.stale} samples were too old")
    await client.aclose()
    trainer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
