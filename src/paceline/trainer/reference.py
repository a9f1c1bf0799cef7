"""The KL reference of a policy: where it started, a snapshot of a while ago, or a running mean."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.config import trainer as config
from paceline.data import Sample
from paceline.errors import TrainerError
from paceline.trainer.terms import zeros_like
from paceline.weights.update import Array

if TYPE_CHECKING:
    from paceline.trainer.backend import Optimizer, TrainableTensors


class KLReference:
    """The reference's values of the trainable tensors, put into the model for a forward pass and taken out again.

    The base under LoRA is the model with its adapters' second matrices at zero: nothing is kept. Everything else is one
    copy of the trainable tensors: on the CPU with `offload`, and with it the policy's tensors while the model scores.
    """

    def __init__(self, c: config.KLConfig, parameters: "TrainableTensors") -> None:
        self._config, self._parameters = c, parameters
        self._adapters_off = parameters.adapters_only and c.reference == "base"
        kept = {} if self._adapters_off else parameters.current()
        self._tensors = {name: parameters.copy(p, wide=c.reference == "ema") for name, p in kept.items()}

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """The model computes as the reference inside."""
        replaced = self._tensors
        if self._adapters_off:
            replaced = {name: zeros_like(p) for name, p in self._parameters.current().items() if ".lora_B." in name}
        held = self._parameters.set_aside(replaced)
        try:
            self._parameters.put(replaced)
            yield
        finally:
            self._parameters.put(held)

    def follow(self, version: int, optimizer: "Optimizer") -> None:
        """After a batch: take the snapshot that is due, or move the mean. Masters hold what half precision loses."""
        c = self._config
        if c.reference == "snapshot" and version % c.every == 0:
            self._parameters.copy_into(self._tensors, self._parameters.current())
        elif c.reference == "ema":
            for name, master in optimizer.masters.items():
                self._parameters.average_into(self._tensors, name, master, 1 - c.decay)

    def tensors(self) -> dict[str, Array]:
        """The tensors a checkpoint keeps. The base is loaded with the model, so its fingerprint is enough."""
        kept = {} if self._config.reference == "base" else self._tensors
        return {name: self._parameters.for_checkpoint(name, tensor) for name, tensor in kept.items()}

    def base_fingerprint(self) -> str:
        """Names the tensors the run started from; empty where a checkpoint keeps them."""
        return self._parameters.fingerprint(self._tensors) if self._config.reference == "base" else ""

    def load(self, tensors: Mapping[str, Array], base: str) -> None:
        """Back to a checkpoint's; one without a reference starts it at the weights just loaded, and names no base."""
        if self._config.reference != "base":
            current = self._parameters.current()
            self._parameters.copy_into(self._tensors, {name: tensors.get(name, p) for name, p in current.items()})
        elif base and base != self.base_fingerprint():
            raise TrainerError(
                "the KL reference is the model this run started from, but model.name now holds other weights: "
                "put the first ones back, or choose another trainer.kl.reference"
            )


def subtract_kl(sample: Sample, policy: NDArray, c: config.KLConfig) -> Sample:
    """K1 shaping: from the advantages, coef times the mean over the sampled tokens of log pi - log ref, clipped to
    +-kl_max. The policy here is what it was when the batch began, so nothing flows back through it."""
    mask, base = sample.loss_mask, sample.kl_ref_logprobs
    if sample.advantages is None or base is None or not mask.any():
        return sample
    k1 = float(np.mean(policy[mask].astype(np.float64) - base[mask]))
    penalty = np.float32(c.coef * np.clip(k1, -c.kl_max, c.kl_max))
    return sample.with_streams(advantages=sample.advantages - penalty * mask)
