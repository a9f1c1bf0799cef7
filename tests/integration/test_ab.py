"""Two adapters on one engine, over the same draws and noise."""

import io
from pathlib import Path

import numpy as np
import pytest

from paceline.commands.ab import train_arms
from paceline.config.target import ARMS, load_arms, split_by_prefix
from paceline.errors import PacelineError
from paceline.observe.record import open_run
from paceline.observe.record.paired import pair_rewards
from paceline.trainer import TorchTrainer, TrainerError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
BRIEF = ["--name=two", "--steps=2", "--batch-size=16", "--eval.every=0", "--model.lora.rank=4", "--staleness=0"]
BRIEF += ["--engine.max-running=32", "--engine.max-context=64"]


@pytest.fixture
def configs(tmp_path):
    def make(*more: str):
        loaded = load_arms(QUICKSTART, [*BRIEF, f"--runs={tmp_path}", "--deterministic", *more])
        return {arm: one.config for arm, one in loaded.items()}

    return make


def test_both_arms_begin_alike_to_the_last_bit_and_only_then_part(configs, tmp_path):
    screen = io.StringIO()
    assert train_arms(configs("--b.trainer.optimizer.lr", "0.05"), screen=screen) == 0
    a, b = (open_run(tmp_path / f"two-{arm}") for arm in "ab")
    pairs = pair_rewards(a, b)
    assert pairs.different_rows == 0
    assert len(pairs.ticket) >= 4
    assert (pairs.differences[pairs.step == 1] == 0).all()
    assert (pairs.differences[pairs.step == 2] != 0).any()
    told = [[run.rollouts.get(i) for i in range(run.rollouts.count) if run.rollouts.row(i).step == 1] for run in (a, b)]
    for mine, theirs in zip(*told, strict=True):
        for left, right in zip(mine.samples, theirs.samples, strict=True):
            np.testing.assert_array_equal(left.token_ids, right.token_ids)
            np.testing.assert_array_equal(left.logprobs, right.logprobs)
    assert "step 2  reward  two-a 0." in screen.getvalue()
    assert "two-b minus two-a is" in screen.getvalue()
    assert all((tmp_path / f"two-{arm}" / "export").is_dir() for arm in "ab")


def test_an_arm_that_fails_stops_the_other_with_a_checkpoint(configs, tmp_path, monkeypatch):
    real = TorchTrainer.step

    async def step(self, batch):
        if self.version == 1 and self._config.loss.type == "ppo":
            raise TrainerError("the device is gone")
        return await real(self, batch)

    monkeypatch.setattr(TorchTrainer, "step", step)
    screen = io.StringIO()
    assert train_arms(configs("--b.trainer.loss.type", "ppo", "--steps=50"), screen=screen) == 1
    assert "two-b: failed at step 1: the device is gone" in screen.getvalue()
    assert "two-a: interrupted at step" in screen.getvalue()
    assert (tmp_path / "two-a" / "checkpoints" / "latest" / "state.json").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "both arms are the same"),
        (("--b.seed", "1"), "both arms share `seed`"),
        (("--b.model.lora.rank", "8"), "both arms share `model`"),
        (("--record.all=false", "--b.staleness=1"), "compared by their records"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_loaded(configs, more, said):
    with pytest.raises(PacelineError, match=said):
        train_arms(configs(*more))


def test_a_whole_model_is_no_arm(tmp_path):
    loaded = load_arms(QUICKSTART, [f"--runs={tmp_path}", "--b.staleness=2"])
    with pytest.raises(PacelineError, match=r"set model\.lora\.rank"):
        train_arms({arm: one.config for arm, one in loaded.items()})


def test_keys_of_one_arm_are_its_own():
    shared, own = split_by_prefix(["--steps", "3", "--a.x.y", "1", "--b.z=2", "--flag", "--b.w"], ARMS)
    assert shared == ["--steps", "3", "--flag"]
    assert own == {"a": ["--x.y", "1"], "b": ["--z=2", "--w"]}
