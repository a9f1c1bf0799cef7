"""`paceline replay`: a recorded batch says on the CPU what it said in the run."""

import pytest

from paceline import RunConfig, train
from paceline.cli import main
from paceline.cluster.replay import replay
from paceline.config import load
from paceline.errors import PacelineError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = {
        "name": "kept",
        "runs": str(tmp_path_factory.mktemp("runs")),
        "steps": 3,
        "batch_size": 16,
        "group_size": 4,
        "trainer": {"minibatches": 2, "proximal": {}, "kl": {"kind": "k3"}, "optimizer": {"lr": 1e-3}},
        "eval": {"every": 0},
        "checkpoint": {"every": 1, "keep": 2},
        "record": {"batches": 2},
    }
    result = train(RunConfig.model_validate(settings))
    assert result.outcome.status == "finished"
    return result.directory


def config_of(run, *overrides):
    return load(str(run / "config.toml"), list(overrides)).config


def test_every_component_comes_out_as_recorded(run):
    result = replay(run, 3, config_of(run))
    assert result.exact
    apart = result.differences()
    assert {"loss", "loss/rl", "loss/kl", "kl", "grad_norm", "entropy", "clip_fraction"} <= apart.keys()
    assert all(abs(difference) < 1e-5 for difference in apart.values()), apart


def test_another_setting_says_what_it_would_have_been(run):
    result = replay(run, 3, config_of(run, "--trainer.kl.coef", "2.0"))
    assert result.now["loss/kl"] > 3 * result.recorded["loss/kl"] > 0


def test_weights_of_an_earlier_step_are_named_as_such(run):
    result = replay(run, 2, config_of(run))  # of the checkpoints only steps 2 and 3 are kept
    assert not result.exact
    assert "untrained" in result.weights


def test_what_is_not_there_is_said(run, capsys):
    with pytest.raises(PacelineError, match="those kept are 2 to 3"):
        replay(run, 1, config_of(run))
    assert main(["replay", str(run / "nowhere"), "1"]) == 2
    assert "there is no run at" in capsys.readouterr().err


def test_the_command_prints_the_table(run, capsys):
    assert main(["replay", str(run), "3"]) == 0
    shown = capsys.readouterr().out
    assert "loss/rl" in shown
    assert "step-000002" in shown
