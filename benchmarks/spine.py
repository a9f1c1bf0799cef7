"""Sampling, packed training and a GRPO step against peers, on this machine, in one run.

  engine    useful tokens/s of 64 clients asking 512 requests of mixed length, against padded `transformers` generate in
            batches of 64 in arrival order
  trainer   useful tokens/s of a packed step on mixed lengths, against a padded step with full logits
  step      seconds of a synchronous GRPO step (16 prompts x 8, quickstart model), against TRL's GRPOTrainer with the
            same model, rows and optimizer; needs the `bench` extra

Ratios count; absolute figures are this machine's. `make bench` installs what is needed and runs it.
"""

import asyncio
import contextlib
import io
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Read by OpenMP when torch is loaded. Many runs share this process, and a team of threads that waits must not spin on a
# core another one needs. It holds for both sides alike.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bars import Row, alternate, arguments, finish
from paceline import RunConfig, train
from paceline.config import CheckpointConfig, EvalConfig, FiltersConfig, RecordConfig, inference, trainer
from paceline.config.env import ReverseTextConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import ModelConfig
from paceline.data import Sample, Ticket
from paceline.engine import EmbeddedEngine, GenerateRequest
from paceline.envs.reverse_text import ReverseText as Environment
from paceline.model import avoid_onednn_on_arm, load_model, resolve, short_switch_interval
from paceline.trainer import TorchTrainer

QUICKSTART = "paceline:quickstart"
CLIENTS, REQUESTS = 64, 512
THREADS = torch.get_num_threads()


def plain_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve(QUICKSTART), dtype=torch.float32)


# -- engine ---------------------------------------------------------------------------------------------------------


def workload(seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 48 tokens, replies of 8 to 128: the spread an RL run sees."""
    rng = random.Random(seed)
    return [([rng.randrange(10, 90) for _ in range(rng.randint(8, 48))], rng.randint(8, 128)) for _ in range(REQUESTS)]


def engine_rate(work: list[tuple[list[int], int]]) -> float:
    """A closed loop: each of the clients sends its next request when the last one is answered."""
    config = inference.EngineConfig(max_running=CLIENTS, threads=THREADS)
    engine = EmbeddedEngine(load_model(ModelConfig(name=QUICKSTART)), config)
    engine.start()
    queue = [GenerateRequest(prompt_ids=tuple(p), max_tokens=n, noise=i) for i, (p, n) in enumerate(work)][::-1]

    async def client() -> int:
        tokens = 0
        while queue:
            tokens += len((await engine.generate(queue.pop())).token_ids)
        return tokens

    async def load() -> float:
        await engine.generate(GenerateRequest(prompt_ids=(1, 2, 3), max_tokens=4))
        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))
        assert tokens == sum(n for _, n in work)
        return tokens / (time.perf_counter() - start)

    with avoid_onednn_on_arm(torch.float32), short_switch_interval():
        rate = asyncio.run(load())
    engine.close()
    return rate


@torch.inference_mode()
def generate_rate(work: list[tuple[list[int], int]]) -> float:
    """Batches in arrival order, prompts padded on the left; every request waits for the longest reply."""
    model = plain_model()
    start = time.perf_counter()
    for at in range(0, len(work), CLIENTS):
        batch = work[at : at + CLIENTS]
        width = max(len(p) for p, _ in batch)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
        longest = max(n for _, n in batch)
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=longest, min_new_tokens=longest,
            pad_token_id=0,
        )  # fmt: skip
    return sum(n for _, n in work) / (time.perf_counter() - start)


# -- trainer --------------------------------------------------------------------------------------------------------


def samples(seed: int = 0, count: int = 128) -> list[Sample]:
    """Mixed lengths, a long tail: most short, some near the context's end."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.0, 0.7, count), 12, 500).astype(int)
    return [_sample(rng, int(n), i) for i, n in enumerate(lengths)]


def _sample(rng: np.random.Generator, length: int, number: int) -> Sample:
    mask = np.arange(length) >= length // 3
    return Sample(
        token_ids=rng.integers(10, 90, length),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        temperatures=np.ones(length),
        logprobs=np.where(mask, -2.0, 0.0),
        advantages=np.where(mask, rng.normal(), 0.0),
        ticket=Ticket(number, "bench", 0, number, number),
    )


def packed_rate(batch: list[Sample]) -> float:
    c = trainer.TrainerConfig(threads=THREADS, optimizer=trainer.OptimizerConfig(lr=1e-6), loss=trainer.PPOConfig())
    ours = TorchTrainer(load_model(ModelConfig(name=QUICKSTART)), c)
    with avoid_onednn_on_arm(torch.float32), short_switch_interval():
        asyncio.run(ours.step(batch[:8]))
        start = time.perf_counter()
        asyncio.run(ours.step(batch))
        seconds = time.perf_counter() - start
    ours.close()
    return sum(map(len, batch)) / seconds


def padded_rate(batch: list[Sample], width: int = 16) -> float:
    """The plain way: micro-batches of 16 in arrival order, padded to their longest, full logits, the same loss."""
    model = plain_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    trained = sum(int(s.loss_mask.sum()) for s in batch)

    def step(part: list[Sample]) -> None:
        longest = max(map(len, part))

        def padded(name: str) -> torch.Tensor:
            return torch.stack([torch.from_numpy(np.pad(getattr(s, name), (0, longest - len(s)))) for s in part])

        ids, mask = padded("token_ids"), padded("loss_mask")[:, 1:]
        attention = torch.stack([(torch.arange(longest) < len(s)).long() for s in part])
        logits = model(ids, attention_mask=attention).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - padded("logprobs")[:, 1:]).exp()
        advantages = padded("advantages")[:, 1:]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        ((loss * mask).sum() / trained).backward()

    step(batch[:8])
    optimizer.zero_grad()
    start = time.perf_counter()
    for at in range(0, len(batch), width):
        step(batch[at : at + width])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(map(len, batch)) / (time.perf_counter() - start)


