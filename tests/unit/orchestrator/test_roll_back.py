"""A batch that breaks the gradient, with `trainer.on_bad_step = "roll_back"`: the run goes back to its newest
checkpoint by itself, drops the draws of that batch, and goes on."""

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.config.inference import EngineConfig
from paceline.config.run import CheckpointConfig, EvalConfig, RecordConfig
from paceline.config.trainer import TrainerConfig
from paceline.observe.monitor import read_jsonl
from paceline.runtime import session
from paceline.trainer import StepReport, TrainerLost
from paceline.trainer.trainer import LocalTrainer

STEPS = 5


def configured(tmp_path: Path, **more) -> RunConfig:
    return RunConfig(
        runs=str(tmp_path),
        steps=STEPS,
        batch_size=16,
        staleness=more.pop("staleness", 0),
        checkpoint=CheckpointConfig(every=2),
        eval=EvalConfig(every=0),
        engine=EngineConfig(max_running=16, max_context=64),
        record=RecordConfig(batches=STEPS),
        trainer=TrainerConfig(on_bad_step="roll_back", threads=1),
        **more,
    )


def broken_at(monkeypatch, step: int, times: int, how) -> list[list]:
    """The trainer fails at a step, so many times; the batches it failed on."""
    real, failed = LocalTrainer.step, []

    async def wrapped(self, batch):
        if self.version + 1 == step and len(failed) < times:
            failed.append([sample.ticket for sample in batch])
            return how()
        return await real(self, batch)

    monkeypatch.setattr(LocalTrainer, "step", wrapped)
    return failed


def bad() -> StepReport:
    return StepReport({}, True, "the gradient was not finite", True)


def gone() -> StepReport:
    raise TrainerLost("the trainer's process ended and was started again")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_bad_batch_is_undone_and_its_draws_never_train(tmp_path, monkeypatch, staleness):
    failed = broken_at(monkeypatch, step=4, times=1, how=bad)
    result = session.train(configured(tmp_path, staleness=staleness))
    assert result.outcome.status == "finished"
    root = result.directory
    assert [line["step"] for line in result.metrics if line["step"]] == list(range(1, STEPS + 1))
    events = [(event["event"], event.get("step")) for event in read_jsonl(root / "events.jsonl")]
    assert ("roll_back", 2) in events
    notes = [event["text"] for event in read_jsonl(root / "events.jsonl") if event["event"] == "note"]
    assert "step 4: the gradient was not finite; going back to step-000002" in notes
    ends = {
        record["draw"]: record
        for record in read_jsonl(root / "tickets.jsonl")
        if record["state"] in ("trained", "dropped")
    }
    for ticket in failed[0]:
        assert ends[ticket.draw]["state"] == "dropped"
        assert ends[ticket.draw]["reason"] == "skipped_draw"
    assert sorted(ends) == list(range(max(ends) + 1)) or staleness  # at staleness 0 nothing is left in between


def test_the_first_batch_can_be_undone_too(tmp_path, monkeypatch):
    broken_at(monkeypatch, step=1, times=1, how=bad)
    result = session.train(configured(tmp_path))
    assert result.outcome.status == "finished"
    assert ("roll_back", 0) in [(e["event"], e.get("step")) for e in read_jsonl(result.directory / "events.jsonl")]


def test_a_lost_trainer_costs_steps_and_no_draw(tmp_path, monkeypatch):
    """Nothing is wrong with the batch it was lost with: it trains after all, bit by bit as in an unbroken run."""
    whole = session.train(configured(tmp_path / "whole", deterministic=True))
    failed = broken_at(monkeypatch, step=4, times=2, how=gone)
    result = session.train(configured(tmp_path / "lost", deterministic=True))
    assert result.outcome.status == "finished"
    assert failed[0] == failed[1]
    for step in range(1, STEPS + 1):
        name = f"batches/step-{step:06d}.msgpack"
        assert (result.directory / name).read_bytes() == (whole.directory / name).read_bytes()


def test_going_back_again_and_again_ends_with_the_first_cause(tmp_path, monkeypatch):
    failed = broken_at(monkeypatch, step=4, times=10**6, how=gone)
    result = session.train(configured(tmp_path))
    assert result.outcome.status == "failed"
    assert len(failed) == session.MAX_ROLL_BACKS + 1
    message = result.outcome.message
    assert message.endswith("8 times in a row; the first cause: the trainer's process ended and was started again")
    assert "step-000002" in message
