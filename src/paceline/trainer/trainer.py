"""The trainer in this process: runs a learner on a thread of its own, and handles bad steps."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, encode
from paceline.errors import TrainerError
from paceline.model.dtypes import dtype_name
from paceline.trainer.backend import PolicyBackend, StepReport
from paceline.trainer.checkpoint import mismatch_message, strip_prefix
from paceline.trainer.learner import Learner
from paceline.trainer.loss import LossStats
from paceline.weights.tensors import raise_os_errors
from paceline.weights.update import WeightUpdate


def truncate(sample: Sample, limit: int) -> Sample:
    """The sample's first tokens. What it earned later it earns where it is cut: most often the whole reward lies on its
    last token, and a critic would learn that long samples are worth nothing."""
    short = sample.truncated_to(limit)
    if short is sample or sample.rewards is None:
        return short
    rewards = sample.rewards[:limit].copy()
    rewards[-1] += sample.rewards[limit:].sum()
    return short.with_streams(rewards=rewards)


class LocalTrainer:
    """The `Trainer` of a policy in this process, whichever library computes it.

    All work runs on one thread of its own, so that the event loop goes on admitting rollouts while a batch trains.
    """

    def __init__(
        self,
        policy: PolicyBackend,
        c: config.TrainerConfig,
        model: PreTrainedConfig,
        total_steps: int | None = None,
        dumps: Path | None = None,
    ) -> None:
        self.policy, self.learner, self._config = policy, Learner(c, policy, total_steps), c
        self._dumps = dumps
        self._bad_steps = 0
        self._rolled_back: Counter[int] = Counter()
        """How often each step was bad, where that leads back to a checkpoint. No checkpoint undoes it."""
        self._fed: list[Sample] = []
        """Samples of the batch that is still being gathered, held so that no other sample gets the id of one."""
        self._fed_seconds = 0.0
        self.version = 0
        limit = getattr(model.get_text_config(), "max_position_embeddings", None) or 1 << 20
        self.max_tokens = min(c.max_sample_tokens or limit, limit)
        """Longer samples are cut to this length."""
        self._thread = ThreadPoolExecutor(1, "paceline-trainer", initializer=policy.on_thread_start)

    async def _run(self, work, *args):  # noqa: ANN001, ANN002, ANN202 - what work takes and gives
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def feed(self, samples: Sequence[Sample]) -> None:
        await self._run(self._feed, samples)

    async def accumulate(self, samples: Sequence[Sample]) -> int:
        """Feed samples and run all of their micro-batches at once; answers with how many samples fed so far count.
        Those of a micro-batch that `clip_skip_scope = "micro_batch"` left out do not."""
        return await self._run(self._feed, samples, True)

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        return await self._run(self._step, batch)

    async def weights(self) -> WeightUpdate:
        return await self._run(lambda: self.policy.weights(self.version))

    async def save(self, folder: Path) -> None:
        await self._run(self._save, folder)

    async def load(self, folder: Path) -> None:
        await self._run(self._load, folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        with raise_os_errors():
            await self._run(self.policy.export, folder, tokenizer)

    def close(self) -> None:
        self.policy.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    def _feed(self, samples: Sequence[Sample], whole: bool = False) -> int:
        start = time.perf_counter()
        count = self.learner.feed([truncate(sample, self.max_tokens) for sample in samples], self.version, whole)
        self._fed += samples
        self._fed_seconds += time.perf_counter() - start
        return count

    def _step(self, batch: Sequence[Sample]) -> StepReport:
        begun = time.perf_counter()
        start = begun - self._fed_seconds
        places = {id(sample): place for place, sample in enumerate(batch)}
        fed = [id(sample) for sample in self._fed]
        known = set(fed)
        if lost := known - places.keys():
            raise TrainerError(f"{len(lost)} samples were fed and are not in the batch they were fed for")
        rest = [place for place, sample in enumerate(batch) if id(sample) not in known]
        samples = [truncate(batch[place], self.max_tokens) for place in rest]
        metrics, trouble, scores = self.learner.learn(samples, self.version)
        if fed:  # numbered as they were fed, and the rest after them
            scores = scores.renumbered([*(places[key] for key in fed), *rest])
        own = sum(min(len(sample), self.max_tokens) for sample in batch)
        tokens = float(self.policy.sum(np.array([own]))[0])
        self._fed, self._fed_seconds = [], 0.0
        if trouble:
            trouble = self._bad_step(trouble, batch)
        else:
            self._bad_steps = 0
        self.version += 1
        metrics["train_tokens/s"] = tokens / (time.perf_counter() - start)
        metrics |= self.policy.device_load()
        metrics["optimizer_steps"] = float(self.learner.optimizer.schedule.steps)
        roll_back = bool(trouble) and self._config.on_bad_step == "roll_back"
        report = StepReport(metrics, bool(trouble), trouble, roll_back, self.policy.peak_bytes(), scores)
        self.policy.after_step(time.perf_counter() - begun, self.version)
        return report

    def backward(self, micro_batch: MicroBatch) -> LossStats:
        """Add one micro-batch's gradient."""
        return self.learner.backward(micro_batch, self.version)

    def _bad_step(self, trouble: str, batch: Sequence[Sample]) -> str:
        """Keep the batch, and stop the run if the run file says so; answers with the sentence to tell."""
        step, most, how = self.version + 1, self._config.max_bad_steps, self._config.on_bad_step
        where = self._dump(step, batch)
        if how == "stop":
            raise TrainerError(f"step {step}: {trouble}, and trainer.on_bad_step is `stop`{where}")
        if how == "roll_back":
            self._rolled_back[step] += 1
            if self._rolled_back[step] >= most:
                raise TrainerError(f"step {step} was bad {most} times, each after a roll-back: {trouble}{where}")
        else:
            self._bad_steps += 1
            if self._bad_steps >= most:
                raise TrainerError(f"{trouble} {self._bad_steps} times in a row: lower trainer.optimizer.lr{where}")
        return f"{trouble}; its optimizer step was left out{where}"

    def _dump(self, step: int, batch: Sequence[Sample]) -> str:
        """Write the batch for `paceline replay`; answers with where, as the end of a sentence."""
        if self._dumps is None:
            return ""
        rank = self.policy.rank
        path = self._dumps / f"bad-batch-{step:06d}{f'-rank{rank}' if rank else ''}.msgpack"
        try:
            self._dumps.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(batch))
        except OSError as error:
            return f"; the batch could not be written to {path}: {error}"
        return f"; the batch is in {path} (see it with `paceline replay {self._dumps.parent} --dump {step}`)"

    def _save(self, folder: Path) -> None:
        """Counters, and the type the model computes in: a run resumed on other hardware keeps it."""
        state = {"version": self.version, "bad_steps": self._bad_steps, "dtype": dtype_name(self.policy.dtype)}
        self.policy.save(folder, self.learner.tensors(), state | self.learner.state())

    def _load(self, folder: Path) -> None:
        tensors, state = self.policy.read(folder)
        saved = strip_prefix("master/", tensors)
        own = {name: tuple(master.shape) for name, master in self.learner.optimizer.masters.items()}
        parts = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in saved.items()}  # where sharded
        if {name: tuple(part.shape) for name, part in parts.items()} != own:
            raise TrainerError(mismatch_message(folder))
        self.learner.load(tensors, state)
        self.policy.restore_random(tensors, state)
        self.version, self._bad_steps = state["version"], state["bad_steps"]
        self._fed, self._fed_seconds = [], 0.0
