"""A real run, sent back once on its way: the record knows what became of every rollout."""

from collections import Counter

import numpy as np
import pytest

from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig
from paceline.config.env import CustomEnvConfig
from paceline.config.trainer import TrainerConfig
from paceline.data import encode
from paceline.data.sample import trained_mask
from paceline.observe.analysis.timeline import lanes
from paceline.observe.monitor import read_jsonl
from paceline.observe.record import Query, open_run
from paceline.runtime import session
from paceline.trainer import StepReport
from paceline.trainer.trainer import LocalTrainer

STEPS, GROUP = 4, 4


def test_every_rollout_of_a_run_is_there_with_what_became_of_it(tmp_path, monkeypatch):
    real, broken = LocalTrainer.step, []

    async def once(self, batch):
        if self.version + 1 == STEPS and not broken:
            broken.append(len(batch))
            return StepReport({}, roll_back=True, trouble="the gradient was not finite")
        return await real(self, batch)

    monkeypatch.setattr(LocalTrainer, "step", once)
    config = RunConfig(
        runs=str(tmp_path),
        steps=STEPS,
        batch_size=8,
        group_size=GROUP,
        staleness=1,
        checkpoint=CheckpointConfig(every=2),
        eval=EvalConfig(every=2, examples=3),
        record=RecordConfig(batches=STEPS, top_logprobs=3),
        trainer=TrainerConfig(on_bad_step="roll_back", threads=1),
    )
    result = session.train(config)
    assert result.outcome.status == "finished"
    assert broken
    run = open_run(result.directory)
    assert run.problems() == []
    assert run.status().state == "finished"

    rows = run.rollouts.find(Query(domain="training", sort="step", limit=None)).rows
    of_ticket = {row.ticket: [r for r in rows if r.ticket == row.ticket] for row in rows}
    ends = [r for r in read_jsonl(result.directory / "tickets.jsonl") if r["state"] in ("trained", "dropped")]
    for end in ends:
        played = of_ticket.pop(end["number"], [])
        if end.get("reason") == "skipped_draw":
            assert played == []
            continue
        state = "trained" if end["state"] == "trained" else f"dropped:{end['reason']}"
        assert [row.state for row in played] == [state] * GROUP
        assert [row.member for row in played] == list(range(GROUP))
        assert {row.row for row in played} == {end["row"]}
        if end["state"] == "trained":
            assert {row.step for row in played} == {end["step"]}
            assert run.rollouts.group_members(played[0].index) == [row.index for row in played]
    assert of_ticket == {}
    assert Counter(row.step for row in rows if row.state == "trained") == dict.fromkeys(range(1, STEPS + 1), 8)

    assert run.batches() == list(range(1, STEPS + 1))
    for step in run.batches():
        assert encode(run.rollouts.batch(step)) == encode(run.batch(step)) != encode([])
    evaluated = run.rollouts.find(Query(domain="evaluation", limit=None)).rows
    assert Counter(row.step for row in evaluated) == {0: 3, 2: 3, 4: 3}
    assert {row.state for row in evaluated} == {"evaluated"}

    for row in [*rows, *evaluated]:
        played = run.rollouts.get(row.index)
        assert played.target == played.messages[0]["content"].rpartition(" ")[2][::-1]
        assert 0 < sum(turn.seconds for turn in played.turns) <= played.seconds
        (turn,) = played.turns
        assert 0 < turn.queued < turn.seconds
        assert 0 <= turn.started <= turn.started + turn.seconds <= played.seconds
        for token, logprob, ranked in zip(turn.completion_ids, turn.logprobs, turn.top, strict=True):
            assert [pair[1] for pair in ranked] == sorted((pair[1] for pair in ranked), reverse=True)
            assert dict(ranked).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
            assert len(ranked) == 3
    for step in run.batches():
        for place, sample in enumerate(run.batch(step)):
            scores = run.token_scores(step, place)
            assert len(scores) == trained_mask(sample).sum() > 0
            mu, versions = sample.logprobs[trained_mask(sample)], sample.versions[trained_mask(sample)]
            np.testing.assert_allclose(scores["logprob"][versions == step - 1], mu[versions == step - 1], atol=1e-3)
            assert (scores["entropy"] >= 0).all()
        assert run.token_scores(step, place + 1) is None
    assert run.token_scores(STEPS + 1, 0) is None
    told = run.rollouts.get(rows[0].index)
    line = read_jsonl(result.directory / "rollouts.jsonl")[0]
    assert told.messages == line["messages"] or rows[0].ticket != line["ticket"]
    lanes = run.lanes()
    assert {"sample", "score", "train", "publish", "eval"} <= {span.kind for span in lanes if span.lane == "run"}
    status = run.status()
    assert status.began is not None
    assert status.ended is not None
    assert all(status.began - 1 <= span.start <= span.end <= status.ended + 1 for span in lanes)
    keys = {entry.key for entry in run.changed_keys()}
    assert {"batch_size", "checkpoint.every", "eval.examples", "trainer.on_bad_step"} <= keys
    assert "max_inflight" not in keys


def test_a_run_that_does_not_want_a_record_has_none(tmp_path):
    config = RunConfig(
        runs=str(tmp_path),
        steps=1,
        batch_size=4,
        group_size=4,
        eval=EvalConfig(every=0),
        record=RecordConfig(all=False, rollouts=2),
    )
    run = open_run(session.train(config).directory)
    assert not (run.path / "record").exists()
    assert 0 < run.rollouts.count <= 3


WAITING = """
import time
import paceline
from paceline.envs.offloop import run_user_code
from paceline.envs.workers import Workers

GRADERS = Workers(1, kind="sandbox")

class Waiting(paceline.Environment):
    def examples(self, split):
        return [{"n": n} for n in range(4)]

    async def play(self, example, seats):
        reply = await seats["policy"].chat([{"role": "user", "content": f"say {example['n']}"}])
        await run_user_code(time.sleep, 1.5)
        await GRADERS.call("time:sleep", [0.3], 60)
        return paceline.Outcome.solo(len(reply.text) / 10)
"""


def test_sandboxes_and_user_code_are_spans_of_their_episode_and_lanes_of_the_run(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    env = CustomEnvConfig(name="waits", import_path=f"{tmp_path / 'waiting.py'}:Waiting")
    config = RunConfig(
        runs=str(tmp_path), steps=1, batch_size=4, group_size=4, env=[env], eval=EvalConfig(every=1, examples=1)
    )
    run = open_run(session.train(config).directory)
    rows = run.rollouts.find(Query(limit=None)).rows
    assert {row.domain for row in rows} == {"training", "evaluation"}
    for row in rows:
        played = run.rollouts.get(row.index)
        (code, began, took), (sandbox, later, waited) = played.spans
        assert (code, sandbox) == ("user code", "sandbox")
        ended = played.turns[0].started + played.turns[0].seconds
        assert ended <= began < began + 1.5 <= began + took <= later < later + 0.3 <= later + waited <= played.seconds
    # The run's own lanes are looked at now and then: of 5 seconds of waiting something is seen, not each kind for sure.
    busy = {span.lane for span in run.lanes() if span.kind == "calls"}
    assert busy <= {"user code", "sandbox"}
    assert busy
    shown = {lane["lane"]: lane["spans"] for lane in lanes(run, None, None, 100)["lanes"]}
    order = ["engine 0", "environment waits", "sandbox", "user code", "trainer", "publish", "evaluation"]
    assert list(shown) == [lane for lane in order if lane in shown]
    assert shown.keys() >= busy | {"trainer", "publish", "evaluation"}
    assert all(shown[lane][0][5].endswith("under way") for lane in busy)
