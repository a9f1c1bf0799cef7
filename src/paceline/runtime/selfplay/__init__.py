"""Self-play in a few lines of Python, without a run file: an arena, a trainer, and a loop between them.

    model, tokenizer = load("paceline:quickstart")
    apply_lora(model, inference_mode=False)
    optimizer = optim.Adam(learning_rate=1e-5)
    config = TrainerConfig(micro_batch_tokens=4096, staleness_limit=3)

    client = OpenAIClient(base_url="http://localhost:8000/v1")      # paceline serve NAME --engine.adapters 1
    trainer = Trainer(model, optimizer, config, client)
    arena = MyArena(client, credit_assigner=GRPOCredit())

    await training_loop(arena=arena, trainer=trainer, num_steps=1000, episode_concurrency=8)

The parts are those of a run: seats record exact tokens, algorithms give credit, the trainer steps.
"""

from paceline.runtime.selfplay.client import (
    ArenaRunner,
    ArenaSnapshot,
    Client,
    OpenAIClient,
    TrainingBatch,
    TrainingRecord,
)
from paceline.runtime.selfplay.credit import ConstantCredit, GRPOCredit, RAECredit
from paceline.runtime.selfplay.loops import synchronous_training_loop, training_loop
from paceline.runtime.selfplay.settings import SelfPlayTrainerConfig, apply_lora, load, optim
from paceline.runtime.selfplay.trainer import SelfPlayTrainer
from paceline.util.lazy_import import renamed_getattr

Trainer, TrainerConfig = SelfPlayTrainer, SelfPlayTrainerConfig
"""Short names for scripts. In the package the classes have names of their own, since a run file has a trainer too."""

__all__ = [
    "ArenaRunner",
    "ArenaSnapshot",
    "Client",
    "ConstantCredit",
    "GRPOCredit",
    "OpenAIClient",
    "RAECredit",
    "SelfPlayTrainer",
    "SelfPlayTrainerConfig",
    "Trainer",
    "TrainerConfig",
    "TrainingBatch",
    "TrainingRecord",
    "apply_lora",
    "load",
    "optim",
    "synchronous_training_loop",
    "training_loop",
]

__getattr__ = renamed_getattr(__name__, {"Stage": "ArenaRunner"})
