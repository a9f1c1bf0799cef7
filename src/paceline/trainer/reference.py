"""The KL reference of a policy: where it started, a snapshot of a while ago, or a running mean."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import trainer as config
from paceline.model import trainable
from paceline.trainer.optimizer import MasterAdamW
from paceline.trainer.preparing import check_base
from paceline.trainer.world import RankLayout, local


class KLReference:
    """The reference's values of the trainable tensors, put into the model for a forward pass and taken out again.

    The base under LoRA is the model with its adapters' second matrices at zero: nothing is kept. Everything else is one
    copy of the trainable tensors, on the CPU with `offload`; while it scores, the policy's own wait beside it. Of a
    sharded model all of this is this rank's part.
    """

    def __init__(self, model: PreTrainedModel, c: config.KLConfig, layout: RankLayout) -> None:
        self._config, self._layout = c, layout
        self._parameters = {name: local(p.detach()) for name, p in trainable(model).items()}
        self._adapters = hasattr(model, "peft_config")
        self._tensors = {} if self._adapters_off else {name: self._copy(p) for name, p in self._parameters.items()}

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model computes as the reference inside."""
        replaced = dict(self._replacements())
        with torch.no_grad():
            held = {name: self._aside(self._parameters[name]) for name in replaced}
            try:
                for name, tensor in replaced.items():
                    self._parameters[name].copy_(tensor)
                yield
            finally:
                for name, tensor in held.items():
                    self._parameters[name].copy_(tensor)

    @torch.no_grad()
    def follow(self, version: int, optimizer: MasterAdamW) -> None:
        """After a batch: take the snapshot that is due, or move the mean. Masters hold what half precision loses."""
        c = self._config
        if c.reference == "snapshot" and version % c.every == 0:
            for name, parameter in self._parameters.items():
                self._tensors[name].copy_(parameter)
        elif c.reference == "ema":
            for name, master in optimizer.masters.items():
                self._tensors[name].lerp_(master.to(self._tensors[name].device), 1 - c.decay)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The tensors a checkpoint keeps. The base is loaded with the model, so its fingerprint is enough."""
        if self._config.reference == "base":
            return {}
        return {name: self._layout.like(name, tensor) for name, tensor in self._tensors.items()}

    def base_fingerprint(self) -> str:
        """Names the tensors the run started from; empty where a checkpoint keeps them, or where they are frozen."""
        return self._layout.fingerprint(self._tensors) if self._config.reference == "base" else ""

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], base: str) -> None:
        """Back to a checkpoint's. One written without a reference starts it at the weights just loaded."""
        if self._config.reference != "base":
            for name, parameter in self._parameters.items():
                self._tensors[name].copy_(local(tensors.get(name, parameter)))
        elif base:
            check_base(base, self.base_fingerprint())

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _adapters_off(self) -> bool:
        return self._adapters and self._config.reference == "base"

    def _replacements(self) -> Iterator[tuple[str, Tensor]]:
        if not self._adapters_off:
            yield from self._tensors.items()
            return
        for name, parameter in self._parameters.items():
            if ".lora_B." in name:
                yield name, torch.zeros_like(parameter)

    def _copy(self, parameter: Tensor) -> Tensor:
        mean, dtype = self._config.reference == "ema", self._layout.narrow(parameter)
        return self._aside(parameter).to(torch.float32 if mean and dtype.itemsize < 4 else dtype)

    def _aside(self, parameter: Tensor) -> Tensor:
        return parameter.to("cpu" if self._config.offload else parameter.device, copy=True)
