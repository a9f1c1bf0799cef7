"""Ten defects as people make them, each planted in the real code of a small deterministic run."""

import dataclasses
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EvalConfig, RunConfig
from paceline.config.trainer import TrainerConfig
from paceline.runtime import session

STEPS = 2
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>NL' ~ message.content ~ '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def trained(runs: Path, name: str, **changes: Any) -> Path:
    """A run that is the same to the last bit whenever it is played."""
    config = RunConfig.model_validate(
        {
            "name": name,
            "runs": str(runs),
            "deterministic": True,
            "staleness": 0,
            "steps": STEPS,
            "batch_size": 8,
            "group_size": 4,
            "eval": EvalConfig(every=0),
            "trainer": TrainerConfig(threads=1),
            "env": [{"type": "reverse-text"}],
        }
        | changes
    )
    with ThreadPoolExecutor(1) as aside:  # a browser that is driven from here has an event loop of its own
        result = aside.submit(session.train, config).result()
    assert result.error is None, result.error
    return result.directory


@dataclass(frozen=True, slots=True)
class Defect:
    """What is wrong, and what a reader must be led to."""

    plant: Callable[[pytest.MonkeyPatch, Path], None]
    kind: str
    """As `paceline diff` calls the first difference."""
    said: str
    """A part of its sentence."""
    step: int = 1
    stream: str = ""
    env: dict[str, Any] = field(default_factory=dict)
    """What the environment of the sound run needs."""
    prepare: Callable[[Path], dict[str, Any]] = lambda _: {}
    """More of what both runs need."""
    tolerance: float = 0.0
    """Of the comparison, where a smaller difference would be mere rounding."""


def reward_bug(patch: pytest.MonkeyPatch, _: Path) -> None:
    """A reply is compared with the word itself instead of the word reversed."""
    from paceline.envs.reverse_text import ReverseText

    real = ReverseText.grade
    patch.setattr(ReverseText, "grade", lambda self, given, wanted: real(self, given, wanted[::-1]))


def swapped_version(patch: pytest.MonkeyPatch, _: Path) -> None:
    """What is published as version 1 are the weights of version 0."""
    from paceline.trainer import TorchTrainer

    real, kept = TorchTrainer.weights, {}

    async def weights(self):
        update = await real(self)
        kept[update.version] = dataclasses.replace(
            update, tensors={name: tensor.clone() for name, tensor in update.tensors.items()}
        )
        return dataclasses.replace(kept[0], version=1) if update.version == 1 else update

    patch.setattr(TorchTrainer, "weights", weights)


def masked_token_trained(patch: pytest.MonkeyPatch, _: Path) -> None:
    """The mask begins one token early, at the last one of the prompt."""
    assemble = importlib.import_module("paceline.rollout.assemble")
    real = assemble._sample

    def early(*given):
        sample = real(*given)
        first = int(np.argmax(sample.loss_mask))
        sample.loss_mask[first - 1] = True
        sample.versions[first - 1] = sample.versions[first]
        return sample

    patch.setattr(assemble, "_sample", early)


def with_template(folder: Path) -> dict[str, Any]:
    path = folder / "template.jinja"
    path.write_text(TEMPLATE.replace("NL", "\\n"), encoding="utf-8")
    return {"model": {"chat_template": str(path)}}


def dropped_newline(_: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "template.jinja").write_text(TEMPLATE.replace("NL", ""), encoding="utf-8")


def one_request_at_a_time(_: Path) -> dict[str, Any]:
    """Prefixes are shared, which a deterministic run does not do. Because the engine never has a second request, what
    it computes together with what, and so each rounding, does not depend on timing: these runs repeat bit for bit too.
    """
    return {
        "deterministic": False,
        "max_inflight": 1,
        "batch_size": 4,
        "sampling": {"max_tokens": 4},
        "engine": {"cache": "pages"},
        "trainer": {"threads": 1, "optimizer": {"lr": 1e-4}},
    }


