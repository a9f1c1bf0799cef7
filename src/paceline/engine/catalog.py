"""Maps model names to the adapter slots and versions an engine serves, and validates requests."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.engine.base import GenerateRequest
from paceline.engine.sequence import Family
from paceline.errors import RequestError, UnknownModel

POLICY = ""
BASE = "base"
"""The name of the plain base, beside a policy that is an adapter."""
BROKEN = -1
"""The version of weights that are no version: an update broke off while they were written."""


@dataclass(slots=True)
class Catalog:
    """The policy, the base, and adapters by name."""

    slots: dict[str, int] = field(default_factory=lambda: {POLICY: 0, BASE: 0})
    """Adapter slot of each model; 0 for none."""
    versions: dict[str, int] = field(default_factory=lambda: {POLICY: 0, BASE: 0})
    base_version: int = 0
    weights: dict[str, dict[int, str]] = field(default_factory=lambda: {POLICY: {}, BASE: {}})
    """Version and fingerprint of what each model holds, as far as they were proved: of an adapter, its own tensors.
    Replaced, never changed, so that all completions of the same weights share one."""

    def renew(self, models: Iterable[str], version: int) -> None:
        """These hold other weights from now on, which are not proved yet."""
        self.versions |= dict.fromkeys(models, version)
        self.weights |= {model: {} for model in models}
        self.base_version = self.versions[BASE]

    def family(self, model: str) -> Family:
        """Identifies the weights that keys and values are computed with."""
        return (self.slots[model], self.versions[model], self.base_version)

    @property
    def adapters(self) -> dict[str, int]:
        """Named adapters with their versions."""
        return {name: version for name, version in self.versions.items() if name not in (POLICY, BASE)}


MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-20
INT64 = (1 << 63) - 1


def check(request: GenerateRequest, catalog: Catalog, longest_prompt: int, vocabulary: int) -> None:
    """Raises for the first thing that is wrong."""
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if prompt > longest_prompt:
        raise RequestError(f"the prompt has {prompt} tokens, but the context has room for {longest_prompt}")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
        raise RequestError(f"the prompt holds token ids outside the vocabulary (0 to {vocabulary - 1})")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least one")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestError(f"temperature is {request.temperature}: give a number from 0 on")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError(f"temperature is {request.temperature}, too small to divide by: give 0 for greedy")
    if not 0 < request.top_p <= 1 or not 0 <= request.top_k <= INT64:
        raise RequestError("top_p must be above 0 and at most 1, top_k 0 or more")
    if not -INT64 - 1 <= request.noise <= INT64:
        raise RequestError("the noise key must fit 64 bits: make it with noise_key")
    if not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {request.top_logprobs}: at most {MAX_TOP_LOGPROBS} are given")
    if request.model not in catalog.versions:
        served = ", ".join(sorted(catalog.adapters)) or "none"
        raise UnknownModel(f"no adapter `{request.model}` is loaded; loaded are: {served}")
