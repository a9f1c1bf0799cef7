"""Outside the default suite (`make scale`): a run whose teacher is scored by actors of its own; one is killed."""

import asyncio
import os
from functools import partial

import numpy as np
import pytest
import test_spread_runs as spread
import torch

from paceline.config.model import ModelConfig
from paceline.data import decode
from paceline.model import load_model, load_tokenizer
from paceline.runtime import train
from paceline.runtime.scorer import Scorer

ray = pytest.importorskip("ray", reason="needs the extra `ray`")

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes minutes: `make scale`")
local_ray, config = spread.local_ray, spread.config

RUN_FILE = """
name = "taught"
steps = 8
batch_size = 16
group_size = 4
[model]
name = "paceline:quickstart"
[sampling]
max_tokens = 12
temperature = 0.8
[trainer.optimizer]
lr = 1e-5
[cluster]
scorers = 2
[record]
batches = 8
[eval]
every = 0
[[env]]
type = "reverse-text"
algo = { type = "opd", teacher = { name = "teacher" } }
"""


def test_a_run_goes_on_when_one_of_its_scorers_is_killed(config, tmp_path):
    """Every sample of every batch, before the kill and after it, has the teacher's own log probabilities."""
    teacher = load_model(ModelConfig())
    with torch.no_grad():
        teacher.model.norm.weight *= 1.2
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path / "teacher")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    root = tmp_path / "runs" / "taught"
    watcher = spread.Watcher(root, {3: partial(spread.kill, "taught", "scorer-0")})
    result = train(config(file="run.toml"), overwrite=True)
    assert result.outcome.status == "finished", result.error
    assert watcher.done == [3]
    spread.clean(root, 8)
    assert not any(line.get("dropped/teacher_failed") for line in result.metrics)
    scorer = Scorer(teacher, budget=4096)
    scorer.start()
    for step in (1, 8):
        samples = decode(next(root.glob(f"batches/*{step}.*")).read_bytes())
        scores = asyncio.run(scorer.score([sample.token_ids.tolist() for sample in samples], 0.8))
        for sample, score in zip(samples, scores, strict=True):
            expected = np.array(score)[sample.loss_mask]
            np.testing.assert_allclose(sample.teacher_logprobs[sample.loss_mask], expected, atol=1e-3)
    scorer.close()
    assert all(abs(line["teacher_kl"]) < 0.05 for line in result.metrics)  # it began near its teacher, and stays there
    assert (root / ".live" / "scorer-1.log").exists()
