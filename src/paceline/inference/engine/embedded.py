"""The engine that runs in this process, with torch: on a CPU or a GPU."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from paceline.config import inference
from paceline.inference.base import Grammar
from paceline.inference.engine.build import build
from paceline.inference.engine.engine import DecodingEngine
from paceline.inference.engine.sequence import Guide
from paceline.model import set_cpu_threads
from paceline.model.background_compile import BackgroundCompile


class EmbeddedEngine(DecodingEngine):
    """Serves a Hugging Face model from this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: inference.Engine,
        *,
        deterministic: bool = False,
        fp32_head: bool = False,
        version: int = 0,
        lora_targets: list[str] | str = "all-linear",
        grammars: Callable[[Grammar], Guide] | None = None,
        background: BackgroundCompile | None = None,
        steps: int | None = None,
    ) -> None:
        """`background` makes compiled code beside the engine where `compile` is "auto"; without it `auto` stays
        uncompiled. `steps` is how many weight updates are to come, where that is known."""
        parts = build(model, config, deterministic, fp32_head, version, lora_targets, background, steps)
        super().__init__(parts, config, grammars)
        self._threads = config.threads if model.device.type == "cpu" else None

    @contextmanager
    def _place(self) -> Generator[None]:
        if self._threads:
            set_cpu_threads(self._threads)
        with torch.inference_mode(), self._runner.place():
            yield
