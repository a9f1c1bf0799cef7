"""The torch trainer: samples in, new weights out, all of it on a thread of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_world_size
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, encode
from paceline.model import Adapter, WeightUpdate, fingerprint, trainable
from paceline.model.adapters import trained_adapter
from paceline.model.bits import MASK
from paceline.model.saving import writing
from paceline.trainer import checkpoint
from paceline.trainer.base import StepReport, TrainerError
from paceline.trainer.export import export
from paceline.trainer.gae import cut
from paceline.trainer.layout import local
from paceline.trainer.learner import Learner
from paceline.trainer.loss import Sums
from paceline.trainer.noise import noise, restore_noise
from paceline.trainer.peak import peak_bytes


class TorchTrainer:
    """Trains a Hugging Face causal LM, or the adapters injected into it.

    All work runs on one thread of its own, so that the event loop goes on admitting rollouts while a batch trains. With
    a process group each rank brings samples of its own, or none, and all make the same update; all must call the same
    methods in the same order. What leaves the trainer, weights and exports, leaves from the first rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.Trainer,
        *,
        total_steps: int | None = None,
        fp32_head: bool = False,
        dumps: Path | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._config = c
        if group is not None and (size := get_world_size(group)) != c.parallel.ranks:
            raise TrainerError(f"trainer.parallel.ranks is {c.parallel.ranks}, but {size} ranks have met")
        self.learner = Learner(model, c, total_steps, fp32_head, group, device)
        self._dumps = dumps
        self._bad_steps = 0
        self._rolled_back: Counter[int] = Counter()
        """How often each step was bad, where that leads back to a checkpoint. No checkpoint undoes it."""
        self._fed: dict[int, Sample] = {}
        """Samples of the batch that is still being gathered."""
        self._fed_seconds = 0.0
        self.version = 0
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        self.max_tokens = min(c.max_sample_tokens or limit, limit)
        """What is left of a longer sample."""
        if c.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._thread = ThreadPoolExecutor(1, "paceline-trainer", initializer=self._set_threads)

    def _set_threads(self) -> None:
        if self.learner.device.type == "cuda":
            torch.cuda.set_device(self.learner.device)  # each thread has its own idea of the current one
        elif self._config.threads:
            torch.set_num_threads(self._config.threads)

    async def _run(self, work, *args):  # noqa: ANN001, ANN002, ANN202 - what work takes and gives
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def feed(self, samples: Sequence[Sample]) -> None:
        await self._run(self._feed, samples)

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        return await self._run(self._step, batch)

    async def weights(self) -> WeightUpdate:
        return await self._run(self._weights)

    async def pour(self, held: Mapping[str, Tensor]) -> WeightUpdate:
        """Copy the weights of now into tensors that an engine of this process holds, on every rank and one at a time,
        so that no second copy of the model is needed. The update names those very tensors, or the adapter."""
        return await self._run(self._pour, held)

    async def save(self, folder: Path) -> None:
        await self._run(self._save, folder)

    async def load(self, folder: Path) -> None:
        await self._run(self._load, folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        with writing():
            await self._run(self._export, folder, tokenizer)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    def _feed(self, samples: Sequence[Sample]) -> None:
        start = time.perf_counter()
        self._fed |= {id(sample): sample for sample in samples}  # held, so that no other sample gets its id
        self.learner.feed([cut(sample, self.max_tokens) for sample in samples], self.version)
        self._fed_seconds += time.perf_counter() - start

    def _step(self, batch: Sequence[Sample]) -> StepReport:
        start = time.perf_counter() - self._fed_seconds
        if lost := self._fed.keys() - {id(sample) for sample in batch}:
            raise TrainerError(f"{len(lost)} samples were fed and are not in the batch they were fed for")
        samples = [cut(sample, self.max_tokens) for sample in batch if id(sample) not in self._fed]
        metrics, trouble = self.learner.learn(samples, self.version)
        own = sum(min(len(sample), self.max_tokens) for sample in batch)
        tokens = float(self.learner.world.sum(torch.tensor([float(own)])))
        self._fed, self._fed_seconds = {}, 0.0
        if trouble:
            trouble = self._bad_step(trouble, batch)
        else:
            self._bad_steps = 0
        self.version += 1
        seconds = time.perf_counter() - start
        metrics["train_tokens/s"] = tokens / seconds
        metrics["optimizer_steps"] = float(self.learner.optimizer.steps)
        roll_back = bool(trouble) and self._config.on_bad_step == "roll_back"
        return StepReport(metrics, bool(trouble), trouble, roll_back, peak_bytes(self.learner.device))

    def backward(self, micro_batch: MicroBatch) -> Sums:
        """Add one micro-batch's gradient."""
        return self.learner.stepper.backward(micro_batch, self.version)

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
            return f"{trouble}; its optimizer step was left out{where}"
        self._bad_steps += 1
        if self._bad_steps >= most:
            raise TrainerError(f"{trouble} {self._bad_steps} times in a row: lower trainer.optimizer.lr{where}")
        return f"{trouble}; its optimizer step was left out{where}"

    def _dump(self, step: int, batch: Sequence[Sample]) -> str:
        """Write the batch for `paceline replay`; answers with where, as the end of a sentence."""
        if self._dumps is None:
            return ""
        rank = self.learner.world.rank
        path = self._dumps / f"bad-batch-{step:06d}{f'-rank{rank}' if rank else ''}.msgpack"
        try:
            self._dumps.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(batch))
        except OSError as error:
            return f"; the batch could not be written to {path}: {error}"
        return f"; the batch is in {path} (see it with `paceline replay {self._dumps.parent} --dump {step}`)"

    def _weights(self) -> WeightUpdate:
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()  # an engine's streams need not fall silent
        canary = self.learner.canary()
        adapter = trained_adapter(self._model)
        if adapter is None:
            return WeightUpdate(self.version, self._published(), canary=canary)
        tensors, scale = adapter
        return WeightUpdate(self.version, tensors if self._first else {}, Adapter("", scale), canary=canary)

    def _published(self) -> dict[str, Tensor]:
        """The weights that train, whole, on the first rank. Sharded ones are gathered one at a time, and beside a model
        that one GPU cannot hold they wait on the host."""
        layout, out = self.learner.layout, {}
        for name, parameter in trainable(self._model).items():
            whole = layout.whole(name, local(parameter.detach()))
            if self._first:
                out[name] = whole.cpu() if layout.lockstep else whole
        return out

    def _pour(self, held: Mapping[str, Tensor]) -> WeightUpdate:
        canary = self.learner.canary()
        adapter = trained_adapter(self._model)
        if adapter is not None:
            tensors, scale = adapter
            return WeightUpdate(self.version, tensors, Adapter("", scale), fingerprint(tensors.items()), canary)
        layout, poured, total = self.learner.layout, {}, 0
        for name, parameter in trainable(self._model).items():
            whole = layout.whole(name, local(parameter.detach()))
            poured[name] = held[name].copy_(whole)
            total += int(fingerprint([(name, whole)]), 16)  # of what was gathered: what is held must prove to be that
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()
        return WeightUpdate(self.version, poured, None, f"{total & MASK:016x}", canary)

    @property
    def _first(self) -> bool:
        return self.learner.ranks.all.rank == 0

    def _export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        layout = self.learner.layout
        state = layout.state(self._model, keep=self._first)
        if self._first:
            export(self._model, folder, tokenizer, state, layout.dtype)

    def _save(self, folder: Path) -> None:
        world = self.learner.ranks.all
        tensors = self.learner.tensors() | noise(self.learner.device, world.rank if world.group else None)
        state = {"version": self.version, "bad_steps": self._bad_steps} | self.learner.state()
        checkpoint.write(folder, tensors, state, world.group)

    def _load(self, folder: Path) -> None:
        world = self.learner.ranks.all
        tensors, state = checkpoint.read(folder, self.learner.room, world.group)
        names = {name.removeprefix("master/") for name in tensors if name.startswith("master/")}
        if names != self.learner.optimizer.masters.keys():
            raise TrainerError(f"checkpoint {folder} belongs to another model, or to another LoRA setting")
        self.learner.load(tensors, state)
        restore_noise(tensors, self.learner.device, world.rank)
        self.version, self._bad_steps = state["version"], state["bad_steps"]
        self._fed, self._fed_seconds = {}, 0.0
