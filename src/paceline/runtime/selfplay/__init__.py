"""Self-play in a few lines of Python, without a run file: an arena, a trainer, and a loop between them.

    model, tokenizer = load("paceline:quickstart")
    optimizer = optim.Adam(learning_rate=1e-5)
    config = SelfPlayTrainerConfig(micro_batch_tokens=4096, staleness_limit=3)

    client = OpenAIClient(base_url="http://localhost:8000/v1")      # paceline serve NAME --engine.adapters 1
    trainer = SelfPlayTrainer(model, optimizer, config, client)
    arena = MyArena(client, credit_assigner=GRPOCredit())

    await training_loop(arena=arena, trainer=trainer, num_steps=1000, episode_concurrency=8)

The parts are those of a run: seats record exact tokens, algorithms give credit, the trainer steps. What a run adds
(evaluation, checkpoints, metrics on disk, resume) needs a run file with an `arena` environment.
"""

from paceline.runtime.selfplay.stage import (
    ConstantCredit,
    GRPOCredit,
    RAECredit,
    Stage,
    synchronous_training_loop,
    training_loop,
)
from paceline.runtime.selfplay.trainer import (
    Client,
    OpenAIClient,
    SelfPlayTrainer,
    SelfPlayTrainerConfig,
    TrainingBatch,
    load,
    optim,
)
from paceline.util.lazy_import import renamed_names

__all__ = [
    "Client",
    "ConstantCredit",
    "GRPOCredit",
    "OpenAIClient",
    "RAECredit",
    "SelfPlayTrainer",
    "SelfPlayTrainerConfig",
    "Stage",
    "TrainingBatch",
    "load",
    "optim",
    "synchronous_training_loop",
    "training_loop",
]

__getattr__ = renamed_names(__name__, {"Trainer": "SelfPlayTrainer", "TrainerConfig": "SelfPlayTrainerConfig"})
