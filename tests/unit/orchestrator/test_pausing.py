"""An environment rests when an advisory speaks against it, on a real run with real weights."""

from paceline.config import EvalConfig, RunConfig
from paceline.config.env import ReverseTextConfig
from paceline.config.filters import AdviceConfig
from paceline.config.inference import SamplingConfig
from paceline.config.trainer import TrainerConfig
from paceline.observe.record import Query, open_run
from paceline.observe.record.advice.rules import AdviceMemory
from paceline.runtime import session

REST = 10


def config(runs, *envs: ReverseTextConfig, **changes) -> RunConfig:
    """Replies of three tokens at most: most are cut off."""
    return RunConfig(
        **{
            "runs": str(runs),
            "steps": 18,
            "batch_size": 16,
            "group_size": 2,
            "staleness": 0,
            "env": list(envs),
            "eval": EvalConfig(every=0),
            "sampling": SamplingConfig(max_tokens=3),
            "advice": AdviceConfig(steps=REST, interval=1),
            "trainer": TrainerConfig(threads=1),
        }
        | changes
    )


def notes(run) -> list[str]:
    return [event["text"] for event in run.events() if event["event"] == "note" and "drawn from" in event["text"]]


def test_one_environment_rests_the_other_goes_on_and_neither_catches_up(tmp_path):
    cut, free = ReverseTextConfig(name="cut", pause=["truncation"]), ReverseTextConfig(name="free")
    result = session.train(config(tmp_path, cut, free))
    assert result.outcome.status == "finished"
    run = open_run(result.directory)
    stopped, went_on = notes(run)[:2]
    assert "nothing more is drawn from `cut`" in stopped
    assert "Replies of `cut` are cut off" in stopped
    first = int(stopped.split()[1].rstrip(":"))
    assert went_on == f"step {first + REST}: `cut` has rested and is drawn from again"
    shares = {}
    for step in range(1, 19):
        rows = run.rollouts.find(Query(step=(step, step), domain="training", limit=None)).rows
        shares[step] = sum(row.env == "cut" for row in rows) / len(rows)
    # What a step finds is known before the draws after the next: step n + 2 is the first without, or with, them.
    assert all(share > 0.2 for step, share in shares.items() if step <= first + 1)
    assert all(share == 0 for step, share in shares.items() if first + 2 <= step <= first + REST + 1)
    assert all(0.2 < share < 0.8 for step, share in shares.items() if step >= first + REST + 2)


def test_environments_are_drawn_from_again_when_advice_fails(tmp_path, monkeypatch):
    advise = AdviceMemory.advise

    def fails_later(self, rules):
        if notes(open_run(tmp_path / "quickstart")):
            raise ValueError("a rule broke")
        return advise(self, rules)

    monkeypatch.setattr(AdviceMemory, "advise", fails_later)
    cut, free = ReverseTextConfig(name="cut", pause=["truncation"]), ReverseTextConfig(name="free")
    result = session.train(config(tmp_path, cut, free, name="quickstart"))
    assert result.outcome.status == "finished"
    run = open_run(result.directory)
    stopped, went_on = notes(run)
    assert "nothing more is drawn from `cut`" in stopped
    assert "`cut` has rested" in went_on
    assert any("advice failed" in event.get("text", "") for event in run.events())
    rows = run.rollouts.find(Query(step=(18, 18), domain="training", limit=None)).rows
    assert {row.env for row in rows} == {"cut", "free"}


def test_the_only_environment_is_not_paused_to_death(tmp_path):
    """The run stops with a sentence and a checkpoint, and goes on once the user says so."""
    only = ReverseTextConfig(name="only")
    result = session.train(config(tmp_path, only, advice=AdviceConfig(steps=REST, interval=1, pause=["truncation"])))
    outcome = result.outcome
    assert outcome.status == "interrupted"
    assert outcome.step < 18
    assert "Replies of `only` are cut off" in outcome.message
    assert "--resume latest" in outcome.message
    assert outcome.checkpoint.name == f"step-{outcome.step:06d}"
    result = session.train(config(tmp_path, only, steps=outcome.step + 1, resume="latest"))
    assert result.outcome.status == "finished"
    assert result.outcome.step == outcome.step + 1
