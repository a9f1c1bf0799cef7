"""The model a policy is held near, in mlx, where keeping a copy costs nothing until the policy moves on."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from paceline.config import trainer as config
from paceline.model.weights import fingerprint
from paceline.trainer.mlx.optimizer import MlxAdamW
from paceline.trainer.mlx.parameters import ADAPTER, Parameters
from paceline.trainer.shaping import check_base


class Reference:
    """The reference's values of the trainable arrays, put into the model for a forward pass and taken out again.

    The base under LoRA is the model with its adapters' second matrices at zero: nothing is kept.
    """

    def __init__(self, parameters: Parameters, c: config.KL) -> None:
        self._parameters, self._config = parameters, c
        now = parameters.now()
        self._adapters_off = c.reference == "base" and all(name.endswith(ADAPTER) for name in now)
        self._tensors = {} if self._adapters_off else {name: self._kept(p) for name, p in now.items()}
        mx.eval(self._tensors)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model computes as the reference inside."""
        held = self._parameters.now()
        off = {name: mx.zeros_like(p) for name, p in held.items() if ".lora_B." in name}
        self._parameters.put(off if self._adapters_off else self._tensors)
        try:
            yield
        finally:
            self._parameters.put(held)

    def follow(self, version: int, optimizer: MlxAdamW) -> None:
        """After a batch: take the snapshot that is due, or move the mean. Masters hold what half precision loses."""
        c = self._config
        if c.reference == "snapshot" and version % c.every == 0:
            self._tensors = self._parameters.now()
        elif c.reference == "ema":
            for name, master in optimizer.masters.items():
                self._tensors[name] += (1 - c.decay) * (master - self._tensors[name])
                mx.eval(self._tensors[name])

    def tensors(self) -> dict[str, mx.array]:
        """What a checkpoint keeps. The base is loaded with the model, so its fingerprint is enough."""
        return {} if self._config.reference == "base" else dict(self._tensors)

    def base_fingerprint(self) -> str:
        """Names the tensors the run started from; empty where a checkpoint keeps them."""
        return fingerprint(self._tensors.items()) if self._config.reference == "base" else ""

    def load(self, tensors: Mapping[str, mx.array], base: str) -> None:
        """Back to a checkpoint's. One written without a reference starts it at the weights just loaded."""
        if self._config.reference == "base":
            check_base(base, self.base_fingerprint())
            return
        now = self._parameters.now()
        held = {name: tensors.get(name, p).astype(self._tensors[name].dtype) for name, p in now.items()}
        mx.eval(held)
        self._tensors = held

    def _kept(self, parameter: mx.array) -> mx.array:
        return parameter.astype(mx.float32) if self._config.reference == "ema" else parameter
