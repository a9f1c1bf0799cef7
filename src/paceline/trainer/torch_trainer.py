"""The torch trainer: samples in, one optimizer step, new weights out."""

import asyncio
import errno
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import trainer as config
from paceline.data import MicroBatch, Sample, encode, fold, pack
from paceline.model import Adapter, WeightUpdate, trainable
from paceline.model.adapters import trained_adapter
from paceline.model.canary import make_canary
from paceline.trainer.base import StepReport, TrainerError
from paceline.trainer.export import export
from paceline.trainer.forward import Forward
from paceline.trainer.loss import Loss, Sums, Tokens
from paceline.trainer.optimizer import MasterAdamW


class TorchTrainer:
    """Trains a Hugging Face causal LM, or the adapters injected into it.

    All work runs on one thread of its own, so that the event loop goes on admitting rollouts while a batch trains.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        c: config.Trainer,
        *,
        total_steps: int | None = None,
        fp32_head: bool = False,
        dumps: Path | None = None,
    ) -> None:
        self._model = model
        self._config = c
        self._policy = Forward(model, fp32_head, compiled=c.compile and model.device.type == "cuda")
        self._loss = Loss(c.loss)
        self._optimizer = MasterAdamW(trainable(model), c.optimizer, total_steps)
        self._dumps = dumps
        self._bad_steps = 0
        self.version = 0
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        self._max_tokens = min(c.max_sample_tokens or limit, limit)
        if c.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._thread = ThreadPoolExecutor(1, "paceline-trainer", initializer=self._set_threads)

    def _set_threads(self) -> None:
        if self._config.threads and self._model.device.type == "cpu":
            torch.set_num_threads(self._config.threads)

    async def _run(self, work, *args):  # noqa: ANN001, ANN002, ANN202 - what work takes and gives
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def step(self, batch: Sequence[Sample]) -> StepReport:
        return await self._run(self._step, batch)

    async def weights(self) -> WeightUpdate:
        return await self._run(self._weights)

    async def save(self, folder: Path) -> None:
        await self._run(self._save, folder)

    async def load(self, folder: Path) -> None:
        await self._run(self._load, folder)

    async def export(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        await self._run(export, self._model, folder, tokenizer)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- on the trainer's thread ------------------------------------------------------------------------------------

    def _step(self, batch: Sequence[Sample]) -> StepReport:
        start = time.perf_counter()
        samples = [sample.truncated_to(self._max_tokens) for sample in batch]
        _check_credit(samples)
        scales = fold(samples, self._config.normalise, self._config.fixed_length)
        packs = pack(samples, scales, self._config.micro_batch_tokens)
        self._model.train()
        sums = [self.backward(micro_batch) for micro_batch in packs]
        self._model.eval()
        grad_norm = self._optimizer.clip()
        for other in sums[1:]:
            sums[0].add(other)
        metrics = sums[0].metrics() if sums else {}
        metrics |= {"grad_norm": float(grad_norm), "lr": self._optimizer.lr, "micro_batches": float(len(packs))}
        skipped = not (torch.isfinite(grad_norm).item() and all(map(_finite, metrics.values())))
        self._skip(batch) if skipped else self._update()
        self.version += 1
        seconds = time.perf_counter() - start
        metrics |= {"train_tokens/s": sum(map(len, packs)) / seconds, "optimizer_steps": float(self._optimizer.steps)}
        return StepReport(metrics, skipped)

    def backward(self, micro_batch: MicroBatch) -> Sums:
        """Add one micro-batch's gradient."""
        tokens, anchor = self._forward(micro_batch)
        loss, sums = self._loss(tokens, self.version)
        # The anchor gives every parameter a gradient of zero even when no token trains.
        (loss + anchor).backward()
        self._optimizer.gather()
        return sums

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tokens, Tensor]:
        m = {name: getattr(micro_batch, name) for name in _STREAMS}
        trained = ((m["rl_scale"] != 0) | (m["ce_scale"] != 0) | (m["ref_kl_scale"] != 0)).nonzero()[0]
        logprobs, entropy, anchor = self._policy.logprobs(micro_batch, self._policy.send(trained), entropy=True)
        assert entropy is not None
        at = {name: self._policy.send(stream[trained]) for name, stream in m.items()}
        return Tokens(logprobs=logprobs, behaviour=at.pop("logprobs"), entropy=entropy, **at), anchor

    def _update(self) -> None:
        self._bad_steps = 0
        self._optimizer.step()

    def _skip(self, batch: Sequence[Sample]) -> None:
        self._optimizer.zero()
        self._bad_steps += 1
        where = ""
        if self._dumps is not None:
            self._dumps.mkdir(parents=True, exist_ok=True)
            path = self._dumps / f"bad-batch-{self.version + 1:06d}.msgpack"
            path.write_bytes(encode(batch))
            where = f"; the last such batch is in {path}"
        if self._bad_steps >= self._config.max_bad_steps:
            raise TrainerError(
                f"the gradient was not finite {self._bad_steps} times in a row: lower trainer.optimizer.lr{where}"
            )

    def _weights(self) -> WeightUpdate:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        canary = make_canary(self._model, self._policy.head)
        adapter = trained_adapter(self._model)
        if adapter is None:
            tensors = {name: p.detach() for name, p in trainable(self._model).items()}
            return WeightUpdate(self.version, tensors, canary=canary)
        tensors, scale = adapter
        return WeightUpdate(self.version, tensors, Adapter("", scale), canary=canary)

    def _save(self, folder: Path) -> None:
        tensors = {name: t.contiguous().cpu() for name, t in self._optimizer.tensors().items()}
        tensors["rng"] = torch.get_rng_state()
        try:
            save_file(tensors, folder / "trainer.safetensors")
        except SafetensorError as error:  # it wraps a full disk into an error of its own
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
        state = {"version": self.version, "optimizer_steps": self._optimizer.steps, "bad_steps": self._bad_steps}
        (folder / "trainer.json").write_text(json.dumps(state), encoding="utf-8")

    def _load(self, folder: Path) -> None:
        state = json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "trainer.safetensors")
        names = {name.removeprefix("master/") for name in tensors if name.startswith("master/")}
        if names != self._optimizer.masters.keys():
            raise TrainerError(f"checkpoint {folder} belongs to another model, or to another LoRA setting")
        self._optimizer.load(tensors, state["optimizer_steps"])
        torch.set_rng_state(tensors["rng"])
        self.version, self._bad_steps = state["version"], state["bad_steps"]


_STREAMS = (
    "logprobs",
    "versions",
    "advantages",
    "ref_logprobs",
    "rl_scale",
    "ce_scale",
    "ref_kl_scale",
)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _check_credit(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.advantages is None and sample.rl.any():
            raise TrainerError(f"{sample.where}: tokens train with rl but carry no advantages")
