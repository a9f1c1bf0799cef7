"""The KL reference of a policy: where it started, a snapshot of a while ago, or a running mean."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import Sample
from paceline.trainer.base import TrainerError
from paceline.trainer.ops import zeros_like
from paceline.trainer.optimizer import MasterOptimizer
from paceline.weights.update import Array


class KLReference(ABC):
    """The reference's values of the trainable tensors, put into the model for a forward pass and taken out again.

    The base under LoRA is the model with its adapters' second matrices at zero: nothing is kept. Everything else is one
    copy of the trainable tensors. A subclass chooses the library.
    """

    def __init__(self, c: config.KLConfig, adapters: bool) -> None:
        self._config = c
        self._adapters_off = adapters and c.reference == "base"
        self._tensors = {} if self._adapters_off else {name: self._copy(p) for name, p in self._now().items()}

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model computes as the reference inside."""
        replaced = self._tensors
        if self._adapters_off:
            replaced = {name: zeros_like(p) for name, p in self._now().items() if ".lora_B." in name}
        held = self._aside(replaced)
        try:
            self._put(replaced)
            yield
        finally:
            self._put(held)

    def follow(self, version: int, optimizer: MasterOptimizer) -> None:
        """After a batch: take the snapshot that is due, or move the mean. Masters hold what half precision loses."""
        c = self._config
        if c.reference == "snapshot" and version % c.every == 0:
            self._keep(self._now())
        elif c.reference == "ema":
            for name, master in optimizer.masters.items():
                self._average(name, master, 1 - c.decay)

    def tensors(self) -> dict[str, Array]:
        """The tensors a checkpoint keeps. The base is loaded with the model, so its fingerprint is enough."""
        return {} if self._config.reference == "base" else dict(self._tensors)

    def base_fingerprint(self) -> str:
        """Names the tensors the run started from; empty where a checkpoint keeps them."""
        return self._fingerprint() if self._config.reference == "base" else ""

    def load(self, tensors: Mapping[str, Array], base: str) -> None:
        """Back to a checkpoint's; one without a reference starts it at the weights just loaded, and names no base."""
        if self._config.reference != "base":
            self._keep({name: tensors.get(name, p) for name, p in self._now().items()})
        elif base and base != self._fingerprint():
            raise TrainerError(
                "the KL reference is the model this run started from, but model.name now holds other weights: "
                "put the first ones back, or choose another trainer.kl.reference"
            )

    @abstractmethod
    def _now(self) -> dict[str, Array]:
        """The policy's trainable tensors."""

    @abstractmethod
    def _copy(self, parameter: Array) -> Array: ...

    @abstractmethod
    def _aside(self, names: Mapping[str, Array]) -> dict[str, Array]:
        """The policy's tensors of these names, safe from `_put`."""

    @abstractmethod
    def _put(self, tensors: Mapping[str, Array]) -> None:
        """Write tensors into the model."""

    @abstractmethod
    def _keep(self, tensors: Mapping[str, Array]) -> None:
        """Replace the reference's tensors."""

    @abstractmethod
    def _average(self, name: str, master: Array, weight: float) -> None: ...

    @abstractmethod
    def _fingerprint(self) -> str: ...


def shaped(sample: Sample, policy: NDArray, c: config.KLConfig) -> Sample:
    """K1 shaping: from the advantages, coef times the mean over the sampled tokens of log pi - log ref, clipped to
    +-kl_max. The policy here is what it was when the batch began, so nothing flows back through it."""
    mask, base = sample.loss_mask, sample.base_logprobs
    if sample.advantages is None or base is None or not mask.any():
        return sample
    k1 = float(np.mean(policy[mask].astype(np.float64) - base[mask]))
    penalty = np.float32(c.coef * np.clip(k1, -c.kl_max, c.kl_max))
    return sample.with_streams(advantages=sample.advantages - penalty * mask)
