"""The embedded engine: scheduler, cache, runner, sampler."""

from typing import TYPE_CHECKING

from paceline.util.lazy_import import lazily

if TYPE_CHECKING:
    from paceline.inference.engine.embedded import EmbeddedEngine

__all__ = ["EmbeddedEngine"]

__getattr__ = lazily(__name__, {"embedded": __all__})
