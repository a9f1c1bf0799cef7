"""The record's laws: what is written is what is read, whatever was said, wherever files end, and while others read."""

import logging
import math
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data import Sample, Ticket, encode
from paceline.data.sample import TOKEN_SCORE, TokenScores
from paceline.errors import PacelineError
from paceline.observe.monitor import Monitors, RunPlan, RunRecorder
from paceline.observe.record import Query, RolloutNotFound, RolloutRecorder, body, open_run
from paceline.observe.record import rollout_recorder as keeper
from paceline.observe.record.layout import ROW, RecordWriter
from paceline.rollout import Rollout, Turn, assemble

FILES = ("rollouts.index", "rollouts.data", "rollouts.text", "names.jsonl")


def kept(folder: Path, start: int = 0) -> RolloutRecorder:
    folder.mkdir(exist_ok=True)
    (folder / "run.lock").touch()
    writer = RolloutRecorder(folder)
    writer.begin(RunPlan("run", folder, None, start, {}, ("env",), "cpu", 0))
    return writer


def scores_of(step: int) -> TokenScores:
    """Of two samples; the one between them has no token that trains."""
    return TokenScores.of({place: np.array([(-step, 0.5, 1)] * (place + 1), TOKEN_SCORE) for place in (0, 2)})


@pytest.mark.parametrize("damaged", ["scores.index", "scores.data"])
def test_scores_are_read_back_cut_with_the_steps_and_survive_a_torn_end(tmp_path, damaged):
    folder = tmp_path / "run"
    writer = kept(folder)
    for step in (1, 2, 3, 4):
        writer.token_scores(step, scores_of(step))
    writer.roll_back(3)
    writer.close()
    run = open_run(folder)
    for step in (1, 2, 3):
        assert run.token_scores(step, 2).tolist() == [(-step, 0.5, 1)] * 3
        assert run.token_scores(step, 1) is None
    assert run.token_scores(4, 0) is run.token_scores(0, 0) is None
    path = folder / "record" / damaged
    path.write_bytes(path.read_bytes()[:-1])
    assert run.token_scores(3, 2) is None
    assert run.token_scores(2, 0) is not None
    writer = kept(folder, 2)
    writer.token_scores(3, scores_of(7))
    writer.close()
    assert run.token_scores(3, 0).tolist() == [(-7, 0.5, 1)]
    assert run.token_scores(2, 0).tolist() == [(-2, 0.5, 1)]


def spoken(seed: int, turns: int = 1, text: str = "so be it") -> Rollout:
    """A rollout of turns that go on from one another."""
    dice = np.random.default_rng(seed)
    prompt, messages, said = [1, 2, seed % 100], [{"role": "user", "content": f"question {seed}"}], []
    for number in range(turns):
        ids = dice.integers(3, 9000, dice.integers(1, 30)).tolist()
        said.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=ids,
                logprobs=(-dice.exponential(1.0, len(ids))).astype(np.float32).tolist(),
                versions=dice.integers(0, 2, len(ids)).tolist(),
                finish="stop",
                temperature=0.7,
                messages=messages,
                text=f"{text} {number}",
            )
        )
        prompt = [*prompt, *ids, 7, 8]
        messages = [*messages, said[-1].message, {"role": "tool", "content": f"told {number}"}]
    ticket = Ticket(seed, "env", 0, seed, seed)
    rollout = Rollout(ticket=ticket, member=seed % 4, turns=said, reward=float(seed), metrics={"right": 1.0})
    rollout.samples = [
        sample.with_streams(advantages=np.where(sample.loss_mask, dice.normal(), 0)) for sample in assemble(rollout)
    ]
    return rollout


def same(told, rollout: Rollout) -> bool:
    """Whether everything of a rollout came back, samples bit for bit."""
    assert told.ticket == rollout.ticket
    assert (told.row.member, told.row.actor, told.row.kind) == (rollout.member, rollout.actor, rollout.kind)
    assert (told.parent, told.error, told.metrics) == (rollout.parent, rollout.error, rollout.metrics)
    assert (told.target, told.seconds, told.spans) == (rollout.target, rollout.seconds, rollout.spans)
    assert [(turn.seconds, turn.queued) for turn in told.turns] == [(t.seconds, t.queued) for t in rollout.turns]
    assert told.reward == rollout.reward or (math.isnan(told.reward) and math.isnan(rollout.reward))
    assert len(told.turns) == len(rollout.turns)
    for back, turn in zip(told.turns, rollout.turns, strict=True):
        assert back.prompt_ids.tolist() == turn.prompt_ids
        assert back.completion_ids.tolist() == turn.completion_ids
        assert back.versions.tolist() == turn.versions
        assert back.logprobs.tobytes() == np.asarray(turn.logprobs, np.float32).tobytes()
        assert (back.finish, back.temperature, back.recomputed) == (turn.finish, turn.temperature, turn.recomputed)
        assert (back.text, back.said, back.tools) == (turn.text, turn.said, turn.tools)
        assert (back.messages, back.weights) == (turn.messages, dict(turn.weights))
        assert (back.log_z is None) == (turn.log_z is None)
    assert encode(told.samples) == encode(rollout.samples)
    return True


