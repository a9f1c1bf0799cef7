"""`paceline diff --exact`: two runs that are the same have no difference, and a single change is named where it is."""

import json
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.commands import main
from paceline.config import EvalConfig, RunConfig
from paceline.config.inference import EngineConfig
from paceline.config.trainer import TrainerConfig
from paceline.data.sample import Sample
from paceline.observe.record import open_run
from paceline.observe.record.body import decode
from paceline.observe.record.first_difference import RunComparison, compare
from paceline.observe.record.layout import ROW, RecordFiles
from paceline.observe.record.rows import Query
from paceline.runtime import session

STEPS = 3


def trained(runs, name, **changes):
    config = RunConfig(
        name=name,
        runs=str(runs),
        deterministic=True,
        staleness=0,  # beyond it, when new weights come is a matter of timing
        steps=STEPS,
        batch_size=8,
        group_size=4,
        eval=EvalConfig(every=2, examples=2),
        engine=EngineConfig(max_running=8, max_context=64),
        **{"trainer": TrainerConfig(threads=1)} | changes,
    )
    return session.train(config).directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"), "one")


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "other")


def compared(one, other, tolerance=0.0) -> RunComparison:
    return compare(open_run(one), open_run(other), tolerance)


def test_a_deterministic_run_played_twice_has_no_difference(run):
    again = trained(run.parent, "again")
    found = compared(run, again)
    assert found.first is None
    assert found.settings == []
    assert found.steps == STEPS + 1
    assert found.rollouts == open_run(run).rollouts.count
    assert main(["diff", str(run), str(again), "--exact"]) == 0


def test_another_seed_is_a_setting_and_shows_in_what_is_drawn_or_said_first(run):
    found = compared(run, trained(run.parent, "seed", seed=1))
    assert [key for key, *_ in found.settings] == ["seed"]
    assert found.first is not None
    assert found.first.step == 0
    assert found.first.kind in ("row", "ticket", "prompt", "token", "logprob")


def test_another_learning_rate_shows_after_the_first_step_was_taken(run):
    found = compared(run, trained(run.parent, "rate", trainer=TrainerConfig(threads=1, optimizer={"lr": 1e-3})))
    assert "trainer.optimizer.lr" in [key for key, *_ in found.settings]
    assert found.first is not None
    assert (found.first.kind, found.first.what, found.first.step) == ("gradient", "`lr`", 1)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_single_sampled_token_is_found_wherever_it_is(run, tmp_path_factory, data):
    """One token of one rollout is another one: the very bytes of the record are changed."""
    other = shutil.copytree(run, tmp_path_factory.mktemp("mutated") / "other")
    rows = [row for row in open_run(other).rollouts.find(Query(limit=None)).rows if row.tokens]
    row = data.draw(st.sampled_from(rows))
    turn = open_run(other).rollouts.get(row.index).turns[0]
    at = data.draw(st.integers(0, len(turn.completion_ids) - 1))
    old = int(turn.completion_ids[at])
    new = old - 1 if old else 1
    mutate(other, row.index, at, new)
    first = compared(run, other).first
    assert first is not None
    assert (first.kind, first.turn, first.token, first.one, first.other) == ("token", 0, at, old, new)
    assert (first.step, first.ticket, first.member) == (row.step, row.ticket, row.member)
    assert first.indices == (row.index, row.index)


def mutate(folder, index, at, token):
    """Write another token into a body of the same size."""
    places = RecordFiles(folder)
    cells = np.fromfile(places.index, ROW)[index]
    data = bytearray(places.data.read_bytes())
    body = slice(int(cells["offset"]), int(cells["offset"] + cells["size"]))
    kept = decode(bytes(data[body]))
    kept.turn.completion_ids[at] = token
    changed = msgspec.msgpack.encode(kept)
    assert len(changed) == cells["size"]
    data[body] = changed
    places.data.write_bytes(bytes(data))


def change_metric(folder, step, name, factor):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step:
            line[name] = line[name] * factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_loss_comes_before_the_gradient_and_both_before_all_else(run, copy):
    change_metric(copy, 2, "entropy", 2)
    found = compared(run, copy).first
    assert found is not None
    assert (found.kind, found.what, found.step) == ("measure", "`entropy`", 2)
    change_metric(copy, 2, "grad_norm", 2)
    assert compared(run, copy).first.kind == "gradient"
    change_metric(copy, 2, "loss/rl", 2)
    assert compared(run, copy).first.kind == "loss"


def test_a_line_of_metrics_without_a_step_is_left_out(run, copy):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1.0}\n')
    assert compared(run, copy).first is None


def test_what_is_within_the_tolerance_is_the_same(run, copy):
    change_metric(copy, 2, "entropy", 1 + 1e-6)
    assert compared(run, copy).first is not None
    assert compared(run, copy, tolerance=1e-5).first is None


def test_a_run_that_ended_early_is_told_as_such(run, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:-1]))
    index = RecordFiles(copy).index
    rows = np.fromfile(index, ROW)
    index.write_bytes(rows[rows["step"] < STEPS].tobytes())
    found = compared(run, copy).first
    assert found is not None
    assert found.kind == "length"
    assert f"ends before step {STEPS}" in found.what


def test_a_gradient_is_named_before_the_evaluation_that_follows_it(run, copy):
    change_metric(copy, 2, "eval/reverse-text/reward", 2)
    assert compared(run, copy).first.what == "`eval/reverse-text/reward`"
    rows = [row for row in open_run(copy).rollouts.find(Query(step=(2, 2), domain="evaluation")).rows if row.tokens]
    turn = open_run(copy).rollouts.get(rows[0].index).turns[0]
    mutate(copy, rows[0].index, 0, int(turn.completion_ids[0]) - 1)
    assert compared(run, copy).first.kind == "token"
    change_metric(copy, 2, "grad_norm", 2)
    assert compared(run, copy).first.kind == "gradient"


def test_a_run_without_a_record_is_compared_by_what_was_measured_and_that_is_said(run, copy):
    shutil.rmtree(copy / "record")
    found = compared(run, copy)
    assert found.first is None
    assert "kept no record" in found.remarks[-1]


def test_a_body_that_cannot_be_read_is_a_remark(run, copy):
    data = RecordFiles(copy).data
    data.write_bytes(bytes(data.stat().st_size))
    found = compared(run, copy)
    assert found.first is None
    assert "without their tokens" in found.remarks[-1]


def test_credit_is_compared_stream_by_stream(run, copy, monkeypatch):
    real = Sample.streams

    def louder(self):
        streams = real(self)
        return streams | {"advantages": streams["advantages"] * 2} if id(self) in loud else streams

    loud: set[int] = set()
    mine, theirs = open_run(run), open_run(copy)
    get = theirs.rollouts.get

    def told(index):
        body = get(index)
        loud.update(map(id, body.samples))
        kept.extend(body.samples)
        return body

    kept: list[Sample] = []
    monkeypatch.setattr(theirs.rollouts, "get", told)
    monkeypatch.setattr(Sample, "streams", louder)
    found = compare(mine, theirs).first
    assert found is not None
    assert (found.kind, found.stream) == ("sample", "advantages")


def test_the_command_names_the_place_and_exits_with_1(run, copy, capsys):
    change_metric(copy, 1, "grad_norm", 3)
    assert main(["diff", str(run), str(copy), "--exact"]) == 1
    said = capsys.readouterr().out
    assert "grad_norm" in said
    assert "step 1" in said
    assert main(["diff", str(run), str(copy), "--exact", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["kind"] == "gradient"
