"""The laws of bad steps: nothing of them reaches the weights, all that follows is as if they had not been, and the
batch tells which sample it was."""

import asyncio
import functools
import json

import numpy as np
import pytest
import torch

from conftest import tiny_model
from paceline import RunConfig
from paceline.commands import main
from paceline.commands.replay import examine_samples, findings_verdict, nonfinite_weights, replay_dump
from paceline.config import dump
from paceline.config import trainer as config
from paceline.data import Sample, decode
from paceline.errors import PacelineError
from paceline.model import load_model
from paceline.trainer import TorchTrainer, TrainerError
from paceline.trainer.learner import KEPT, WARM_UP, GradientNorms, StepOutcome
from samples import PLAIN, make_batch, near_policy
from trainers import put_weights, tensors_of, trainer_of, weights_of

BAD = 3
"""The sample that is poisoned."""


@functools.cache
def batch_of(seed: int) -> list[Sample]:
    return near_policy(make_batch(seed, count=5, longest=30, **PLAIN), noise=0.05)


def with_sample(batch: list[Sample], change) -> list[Sample]:
    sample = batch[BAD]
    return [*batch[:BAD], sample.with_streams(advantages=change(sample.advantages)), *batch[BAD + 1 :]]


def infinite(batch: list[Sample]) -> list[Sample]:
    return with_sample(batch, lambda a: np.where(a != 0, np.inf, 0))


def jumping(batch: list[Sample]) -> list[Sample]:
    return with_sample(batch, lambda a: 1e4 * a)


class Run:
    """A trainer on a small model, one batch at a time."""

    def __init__(self, folder=None, **settings) -> None:
        c = config.TrainerConfig(threads=1, optimizer=config.OptimizerConfig(lr=1e-3), **settings)
        self.trainer = trainer_of(tiny_model(), c, dumps=folder)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.trainer.close()

    def step(self, batch):
        return asyncio.run(self.trainer.step(batch))

    def save(self, folder):
        folder.mkdir()
        asyncio.run(self.trainer.save(folder))
        return folder

    def load(self, folder) -> None:
        asyncio.run(self.trainer.load(folder))

    def bits(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.trainer)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def warmed(run: Run) -> Run:
    for seed in range(WARM_UP):
        assert run.step(batch_of(seed)).trouble == ""
    return run


