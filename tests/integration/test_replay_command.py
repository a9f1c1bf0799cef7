"""`paceline replay`: a recorded batch says on the CPU what it said in the run, and which token says what."""

import json
import shutil

import numpy as np
import pytest

from paceline.commands import main
from paceline.commands.replay import as_json, replay
from paceline.config import load
from paceline.errors import PacelineError
from paceline.observe.monitor import read_jsonl
from replayable_run import replayable


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return replayable(tmp_path_factory)


def config_of(run, *overrides):
    return load(str(run / "config.toml"), list(overrides)).config


def told(run, step, *overrides):
    config = config_of(run, *overrides)
    return json.loads(as_json(run, replay(run, step, config), config))


@pytest.fixture(scope="module")
def third(run):
    return told(run, 3)


def test_every_component_comes_out_as_recorded(run):
    result = replay(run, 3, config_of(run))
    assert result.exact
    apart = result.differences()
    assert {"loss", "loss/rl", "loss/kl", "kl", "grad_norm", "entropy", "clip_fraction"} <= apart.keys()
    assert all(abs(difference) < 1e-5 for difference in apart.values()), apart


def test_two_optimizer_steps_a_batch_are_one_step_of_the_run(run):
    """Checkpoints and metrics count batches, and the second step of each is away from where its batch began."""
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["optimizer_steps"] for line in lines if "optimizer_steps" in line] == [2, 4, 6]
    assert all(line["ppo_kl"] > 0 for line in lines if "ppo_kl" in line)
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000002", "step-000003"]


def test_a_record_from_before_sampler_kl_replays(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    lines = read_jsonl(copy / "metrics.jsonl")
    old = [{name: value for name, value in line.items() if name != "sampler_kl"} for line in lines]
    assert old != lines
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    result = replay(copy, 3, config_of(copy))
    assert "sampler_kl" in result.replayed
    assert "sampler_kl" not in result.differences()
    assert result.differences()["ppo_kl"] == pytest.approx(0, abs=1e-5)


def test_another_setting_says_what_it_would_have_been(run):
    result = replay(run, 3, config_of(run, "--trainer.kl.coef", "2.0"))
    assert result.replayed["loss/kl"] > 3 * result.recorded["loss/kl"] > 0


def test_the_record_gives_the_same_step_where_no_batch_is_kept(run, third, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "batches")
    again = told(copy, 3)
    assert third["samples_from"].endswith("step-000003.msgpack")
    assert again["samples_from"] == "the record"
    assert again["samples"] == third["samples"]
    assert again["loss"] == third["loss"]


def test_a_damaged_line_beside_what_was_recorded_is_named(run, third, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    metrics = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text('{"loss": 1.0}\n{"step": "3"}\nnonsense\n' + metrics)
    again = told(copy, 3)
    assert again["loss"] == third["loss"]
    assert again["remarks"] == ["metrics.jsonl: a line is damaged and left out, the first is line 3"]
    assert main(["replay", str(copy), "3"]) == 0
    assert again["remarks"][0] in capsys.readouterr().out


def test_the_shares_of_all_tokens_add_up_to_each_component(third):
    assert third["components"] == ["rl", "kl"]
    assert third["remarks"] == []
    for name in third["components"]:
        shares = [value for sample in third["samples"] for value in sample["trained"]["share"].get(name, [])]
        assert sum(shares) == pytest.approx(third["loss"][f"loss/{name}"]["replayed"], abs=1e-6)
        assert any(shares)


def test_a_token_is_told_with_its_text_its_ratio_and_its_rollout(run, third):
    from paceline.observe.record import open_run

    for sample in third["samples"]:
        trained = sample["trained"]
        assert len(sample["ids"]) == len(sample["text"])
        kept = open_run(run).rollouts.get(sample["rollout"])
        assert (kept.row.ticket, kept.row.member) == (sample["ticket"], sample["member"])
        assert kept.samples[sample["number"]].token_ids.tolist() == sample["ids"]
        assert np.flatnonzero(kept.samples[sample["number"]].loss_mask).tolist() == trained["places"]
    assert "".join(third["samples"][0]["text"]).startswith("<|user|>")


def test_the_ratio_is_the_one_that_trained_in_its_own_optimizer_step(third):
    """Under `proximal` it is measured from the batch's start: 1 in the first of two steps, and moved in the second."""
    moved = [any(ratio != 1 for ratio in sample["trained"]["ratio"]) for sample in third["samples"]]
    assert third["optimizer_steps"] == 2
    assert moved == [False] * 8 + [True] * 8


def test_a_token_beyond_its_bound_is_named_with_the_rule(run):
    tight = told(run, 3, "--trainer.loss.type=ppo", "--trainer.loss.clip_low=0", "--trainer.loss.clip_high=0")
    seen = 0
    for sample in tight["samples"]:
        trained = sample["trained"]
        held = {one["token"]: one["rule"] for one in trained["held_back"] if one["component"] == "rl"}
        for token, (ratio, advantage) in enumerate(zip(trained["ratio"], trained["advantage"], strict=True)):
            beyond = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
            assert (token in held) == beyond
            if beyond:
                assert f"{'above 1 + clip_high' if advantage > 0 else 'below 1 - clip_low'} = 1" in held[token]
        seen += len(held)
    assert seen > 0
    share = tight["loss"]["clip_fraction"]["replayed"]
    assert share == pytest.approx(seen / sum(len(s["trained"]["places"]) for s in tight["samples"]))


def test_a_sample_left_out_as_a_whole_has_no_share(run):
    skipping = told(run, 3, "--trainer.clip_skip_threshold=0.0001")
    left = [sample["trained"] for sample in skipping["samples"] if sample["trained"]["skipped"]]
    assert len(left) == skipping["loss"]["skipped_samples"]["replayed"] > 0
    assert not any(value for trained in left for shares in trained["share"].values() for value in shares)


def test_weights_of_an_earlier_step_are_named_as_such(run):
    result = replay(run, 2, config_of(run))  # of the checkpoints only steps 2 and 3 are kept
    assert not result.exact
    assert "untrained" in result.weights


def test_what_is_not_there_is_said(run, capsys):
    with pytest.raises(PacelineError, match="those kept are 1 to 3"):
        replay(run, 4, config_of(run))
    assert main(["replay", str(run / "nowhere"), "1"]) == 2
    assert "there is no run at" in capsys.readouterr().err


def test_a_run_that_keeps_no_samples_says_how_to_keep_them(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for folder in ("batches", "record"):
        shutil.rmtree(copy / folder)
    with pytest.raises(PacelineError, match=r"--record\.all"):
        replay(copy, 3, config_of(copy))


def test_the_command_prints_the_table(run, capsys):
    assert main(["replay", str(run), "3"]) == 0
    shown = capsys.readouterr().out
    assert "loss/rl" in shown
    assert "step-000002" in shown
