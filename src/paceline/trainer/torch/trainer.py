"""The torch trainer: samples in, new weights out."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_world_size
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.data import Sample
from paceline.model import Adapter, WeightUpdate, fingerprint, set_cpu_threads, trainable
from paceline.model.background_compile import BackgroundCompile
from paceline.model.loading import trained_adapter
from paceline.trainer.base import StepReport, TrainerError
from paceline.trainer.torch import checkpoint
from paceline.trainer.torch.checkpoint import export
from paceline.trainer.torch.learner import TorchLearner
from paceline.trainer.torch.tuning import run_once
from paceline.trainer.torch.world import local
from paceline.trainer.trainer import ThreadedTrainer
from paceline.util.gc_tuning import freeze_more
from paceline.weights.update import MASK

CPU, GPU = "rng", "rng_cuda"


def rng_states(device: torch.device, rank: int | None = None) -> dict[str, Tensor]:
    """States of the random number generators; of one rank among several under its number."""
    end = "" if rank is None else f"/{rank}"
    on_gpu = {f"{GPU}{end}": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {f"{CPU}{end}": torch.get_rng_state()} | on_gpu


def restore_rng(tensors: Mapping[str, Tensor], device: torch.device, rank: int) -> None:
    """Back to a rank's states. A rank the checkpoint does not know draws from where another was, but not the same; one
    that another backend wrote has none."""
    known = [CPU] if CPU in tensors else [f"{CPU}/{i}" for i in range(sum(n.startswith(f"{CPU}/") for n in tensors))]
    if not known:
        return
    end = known[rank % len(known)].removeprefix(CPU)
    torch.set_rng_state(tensors[f"{CPU}{end}"].cpu())
    if device.type == "cuda" and f"{GPU}{end}" in tensors:
        torch.cuda.set_rng_state(tensors[f"{GPU}{end}"].cpu(), device)
    if rank >= len(known):
        torch.manual_seed(int(torch.randint(1 << 62, ())) + rank)


log = logging.getLogger(__name__)

REHEARSED_TOKENS = 8192
"""Of a rehearsal: torch compiles the norms apart for fewer than about 6,000 tokens of a 0.5B model."""


class TorchTrainer(ThreadedTrainer[TorchLearner]):
    """Trains a Hugging Face causal LM, or the adapters injected into it.

    With a process group each rank brings samples of its own, or none, and all make the same update; all must call the
    same methods in the same order. What leaves the trainer, weights and exports, leaves from the first rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.TrainerConfig,
        *,
        total_steps: int | None = None,
        fp32_head: bool = False,
        dumps: Path | None = None,
        group: ProcessGroup | None = None,
        device: torch.device | None = None,
        background: BackgroundCompile | None = None,
    ) -> None:
        """`background` makes compiled code beside the trainer where `compile` is "auto"; without it `auto` stays
        uncompiled on one device, and compiles at the first step on several ranks."""
        self._model = model
        self._background, self._total_steps = background, total_steps
        self._eager_seconds, self._eager_steps = 0.0, 0
        self._kept_code = False
        if group is not None and (size := get_world_size(group)) != c.parallel.ranks:
            raise TrainerError(f"trainer.parallel.ranks is {c.parallel.ranks}, but {size} ranks have met")
        compiled = c.compile is True or (c.compile == "auto" and group is not None)
        compiled |= background is not None and background.is_cached
        learner = TorchLearner(model, c, total_steps, fp32_head, group, device, compiled)
        super().__init__(learner, c, model.config, dumps)
        if c.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled and group is None and learner.device.type == "cuda":
            self._thread.submit(self._warm)

    def _begin(self) -> None:
        if self.learner.device.type == "cuda":
            torch.cuda.set_device(self.learner.device)  # each thread has its own idea of the current one
        elif self._config.threads:
            set_cpu_threads(self._config.threads)

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        super().close()

    async def copy_into(self, held: Mapping[str, Tensor]) -> WeightUpdate:
        """Copy the weights of now into tensors that an engine of this process holds, on every rank and one at a time,
        so that no second copy of the model is needed. The update names those very tensors, or the adapter."""
        return await self._run(self._copy_into, held)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    def _warm(self) -> None:
        """Compile while the engine starts and the first batch is sampled."""
        budget = self._config.micro_batch_tokens
        tokens = min(REHEARSED_TOKENS, budget) if isinstance(budget, int) else REHEARSED_TOKENS
        try:
            run_once(self.learner.forward, self._model, self._config, tokens)
        except RuntimeError as error:  # the first step meets it too, if it stays
            log.warning("compiling the trainer ahead of its first step failed: %s", error)
            return
        if self._background is not None:
            self._background.remember()
            self._background.switched()

    def _step(self, batch: Sequence[Sample]) -> StepReport:
        start, compiled = time.perf_counter(), self.learner.forward.is_compiled
        report = super()._step(batch)
        if self._background is not None and not compiled:
            self._consider_compiling(time.perf_counter() - start)
        elif compiled and not self._kept_code:  # the first step with compiled code has just made it
            self._kept_code = True
            freeze_more()
        return report

    def _consider_compiling(self, seconds: float) -> None:
        """After a step: have compiled code made if that pays, or switch to it if it is there."""
        assert self._background is not None
        self._eager_seconds += seconds
        self._eager_steps += 1
        remaining = None if self._total_steps is None else max(0, self._total_steps - self.version)
        self._background.consider(self._eager_seconds, self._eager_steps, remaining)
        if self._background.is_ready:
            self.learner.forward.compile()
            self._background.switched()

    def _weights(self) -> WeightUpdate:
        """The weights that train, whole, on the first rank. Sharded ones are gathered one at a time, and beside a model
        that one GPU cannot hold they wait on the host."""
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()  # an engine's streams need not fall silent
        canary = self.learner.canary()
        if (adapter := trained_adapter(self._model)) is not None:
            tensors, scale = adapter
            return WeightUpdate(self.version, tensors if self._first else {}, Adapter("", scale), canary=canary)
        out: dict[str, Tensor] = {}
        for name, whole in self._whole_weights():
            if self._first:
                out[name] = whole.cpu() if self.learner.layout.lockstep else whole
        return WeightUpdate(self.version, out, canary=canary)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trainable(self._model).items():
            yield name, self.learner.layout.whole(name, local(parameter.detach()))

    def _copy_into(self, held: Mapping[str, Tensor]) -> WeightUpdate:
        canary = self.learner.canary()
        if (adapter := trained_adapter(self._model)) is not None:
            tensors, scale = adapter
            return WeightUpdate(self.version, tensors, Adapter("", scale), fingerprint(tensors.items()), canary)
        copied, total = {}, 0
        for name, whole in self._whole_weights():
            copied[name] = held[name].copy_(whole)
            total += int(fingerprint([(name, whole)]), 16)  # of what was gathered: what is held must prove to be that
        if self.learner.device.type == "cuda":
            torch.cuda.current_stream(self.learner.device).synchronize()
        return WeightUpdate(self.version, copied, None, f"{total & MASK:016x}", canary)

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
        tensors = self.learner.tensors() | rng_states(self.learner.device, world.rank if world.group else None)
        checkpoint.write(folder, tensors, self._state(self.learner.layout.dtype), world.group)

    def _load(self, folder: Path) -> None:
        world = self.learner.ranks.all
        tensors, state = checkpoint.read(folder, self.learner.room, world.group)
        self._resume_from(folder, tensors, state)
        restore_rng(tensors, self.learner.device, world.rank)