PLANTED = {"NaN": (infinite, "the gradient was not finite"), "spike": (jumping, "times the median of the last 8 steps")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_bad_step_is_left_out_and_told_and_the_next_is_as_if_it_had_not_been(planted, stream, tmp_path):
    poison, words = PLANTED[planted]
    with warmed(Run(tmp_path, spike=50.0, stream=stream)) as run, warmed(Run(spike=50.0, stream=stream)) as sound:
        before = run.bits()
        if stream:
            bad = poison(batch_of(70))
            asyncio.run(run.trainer.feed(bad[:4]))
            report = run.step(bad)
        else:
            report = run.step(poison(batch_of(70)))
        assert report.skipped
        assert not report.roll_back
        assert words in report.trouble
        assert "its optimizer step was left out; the batch is in" in report.trouble
        assert f"--dump {WARM_UP + 1}" in report.trouble
        assert same(run.bits(), before)
        assert len(decode((tmp_path / f"bad-batch-{WARM_UP + 1:06d}.msgpack").read_bytes())) == 5
        assert run.step(batch_of(71)).trouble == sound.step(batch_of(71)).trouble == ""
        assert same(run.bits(), sound.bits())


def test_without_a_bound_nothing_changes():
    """The same bits as with one that is never reached; a spike is a step like any other."""
    with Run() as free, Run(spike=1e6) as bound:
        for seed in range(WARM_UP + 2):
            batch = batch_of(seed)
            assert free.step(batch).metrics.keys() == bound.step(batch).metrics.keys()
        assert same(free.bits(), bound.bits())
        assert not free.step(jumping(batch_of(70))).skipped


def test_early_spikes_pass_and_many_in_a_row_stop_the_run():
    with Run(spike=50.0, max_bad_steps=3) as run:
        assert not run.step(jumping(batch_of(0))).skipped
    with warmed(Run(spike=50.0, max_bad_steps=3)) as run:
        for _ in range(2):
            assert run.step(jumping(batch_of(70))).skipped
        with pytest.raises(TrainerError, match=r"times the median .* 3 times in a row: lower trainer.optimizer.lr"):
            run.step(jumping(batch_of(70)))


def test_stop_ends_the_run_at_once(tmp_path):
    told = r"step 1: the gradient was not finite, and .*`stop`; the batch is in"
    with Run(tmp_path, on_bad_step="stop") as run, pytest.raises(TrainerError, match=told):
        run.step(infinite(batch_of(0)))
    assert (tmp_path / "bad-batch-000001.msgpack").is_file()


def test_a_full_disk_does_not_hide_the_cause(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Run(tmp_path / "file", on_bad_step="stop") as run, pytest.raises(TrainerError, match="could not be written"):
        run.step(infinite(batch_of(0)))


@pytest.mark.parametrize("planted", PLANTED)
def test_roll_back_asks_for_the_checkpoint_and_from_there_all_is_as_it_was(planted, tmp_path):
    poison, _ = PLANTED[planted]
    settings = {"on_bad_step": "roll_back", "spike": 50.0}
    with warmed(Run(tmp_path, **settings)) as run, warmed(Run(**settings)) as sound:
        saved = run.save(tmp_path / "saved")
        run.step(batch_of(50))
        report = run.step(poison(batch_of(70)))
        assert report.roll_back
        assert report.skipped
        asyncio.run(run.trainer.feed(batch_of(60)))  # of a batch that will never be whole
        run.load(saved)
        assert run.trainer.version == WARM_UP
        for seed in (51, 52):
            assert run.step(batch_of(seed)).metrics["loss"] == sound.step(batch_of(seed)).metrics["loss"]
        assert same(run.bits(), sound.bits())


def test_a_step_that_roll_backs_do_not_cure_stops_the_run(tmp_path):
    with Run(on_bad_step="roll_back", max_bad_steps=2) as run:
        saved = run.save(tmp_path / "saved")
        assert run.step(infinite(batch_of(0))).roll_back
        run.load(saved)
        with pytest.raises(TrainerError, match="step 1 was bad 2 times, each after a roll-back: the gradient was not"):
            run.step(infinite(batch_of(0)))


def test_the_norms_are_part_of_a_checkpoint_and_old_checkpoints_have_none(tmp_path):
    with warmed(Run(spike=50.0)) as run:
        saved = run.save(tmp_path / "saved")
        state = json.loads((saved / "trainer.json").read_text())
        assert len(state["grad_norms"]) == WARM_UP <= KEPT
    with Run(spike=50.0) as again:
        again.load(saved)
        assert again.step(jumping(batch_of(70))).skipped
    (saved / "trainer.json").write_text(json.dumps({k: v for k, v in state.items() if k != "grad_norms"}))
    with Run(spike=50.0) as older:
        older.load(saved)
        assert not older.step(jumping(batch_of(70))).skipped


def test_if_one_rank_sees_a_spike_all_leave_the_step_out():
    """Votes are summed over the ranks: here the other one's is always yes, or always no."""
    for other, expected in ((1.0, True), (0.0, False)):
        norms = GradientNorms(50.0, lambda vote, other=other: vote + other)
        norms.load([1.0] * WARM_UP)
        assert bool(norms.trouble(StepOutcome(np.zeros(1), 1.0, 1))) is expected
        assert norms.trouble(StepOutcome(np.zeros(1), 60.0, 1))


# -- which sample it was ----------------------------------------------------------------------------------------------


def test_each_sample_alone_adds_up_to_the_batch_and_the_poisoned_one_is_named():
    with Run() as run:
        batch = batch_of(0)
        before = run.bits()
        found = examine_samples(run.trainer.learner, batch, 0)
        assert same(run.bits(), before)
        assert not any(finding.nonfinite for finding in found)
        whole = run.step(batch).metrics
        assert sum(finding.losses["rl"] for finding in found) == pytest.approx(whole["loss/rl"], rel=1e-4)
    with Run() as run:
        found = examine_samples(run.trainer.learner, infinite(batch), 0)
        assert [bool(finding.nonfinite) for finding in found] == [number == BAD for number in range(5)]
        told = findings_verdict(found, nonfinite_weights(run.trainer.learner))
        assert told.startswith("1 of 5 samples are not finite: env `env`, ticket 3, rollout 0 (advantages, loss/rl,")
        told = findings_verdict(examine_samples(run.trainer.learner, jumping(batch), 0), [])
        assert "every sample is finite" in told
        assert "ticket 3" in told
        name, parameter = next(iter(weights_of(run.trainer).items()))
        parameter.view(-1)[0] = float("nan")
        put_weights(run.trainer, {name: parameter})
        told = findings_verdict(examine_samples(run.trainer.learner, batch, 0), nonfinite_weights(run.trainer.learner))
        assert f"the weights are not finite before this batch (`{name}`)" in told


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """What a run leaves behind whose second step was bad."""
    root = tmp_path_factory.mktemp("runs") / "bad"
    root.mkdir()
    settings = RunConfig.model_validate({"device": "cpu", "trainer": {"on_bad_step": "roll_back"}})
    (root / "config.toml").write_text(dump(settings))
    trainer = TorchTrainer(load_model(settings.model, "cpu"), settings.trainer, dumps=root / "dumps")
    for batch in (batch_of(0), infinite(batch_of(1))):
        asyncio.run(trainer.step(batch))
    trainer.close()
    return root


def test_a_dump_is_replayed_by_number_and_by_path(run_directory, capsys):
    assert main(["replay", str(run_directory), "--dump", "2", "--trainer.kl.coef", "2.0"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 5 samples are not finite: env `env`, ticket 3, rollout 0 (advantages" in shown
    assert "loss/rl" in shown
    path = run_directory / "dumps" / "bad-batch-000002.msgpack"
    settings = RunConfig.model_validate({"device": "cpu"})
    result = replay_dump(run_directory, str(path), settings)
    assert (result.step, len(result.samples), result.exact) == (2, 5, False)
    assert [finding.sample.ticket.number for finding in result.findings if finding.nonfinite] == [3]


def test_samples_of_a_dump_are_cut_as_the_trainer_cuts_them(run_directory):
    settings = RunConfig.model_validate({"device": "cpu", "trainer": {"max_sample_tokens": 12}})
    result = replay_dump(run_directory, "2", settings)
    assert max(map(len, result.samples)) > 12
    assert max(len(finding.sample) for finding in result.findings) == 12


def test_what_cannot_be_replayed_is_said(run_directory, capsys):
    with pytest.raises(PacelineError, match=r"no bad batch 7 in .*those kept are of steps 2"):
        replay_dump(run_directory, "7", RunConfig())
    (run_directory / "dumps" / "bad-batch-000009.msgpack").write_bytes(b"half a fi")
    with pytest.raises(PacelineError, match=r"bad-batch-000009\.msgpack cannot be read"):
        replay_dump(run_directory, "9", RunConfig())
    for arguments in ([], ["2", "--dump", "2"]):
        assert main(["replay", str(run_directory), *arguments]) == 2
        assert "name one batch" in capsys.readouterr().err