# -- what is written is what is read ----------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=20) | st.lists(values)}
) | st.dictionaries(st.text(max_size=6), values, max_size=3)
number = st.floats(width=32, allow_nan=False)


@st.composite
def rollouts(draw) -> Rollout:
    turns: list[Turn] = []
    for place in range(draw(st.integers(0, 4))):
        prompt, messages = draw(st.lists(st.integers(0, 50), max_size=60)), draw(st.lists(message, max_size=3))
        if turns and draw(st.booleans()):  # as a conversation goes on, or a branch of it
            past = turns[draw(st.integers(0, place - 1))]
            cut = draw(st.integers(0, 3))
            prompt = [*past.prompt_ids, *past.completion_ids][: -cut or None] + prompt
            messages = [*(past.messages or []), past.message, *messages]
        ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=40))
        one = draw(st.booleans())
        turns.append(
            Turn(
                prompt_ids=prompt or [0],
                completion_ids=ids,
                logprobs=draw(st.lists(number, min_size=len(ids), max_size=len(ids))),
                versions=[3] * len(ids)
                if one
                else draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids))),
                log_z=draw(st.none() | st.just([-0.5] * len(ids))),
                finish=draw(st.sampled_from(["stop", "length"])),
                temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
                recomputed=draw(st.booleans()),
                weights=draw(st.dictionaries(st.integers(0, 9), st.text(max_size=4), max_size=2)),
                messages=draw(st.sampled_from([messages, messages, None])),
                tools=draw(st.none() | st.lists(st.just({"type": "function"}), max_size=2)),
                text=draw(st.text(max_size=20)),
                said=draw(st.none() | st.just({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]})),
                seconds=draw(st.floats(0, 99)),
                queued=draw(st.floats(0, 9)),
            )
        )
    names = st.text(st.characters(codec="utf-8"), max_size=6)
    rollout = Rollout(
        ticket=Ticket(draw(st.integers(0, 2**40)), draw(names), 1, 2, draw(st.integers(0, 2**40))),
        member=draw(st.integers(0, 99)),
        actor=draw(names),
        kind=draw(names),
        parent=draw(names),
        turns=turns,
        reward=draw(st.none() | st.floats()),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3)),
        error=draw(st.none() | st.text(max_size=20)),
        target=draw(st.text(max_size=9)),
        seconds=draw(st.floats(0, 99)),
        spans=draw(st.lists(st.tuples(st.text(max_size=4), st.floats(0, 99), st.floats(0, 99)), max_size=2)),
    )
    rollout.samples = [changed(draw, sample) for sample in assemble(rollout)]
    return rollout


def changed(draw, sample: Sample) -> Sample:
    """With streams that come in later, and sometimes cut, masked or made from scratch."""
    dice, length = np.random.default_rng(draw(st.integers(0, 99))), len(sample)
    streams = {}
    for name in draw(st.sets(st.sampled_from(["advantages", "rewards", "teacher_logprobs", "kl_ref_logprobs"]))):
        streams[name] = dice.normal(size=length) if draw(st.booleans()) else np.where(sample.loss_mask, 0.5, 0)
    for name in draw(st.sets(st.sampled_from(["rl_weights", "ce_weights", "teacher_kl_weights"]))):
        streams[name] = np.where(np.arange(length) > 0, dice.integers(0, 2, length), 0)
    if draw(st.booleans()):
        streams["logprobs"] = draw(st.sampled_from([None, dice.normal(size=length)]))
    sample = sample.with_streams(**streams)
    if draw(st.booleans()):
        sample = sample.truncated_to(draw(st.integers(1, length)))
    return replace(sample, ticket=None) if draw(st.booleans()) else sample


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(played=st.lists(rollouts(), max_size=4), state=st.sampled_from(["trained", "dropped:stale", "evaluated"]))
def test_what_is_written_is_what_is_read(tmp_path_factory, played, state):
    folder = tmp_path_factory.mktemp("run")
    with kept(folder) as writer:
        writer.finished_rollouts(3, state, played)
    run = open_run(folder)
    assert run.rollouts.count == len(played)
    assert run.problems() == []
    for place, rollout in enumerate(played):
        told = run.rollouts.get(place)
        assert same(told, rollout)
        assert told.row.tokens == rollout.completion_length
        assert (told.row.step, told.row.env, told.row.ticket) == (3, rollout.env, rollout.ticket.number)
    shutil.rmtree(folder)


