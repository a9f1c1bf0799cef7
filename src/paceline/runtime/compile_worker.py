"""Compiles a few layers of a run's model, so that the run itself finds compiled code on disk.

Started by `BackgroundCompile` with the run file and the model's config on standard input; prints a line for each piece.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.config import RunConfig
from paceline.data import Sample
from paceline.model import ATTENTION, attach_lora
from paceline.model.states import mix_by_plan
from paceline.model.support import without_dropout
from paceline.runtime.local import with_sections
from paceline.runtime.torch_parts import engine_for, torch_trainer
from paceline.util.child_process import end_with_parent

LAYERS = 2
"""Layers that stand for all: under LoRA the first one's input needs no gradient, the second one's does."""
TOKENS, SAMPLES = 512, 16


def truncate_layers(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config cut to its first layers: one of each kind, and two at least."""
    text = config.get("text_config") or config
    total = text["num_hidden_layers"]
    kinds = text.get("layer_types") or []
    layers = min(total, max(LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)), 0))
    per_layer = {key: value for key, value in text.items() if isinstance(value, list) and len(value) == total}
    cut = text | {key: value[:layers] for key, value in per_layer.items()} | {"num_hidden_layers": layers}
    return config | {"text_config": cut} if "text_config" in config else cut


def random_model(spec: dict[str, Any]) -> PreTrainedModel:
    """A model of the run's shape with a few layers and random weights."""
    config = AutoConfig.for_model(**truncate_layers(spec["model"]))
    device = torch.device("cuda", spec["device"]) if torch.cuda.is_available() else torch.device("cpu")
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec["dtype"]), attn_implementation=ATTENTION
        )
    mix_by_plan(model)
    without_dropout(model)
    return model.eval()


def compile_engine(spec: dict[str, Any], config: RunConfig) -> None:
    config = with_sections(config, engine={"compile": True, "cache_gib": 0.25})
    engine = engine_for(random_model(spec).requires_grad_(False), config)
    with contextlib.closing(engine):
        engine.start()


def compile_trainer(spec: dict[str, Any], config: RunConfig) -> None:
    changes = {"compile": True, "micro_batch_tokens": SAMPLES * TOKENS, "critic": None}
    model = attach_lora(random_model(spec), config.model, seed=0)
    plain = Sample.as_sampled(np.arange(TOKENS) % 2)  # any vocabulary has these
    sample = replace(plain, logprobs=-1.0 * plain.loss_mask, advantages=1.0 * plain.loss_mask, env="compile")
    with contextlib.closing(torch_trainer(with_sections(config, trainer=changes), model)) as trainer:
        asyncio.run(trainer.step([sample] * SAMPLES))


def show_progress(pieces: int) -> None:
    """Print `n of m` when torch has compiled a piece."""
    done = 0

    def count(args: CallbackArgs) -> None:
        nonlocal done
        done += args.callback_trigger is CallbackTrigger.DYNAMO
        if args.callback_trigger is CallbackTrigger.DYNAMO and done <= pieces:
            print(f"{done} of {pieces}", flush=True)

    callback_handler.register_end_callback(count)


def main() -> int:
    end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(10)  # the run comes first
    spec = json.load(sys.stdin)
    part = spec["part"]
    model = {"dtype": spec["dtype"], "lora": spec["lora"], "fp32_head": spec["fp32_head"]}
    config = RunConfig.model_validate({"model": model, part: spec["settings"]})
    marker = Path(spec["marker"])
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engines of one machine want the same code: the first makes it
        if not marker.is_file():
            show_progress(pieces=3)  # rotary embedding, layer, final norm
            {"engine": compile_engine, "trainer": compile_trainer}[part](spec, config)
            marker.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