# -- a whole step ---------------------------------------------------------------------------------------------------

PROMPTS, GROUP, STEPS, MAX_TOKENS, LR = 16, 8, 12, 16, 1e-3


def our_step_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            runs=folder,
            steps=STEPS,
            batch_size=PROMPTS * GROUP,
            group_size=GROUP,
            staleness=0,
            model=ModelConfig(name=QUICKSTART),
            engine=inference.EngineConfig(threads=THREADS),
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
            trainer=trainer.TrainerConfig(
                optimizer=trainer.OptimizerConfig(lr=LR, betas=(0.9, 0.999)), loss=trainer.PPOConfig()
            ),
            env=[ReverseTextConfig()],
            filters=FiltersConfig(zero_advantage=False),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
            record=RecordConfig(rollouts=0),
        )
        result = train(config, quiet=True)
    assert result.outcome.status == "finished", result.outcome.message
    return statistics.median(line["time/step"] for line in result.metrics[2:])


def trl_step_seconds() -> float:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    environment = Environment(ReverseTextConfig())
    rows = [{"prompt": row["messages"], "answer": row["answer"]} for row in environment.examples("train")]

    def reward(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [environment.grade(text, wanted).rewards["policy"] for text, wanted in zip(texts, answer, strict=True)]

    class Times(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_end(self, args, state, control, **_):
            self.marks.append(time.perf_counter())

    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP, max_completion_length=MAX_TOKENS, temperature=1.0, beta=0.0, learning_rate=LR,
            max_steps=STEPS, lr_scheduler_type="constant", report_to="none", save_strategy="no", logging_steps=1000,
            disable_tqdm=True, scale_rewards="none", gradient_checkpointing=False,
        )  # fmt: skip
        peer = GRPOTrainer(
            model=plain_model(),
            processing_class=AutoTokenizer.from_pretrained(resolve(QUICKSTART)),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[times],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            peer.train()
    return statistics.median(np.diff(times.marks)[1:])


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs, in turn")
    options = parser.parse_args()
    rows = []
    work, batch = workload(), samples()
    ours, peer = alternate(options.rounds, lambda: engine_rate(work), lambda: generate_rate(work))
    rows.append(Row("engine, 64 clients, mixed lengths", "tok/s", ours, peer, "generate, padded", ours / peer, 2.0))
    ours, peer = alternate(options.rounds, lambda: packed_rate(batch), lambda: padded_rate(batch))
    rows.append(Row("trainer, mixed lengths", "tok/s", ours, peer, "padded, full logits", ours / peer, 1.5))
    ours, peer = alternate(options.rounds, our_step_seconds, trl_step_seconds)
    rows.append(Row("synchronous GRPO step, 16 x 8", "s", ours, peer, "TRL GRPOTrainer", peer / ours, 2.0))
    lengths = [len(s) for s in batch]
    extra = {"threads": THREADS, "trainer_lengths": [min(lengths), max(lengths)]}
    return finish("spine", rows, options.json, **extra)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