@pytest.mark.parametrize("turns", [1, 3])
def test_streams_of_an_earlier_version_are_read_under_their_names_of_today(tmp_path, monkeypatch, turns):
    rollout = spoken(4, turns)
    scores = [np.where(s.loss_mask, -0.5, 0).astype(np.float32) for s in rollout.samples]
    rollout.samples = [
        s.with_streams(teacher_logprobs=x, kl_ref_logprobs=2 * x) for s, x in zip(rollout.samples, scores, strict=True)
    ]

    def earlier(rollout: Rollout) -> tuple:
        data, messages = body.encode(rollout)
        data = data.replace(b"\xb0teacher_logprobs", b"\xacref_logprobs")
        return data.replace(b"\xafkl_ref_logprobs", b"\xadbase_logprobs"), messages

    monkeypatch.setattr(keeper, "encode", earlier)
    with kept(tmp_path / "run") as writer:
        writer.finished_rollouts(3, "trained", [rollout])
    told = open_run(tmp_path / "run").rollouts.get(0)
    assert b"base_logprobs" in (tmp_path / "run" / "record" / "rollouts.data").read_bytes()
    for sample, x in zip(told.samples, scores, strict=True):
        assert sample.teacher_logprobs.tolist() == x.tolist()
        assert sample.kl_ref_logprobs.tolist() == (2 * x).tolist()


@pytest.mark.parametrize("turns", [1, 3])
def test_a_record_of_an_earlier_version_has_neither_target_nor_durations_and_all_else(tmp_path, monkeypatch, turns):
    rollout = spoken(4, turns)

    def earlier(rollout: Rollout) -> tuple:
        data, messages = body.encode(rollout)
        *fields, _, _, _ = msgspec.msgpack.decode(data)  # the form, eight fields, a turn or turns, samples, verdicts
        assert len(fields) == 12
        fields[9] = fields[9][:-4] if fields[0] == 2 else [turn[:-4] for turn in fields[9]]
        return msgspec.msgpack.encode(fields), messages

    monkeypatch.setattr(keeper, "encode", earlier)
    with kept(tmp_path / "run") as writer:
        writer.finished_rollouts(3, "trained", [rollout])
    assert same(open_run(tmp_path / "run").rollouts.get(0), rollout)


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no comment")


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "content",
    [
        "half a \ud83d character",
        {"\udc00": 2**80},
        "x" * 10_000_000,
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}],
        nested(100_000),
        [Mute(), object(), {1, 2}, np.float32(1.5), np.arange(3), b"bytes"],
        math.nan,
        {(1, 2): "a key"},
    ],
    ids=["surrogate", "huge number", "ten megabytes", "image", "deep", "objects", "nan", "strange key"],
)
def test_whatever_was_said_its_rollout_is_kept_and_so_are_others(tmp_path, content):
    odd, plain = spoken(1), spoken(2)
    turn = odd.turns[0]
    odd.turns = [replace(turn, messages=[{"role": "user", "content": content}, {"role": "user", "content": "needle"}])]
    with kept(tmp_path) as writer:
        writer.finished_rollouts(1, "trained", [odd, plain])
    run = open_run(tmp_path)
    told = run.rollouts.get(0)
    assert told.row.whole
    assert told.messages[1] == {"role": "user", "content": "needle"}
    assert encode(told.samples) == encode(odd.samples)
    assert same(run.rollouts.get(1), plain)
    assert [row.index for row in run.rollouts.find(Query(text="so be it")).rows if row.index == 1] == [1]
    for text in [str(told.messages), *run.rollouts.names("env")]:
        text.encode()


def test_numbers_that_are_none_are_told_as_none(tmp_path):
    rollout = spoken(1)
    rollout.reward = math.nan
    with kept(tmp_path) as writer:
        writer.finished_rollouts(1, "trained", [rollout])
    row = open_run(tmp_path).rollouts.row(0)
    assert row.reward is None
    assert row.advantage is not None