def stale_prefix(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Keys and values of prompts outlive the weights they were computed with."""
    from paceline.engine.pages import PageCache
    from paceline.engine.weight_applier import ServedModels

    patch.setattr(PageCache, "reset_prefixes", lambda self: None)
    patch.setattr(ServedModels, "weights_key", lambda self, model: (model, 0))


def wrong_normaliser(patch: pytest.MonkeyPatch, _: Path) -> None:
    """One over half of the tokens."""
    from paceline.data import packing

    real = packing._totals
    patch.setattr(packing, "_totals", lambda *given: real(*given) / 2)


def leaked_answer(patch: pytest.MonkeyPatch, _: Path) -> None:
    from paceline.envs.reverse_text import ReverseText

    real = ReverseText.examples

    def examples(self, split):
        rows = real(self, split)
        for row in rows:
            row["messages"][0]["content"] += f" {row['answer']}"
        return rows

    patch.setattr(ReverseText, "examples", examples)


def seed_reused(patch: pytest.MonkeyPatch, _: Path) -> None:
    """All members of a group draw the noise of the first."""
    from paceline.orchestrator import episodes

    real = episodes.SessionMap

    def table(client, noise, *more):
        return real(client, (*noise[:-1], 0), *more)

    patch.setattr(episodes, "SessionMap", table)


def truncated_score(patch: pytest.MonkeyPatch, _: Path) -> None:
    """The teacher is asked for a text of which the end is missing."""
    from paceline.clients.pool import Pool

    real = Pool.score

    async def score(self, sequences, *more, **named):
        scored = await real(self, [ids[:-2] for ids in sequences], *more, **named)
        return [[*scores, 0.0, 0.0] for scores in scored]

    patch.setattr(Pool, "score", score)


def spiked_rate(patch: pytest.MonkeyPatch, _: Path) -> None:
    from paceline.trainer.backend import Schedule

    real = Schedule.lr.fget
    patch.setattr(Schedule, "lr", property(lambda self: real(self) * (100 if self.steps == 1 else 1)))


DEFECTS = {
    "a reward bug": Defect(reward_bug, "reward", "the reward"),
    "a swapped version": Defect(swapped_version, "weights", "the fingerprint of the weights of version 1", step=2),
    "a masked token that trains": Defect(masked_token_trained, "sample", "`loss_mask`", stream="loss_mask"),
    "a template that drops a newline": Defect(
        dropped_newline, "prompt", "a token of the prompt", prepare=with_template
    ),
    "a stale prefix": Defect(
        stale_prefix,
        "logprob",
        "log probability",
        step=2,
        env={"train_examples": 2, "group_size": 1, "algo": {"type": "reward"}},  # both rows come again in step 2
        prepare=one_request_at_a_time,
        tolerance=1e-4,
    ),
    "a wrong normaliser": Defect(wrong_normaliser, "loss", "`loss"),
    "an environment that leaks the answer": Defect(leaked_answer, "prompt", "a token of the prompt"),
    "a seed that is used again": Defect(
        seed_reused, "token", "a sampled token", prepare=lambda _: {"filters": {"zero_advantage": False}}
    ),
    "a teacher's score cut short": Defect(
        truncated_score,
        "sample",
        "`teacher_logprobs`",
        stream="teacher_logprobs",
        env={"algo": {"type": "opsd", "demo_key": "answer", "block": "{demonstration}"}},
    ),
    "a spike of the learning rate": Defect(spiked_rate, "gradient", "`lr`", step=2),
}


def sound(runs: Path, name: str, defect: Defect, scratch: Path) -> Path:
    """The run as it should be."""
    return trained(runs, name, **_settings(scratch, defect))


def spoilt(runs: Path, name: str, defect: Defect, scratch: Path) -> Path:
    """The same run with the defect in it."""
    with pytest.MonkeyPatch.context() as patch:
        settings = _settings(scratch, defect)
        defect.plant(patch, scratch)
        return trained(runs, name, **settings)


def _settings(scratch: Path, defect: Defect) -> dict[str, Any]:
    return {"env": [{"type": "reverse-text"} | defect.env]} | defect.prepare(scratch)
