"""Which model names an engine answers to, and what stands behind each."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.inference.engine.sequence import Family

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
        """These hold other weights from now on, which nobody has proved yet."""
        self.versions |= dict.fromkeys(models, version)
        self.weights |= {model: {} for model in models}
        self.base_version = self.versions[BASE]

    def family(self, model: str) -> Family:
        """What tells keys and values of these weights from all others."""
        return (self.slots[model], self.versions[model], self.base_version)

    @property
    def adapters(self) -> dict[str, int]:
        """Named adapters with their versions."""
        return {name: version for name, version in self.versions.items() if name not in (POLICY, BASE)}