# -- wherever the files end -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps of four rollouts, each written by itself, and what they were."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    played = [spoken(number, turns=1 + number % 3) for number in range(24)]
    with kept(folder) as writer:
        for step in range(1, 7):
            for rollout in played[4 * step - 4 : 4 * step]:
                rollout.actor = f"actor {step}"
            writer.finished_rollouts(step, "trained", played[4 * step - 4 : 4 * step])
    return folder, played


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(file=st.sampled_from(FILES), share=st.floats(0, 1), again=st.booleans())
def test_cut_anywhere_it_is_a_readable_prefix(whole, tmp_path_factory, file, share, again):
    source, played = whole
    folder = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(source, folder)
    path = folder / "record" / file
    os.truncate(path, int(share * path.stat().st_size))
    run = open_run(folder)
    count = run.rollouts.count
    assert all(same(run.rollouts.get(place), played[place]) for place in range(count))
    assert run.rollouts.find(Query(text="so be it", limit=None)).total == count
    with pytest.raises(RolloutNotFound, match="there is no rollout"):
        run.rollouts.get(count)
    assert bool(run.problems()) == (count < (folder / "record" / FILES[0]).stat().st_size // ROW.itemsize)
    if again:  # a run that resumes from here has lost the tail and nothing else
        writer = RolloutRecorder(folder)
        writer.begin(RunPlan("run", folder, None, 6, {}, (), "cpu", 0))
        writer.finished_rollouts(7, "trained", [played[0]])
        writer.close()
        assert run.rollouts.count == count + 1
        assert run.problems() == []
        assert all(same(run.rollouts.get(place), played[place]) for place in range(count))
        assert run.rollouts.row(count).actor == "actor 1"
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("step", range(8))
def test_going_back_leaves_exactly_the_steps_before(whole, tmp_path, step):
    source, played = whole
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    run = open_run(folder)
    before = run.rollouts.view()
    with RolloutRecorder(folder) as writer:
        writer.begin(RunPlan("run", folder, None, 6, {}, (), "cpu", 0))
        writer.roll_back(step)
        writer.finished_rollouts(step + 1, "trained", [played[-1]])
    left = played[: 4 * min(step, 6)]
    assert run.rollouts.count == len(left) + 1
    assert all(same(run.rollouts.get(place), rollout) for place, rollout in enumerate([*left, played[-1]]))
    assert before.rows["step"].tolist() == [1 + place // 4 for place in range(24)]  # who looked before still sees it
    assert before.is_fresh == (step >= 6)
    sizes = {path.name: path.stat().st_size for path in (folder / "record").iterdir()}
    last = run.rollouts.view().rows[-1]
    assert sizes["rollouts.data"] == last["offset"] + last["size"]
    assert sizes["rollouts.text"] == last["text_offset"] + last["text_size"]


def test_a_run_that_begins_anew_keeps_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    kept(folder, start=0).close()
    assert open_run(folder).rollouts.count == 0
    assert open_run(folder).lanes() == []


# -- concurrent readers -----------------------------------------------------------------------------------------------


def test_readers_see_whole_rollouts_while_the_run_goes_on_and_goes_back(tmp_path):
    played = [spoken(number) for number in range(8)]
    writer = kept(tmp_path)
    over, failures = threading.Event(), []

    def read() -> None:
        run = open_run(tmp_path)
        try:
            while not over.is_set():
                for row in run.rollouts.find(Query(text="so be it", limit=5)).rows:
                    try:
                        told = run.rollouts.get(row.index)
                    except RolloutNotFound:  # the run went back in between
                        continue
                    assert same(told, played[told.ticket.number])
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    back = 0
    for again in range(12):
        for step in range(back + 1, 9):
            writer.finished_rollouts(step, "trained", played)
        writer.roll_back(back := again % 4 + 1)
    writer.close()
    over.set()
    for reader in readers:
        reader.join(240)
    assert failures == []
    assert open_run(tmp_path).rollouts.count == 8 * 4


def test_bodies_are_left_out_when_the_disk_is_slow_and_rows_never(tmp_path, monkeypatch, caplog):
    gate, real = threading.Event(), RecordWriter.append

    def slow(self, *chunks) -> None:
        assert gate.wait(240)
        real(self, *chunks)

    monkeypatch.setattr(RecordWriter, "append", slow)
    monkeypatch.setattr(keeper, "MOST_QUEUED_TOKENS", 60)
    played = [spoken(number) for number in range(20)]
    with kept(tmp_path) as writer, caplog.at_level(logging.WARNING, "paceline.observe.record"):
        for step, rollout in enumerate(played, start=1):
            writer.finished_rollouts(step, "trained", [rollout])
        assert writer.waiting_tokens <= 60 + max(len(r.turns[0].prompt_ids) + r.completion_length for r in played)
        gate.set()
    assert [record.message for record in caplog.records if "falls behind" in record.message] == [
        caplog.records[0].message
    ]
    run = open_run(tmp_path)
    assert run.rollouts.count == 20
    rows = run.rollouts.find(Query(sort="step", limit=None)).rows
    assert [row.ticket for row in rows] == list(range(20))
    assert 0 < sum(row.whole for row in rows) < 20
    assert [row.advantage for row in rows] == [
        pytest.approx(keeper.rollout_facts(r, "trained").advantage) for r in played
    ]
    for row in rows:
        told = run.rollouts.get(row.index)
        assert same(told, played[row.index]) if row.whole else told.messages == []


def test_a_record_that_cannot_be_written_ends_and_the_run_hears_of_it(tmp_path, monkeypatch, caplog):
    real = RecordWriter.append

    def full(self, rows, data, text) -> None:
        if len(self.rows()) >= 3:
            raise OSError(28, "No space left on device")
        real(self, rows, data, text)

    monkeypatch.setattr(RecordWriter, "append", full)
    with kept(tmp_path) as writer, caplog.at_level(logging.WARNING, "paceline.observe.record"):
        writer.finished_rollouts(1, "trained", [spoken(1)] * 3)
        while writer.waiting_tokens:  # what comes meanwhile would be written with it
            time.sleep(0.001)
        for step in range(2, 9):
            writer.finished_rollouts(step, "trained", [spoken(step)])
    assert [record.message for record in caplog.records] == [
        "the record ends here, and the run goes on without it: No space left on device"
    ]
    assert open_run(tmp_path).rollouts.count == 3


@pytest.mark.parametrize("urgent", ["a batch", "a way back", "the end"])
def test_dropped_groups_wait_for_one_another_until_something_is_urgent(tmp_path, monkeypatch, urgent):
    monkeypatch.setattr(keeper, "GATHER_SECONDS", 3600.0)
    with kept(tmp_path) as writer:
        for number in range(5):
            writer.finished_rollouts(2, "dropped:zero_advantage", [spoken(number)])
        if urgent == "a batch":
            writer.finished_rollouts(2, "trained", [spoken(7)])
        elif urgent == "a way back":
            writer.roll_back(2)
        while urgent != "the end" and writer.waiting_tokens:
            time.sleep(0.001)
    run = open_run(tmp_path)
    states = [row.state for row in run.rollouts.find(Query(sort="step", limit=100)).rows]
    assert states == ["dropped:zero_advantage"] * 5 + ["trained"] * (urgent == "a batch")


def test_a_record_leaves_room_on_the_disk_for_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keeper, "RESERVED_DISK_BYTES", 1 << 62)
    with kept(tmp_path) as writer, caplog.at_level(logging.WARNING, "paceline.observe.record"):
        writer.finished_rollouts(1, "trained", [spoken(1)])
    assert [record.message.rpartition(": ")[2].partition(" ")[0] for record in caplog.records] == ["less"]
    assert open_run(tmp_path).rollouts.count == 0


def test_a_record_of_another_schema_is_named_and_left_alone(tmp_path):
    with kept(tmp_path) as writer:
        writer.finished_rollouts(1, "trained", [spoken(1)])
    RunRecorder(tmp_path).rollouts(1, [spoken(1).record()])
    (tmp_path / "record" / "schema.json").write_text('{"schema": 99}')
    before = {path: path.read_bytes() for path in (tmp_path / "record").iterdir()}
    run = open_run(tmp_path)
    assert any("schema 99" in problem for problem in run.problems())
    assert run.rollouts.count == 1  # what rollouts.jsonl shows
    assert run.lanes() == []
    with pytest.raises(PacelineError, match="schema 99"):
        RecordWriter(tmp_path)
    recorder = RunRecorder(tmp_path)
    with Monitors(recorder, RolloutRecorder(tmp_path)) as monitors:
        monitors.begin(RunPlan("run", tmp_path, None, 1, {}, (), "cpu", 0))
        monitors.finished_rollouts(2, "trained", [spoken(2)])
    assert any("schema 99" in event.get("text", "") for event in run.events())
    assert {path: path.read_bytes() for path in (tmp_path / "record").iterdir()} == before
