"""Reading a run directory: every filter is what plain Python would do, and whatever lies there opens."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from child_processes import Launched
from paceline.config import RunConfig, dump, load
from paceline.data import Ticket
from paceline.errors import PacelineError
from paceline.observe.monitor import RunDirectory, RunOutcome, RunPlan, RunRecorder
from paceline.observe.record import Query, RolloutRecorder, find_runs, open_run
from paceline.observe.record.folder import changed_keys
from paceline.rollout import Rollout, Turn, assemble

WORDS = ["Ärger", "Bridge", "castle", "DRAGON", "ember", "forest", "日本", "naïve", "straße"]
STATES = ("trained", "dropped:stale", "dropped:zero_advantage", "evaluated")


def rollout(dice: random.Random, number: int) -> Rollout:
    ids = [dice.randrange(50) for _ in range(dice.randint(1, 30))]
    turn = Turn(
        prompt_ids=[1, 2],
        completion_ids=ids,
        logprobs=[-1.0] * len(ids),
        versions=[number % 3] * len(ids),
        finish=dice.choice(["stop", "length"]),
        temperature=1.0,
        messages=[{"role": "user", "content": " ".join(dice.choices(WORDS, k=3))}],
        text=" ".join(dice.choices(WORDS, k=2)),
    )
    played = Rollout(
        ticket=Ticket(number // 4, dice.choice(["maths", "code"]), 0, number, number % 7),
        member=number % 4,
        actor=dice.choice(["first", "second"]),
        turns=[turn],
        reward=dice.choice([None, 0.0, 0.1, 0.5, 1.0]),
    )
    if played.reward is None:
        played.error = dice.choice(
            ["code: too slow (failures.timeout = drop)", "boom", "judge (failures.judge = drop)"]
        )
    else:
        played.samples = [s.with_streams(advantages=np.where(s.loss_mask, 0.5, 0)) for s in assemble(played)]
    return played


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filtered")
    (folder / "run.lock").touch()
    dice, number = random.Random(7), 0
    with RolloutRecorder(folder) as writer:
        writer.begin(RunPlan("run", folder, None, 0, {}, (), "cpu", 0))
        for step in range(1, 31):
            for state in STATES:
                count = dice.randint(0, 5)
                writer.finished_rollouts(step, state, [rollout(dice, number + place) for place in range(count)])
                number += count
    return open_run(folder)


def said(told) -> str:
    words = [message["content"] for message in told.messages] + [told.error or ""]
    return "\n".join(words).casefold()


def between(value, span) -> bool:
    low, high = span or (None, None)
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def ranges(values):
    end = st.none() | values
    return st.none() | st.tuples(end, end)


queries = st.builds(
    Query,
    env=st.none() | st.sampled_from(["maths", "code", "nowhere"]) | st.just(["maths", "code"]),
    actor=st.none() | st.sampled_from(["first", "second"]),
    step=ranges(st.integers(0, 32)),
    reward=ranges(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 1.0])),
    length=ranges(st.integers(0, 31)),
    error=st.none() | st.booleans() | st.sampled_from(["timeout", "judge", "episode", "other"]),
    state=st.none() | st.sampled_from([*STATES, "failed", "dropped:"]),
    finish=st.none() | st.just("length"),
    domain=st.none() | st.sampled_from(["training", "evaluation", "match"]),
    ticket=st.none() | st.integers(0, 60),
    row=st.none() | st.integers(0, 7),
    text=st.just("") | st.sampled_from([*WORDS, "STRASSE", "dragon ember", "o", "BOOM", "zebra"]),
    sort=st.sampled_from(["step", "-step", "reward", "-reward", "tokens", "-tokens", "-advantage", "ticket", "-time"]),
    offset=st.integers(0, 5),
    limit=st.none() | st.integers(0, 20),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(query=queries)
def test_every_filter_is_what_plain_python_would_do(run, query):
    everything = run.rollouts.find(Query(sort="step", limit=None)).rows
    wanted = []
    for row in everything:
        envs = [query.env] if isinstance(query.env, str) else query.env
        states = query.state is None or row.state == query.state
        states = states or (query.state.endswith(":") and row.state.startswith(query.state))
        error = query.error is None or (row.error == query.error if isinstance(query.error, str) else False)
        error = error or (isinstance(query.error, bool) and bool(row.error) == query.error)
        if (
            (envs is None or row.env in envs)
            and query.actor in (None, row.actor)
            and query.finish in (None, row.finish)
            and query.domain in (None, row.domain)
            and query.ticket in (None, row.ticket)
            and query.row in (None, row.row)
            and between(row.step, query.step)
            and between(row.tokens, query.length)
            and between(row.reward, query.reward)
            and states
            and error
            and query.text.casefold() in said(run.rollouts.get(row.index))
        ):
            wanted.append(row)
    column, down = query.sort.removeprefix("-"), query.sort.startswith("-")
    if column == "step":
        wanted = wanted[::-1] if down else wanted
    else:
        values = {row.index: getattr(row, column) for row in wanted}
        sign = -1 if down else 1
        wanted.sort(key=lambda row: (values[row.index] is None, sign * (values[row.index] or 0)))
    found = run.rollouts.find(query)
    assert found.total == len(wanted)
    assert found.rows == wanted[query.offset :][: query.limit]


def test_mates_share_a_ticket_and_an_episode_a_member(run):
    rows = run.rollouts.find(Query(sort="step", limit=None)).rows
    for row in rows:
        key = (row.step, row.env, row.ticket, row.domain)
        mates = [r.index for r in rows if (r.step, r.env, r.ticket, r.domain) == key]
        assert run.rollouts.group_members(row.index) == mates
        assert run.rollouts.episode(row.index) == [at for at in mates if rows[at].member == row.member]


def test_a_sort_that_does_not_exist_names_those_that_do(run):
    with pytest.raises(ValueError, match="choose one of step, reward"):
        run.rollouts.find(Query(sort="beauty"))


# -- whatever lies there ----------------------------------------------------------------------------------------------

WRITING = """
    import sys
    from pathlib import Path
    sys.path[:0] = sys.argv[2:]
    from paceline.observe.monitor import Monitors, RunRecorder, RunDirectory, RunPlan
    from paceline.observe.record import RolloutRecorder
    from test_record import spoken
    path = Path(sys.argv[1])
    with RunDirectory.claim(path) as directory:
        directory.begin("")
        monitors = Monitors(RunRecorder(path), RolloutRecorder(path))
        monitors.begin(RunPlan("run", path, 10, 0, {}, (), "cpu", 5))
        for step in range(1, 100000):
            monitors.step(step, {"loss": 1.0})
            monitors.finished_rollouts(step, "trained", [spoken(step)])
            print(step, flush=True)
"""


def test_a_run_killed_in_the_middle_opens(tmp_path):
    folder, here = tmp_path / "run", Path(__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(WRITING), str(folder), str(here), str(here.parents[1])]
    with Launched(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while open_or_none(folder) is None or not open_run(folder).rollouts.count:
            assert process.stdout.readline()
        assert open_run(folder).status().state == "running"
        os.kill(process.pid, signal.SIGKILL)
        process.stdout.read()
        process.wait(30)
    run = open_run(folder)
    status = run.status()
    assert (status.state, status.alive, status.ended, status.total_steps) == ("crashed", False, None, 10)
    assert status.step >= run.rollouts.count > 0
    assert all(run.rollouts.get(index).ticket.number == index + 1 for index in range(run.rollouts.count))
    assert run.problems() == []


def open_or_none(folder: Path):
    try:
        return open_run(folder)
    except PacelineError:
        return None


def test_a_run_says_how_it_is(tmp_path):
    folder, plan = tmp_path / "run", RunPlan("run", tmp_path / "run", 9, 0, {}, (), "cpu", 7)
    with RunDirectory.claim(folder) as directory:
        recorder = RunRecorder(folder)
        assert open_run(folder).status().state == "starting"
        directory.begin("")
        recorder.begin(plan)
        recorder.step(3, {"loss": 1.0})
        status = open_run(folder).status()
        assert (status.state, status.step, status.total_steps, status.device, status.alive) == (
            "running",
            3,
            9,
            "cpu",
            True,
        )
    assert open_run(folder).status().state == "crashed"
    recorder.end(RunOutcome("failed", 3, "no engine is left"))
    status = open_run(folder).status()
    assert (status.state, status.message, status.alive) == ("failed", "no engine is left", False)
    with RunDirectory.claim(folder, resume=True):
        recorder.phase("loading model")
        assert open_run(folder).status().state == "starting"
        recorder.begin(plan)
        assert open_run(folder).status().state == "running"
        recorder.end(RunOutcome("finished", 9))
    assert open_run(folder).status().state == "finished"
    assert find_runs(tmp_path) == find_runs(folder) == [folder]
    with pytest.raises(PacelineError, match="there is no run at"):
        open_run(tmp_path)


def test_a_run_on_another_machine_is_alive_while_its_snapshot_is_fresh(tmp_path):
    (tmp_path / "run.lock").touch()
    RunRecorder(tmp_path).begin(RunPlan("run", tmp_path, 9, 0, {}, (), "cpu", 7))
    snapshot = tmp_path / "waits.json"
    now = (tmp_path / "run.lock").stat().st_mtime
    for age, state in ((0, "running"), (3600, "crashed")):
        snapshot.write_text(json.dumps({"host": "far away", "time": now - age}))
        assert open_run(tmp_path).status().state == state


def test_an_old_run_opens_by_what_it_shows(tmp_path):
    dice = random.Random(3)
    played = [rollout(dice, number) for number in range(12)]
    recorder = RunRecorder(tmp_path)
    (tmp_path / "config.toml").write_text("")
    for step in (1, 2):
        recorder.rollouts(step, [r.record() for r in played[6 * step - 6 : 6 * step]])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('no json\n[1]\n{"step": "x", "messages": 3, "versions": {}, "reward": "much"}\n{"step": 2, "torn')
    run = open_run(tmp_path)
    assert not run.rollouts.keeps_all
    assert run.rollouts.count == 13
    assert run.problems() == ["rollouts.jsonl: 2 lines are damaged and left out, the first is line 13"]
    rows = run.rollouts.find(Query(step=(1, 2), sort="step", limit=None)).rows
    assert [row.ticket for row in rows] == [r.ticket.number for r in played]
    assert [row.reward for row in rows] == [r.reward for r in played]
    assert [run.rollouts.get(row.index).messages for row in rows] == [r.record()["messages"] for r in played]
    assert run.rollouts.find(Query(text="DRAGON")).total == sum("dragon" in str(r.record()).casefold() for r in played)
    assert run.batches() == []
    assert run.batch(1) == []
    assert run.lanes() == []


def test_metrics_are_columns_whatever_lines_lie_between(tmp_path):
    recorder = RunRecorder(tmp_path, clock=lambda: 5.0)
    (tmp_path / "config.toml").write_text("steps = [")
    recorder.step(0, {"eval": 0.5})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe garbage\n")
    recorder.step(1, {"loss": float("nan"), "reward": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    run = open_run(tmp_path)
    columns = {"step": [0, 1], "time": [5, 5], "eval": [0.5, None], "loss": [None, None], "reward": [None, 1]}
    assert run.metrics() == columns
    assert [problem.split(":")[0].split(" ")[0] for problem in run.problems()] == ["config.toml", "metrics.jsonl"]
    assert run.config() == {}
    assert run.changed_keys() == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'ss": 3}\n')
    assert run.metrics()["step"] == [0, 1, 2]  # read on from where it ended


lines = st.lists(
    st.fixed_dictionaries(
        {
            "number": st.integers(0, 9),
            "env": st.sampled_from(["a", "b"]),
            "epoch": st.just(0),
            "draw": st.integers(0, 9),
            "row": st.integers(0, 9),
            "state": st.sampled_from(["in flight", "buffered", "dropped"]),
            "since": st.integers(-1, 4),
        },
        optional={"reason": st.sampled_from(["stale", "zero_advantage"])},
    ),
    max_size=20,
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(lines, max_size=4), torn=st.booleans())
def test_tickets_tell_their_lives(tmp_path_factory, steps, torn):
    folder = tmp_path_factory.mktemp("tickets")
    (folder / "run.lock").touch()
    recorder, run = RunRecorder(folder), open_run(folder)
    records: list[dict] = []
    dropped: Counter = Counter()
    for step, batch in enumerate(steps, start=1):
        trained = {"number": 100 + step, "env": "a", "epoch": 0, "draw": 0, "row": 0, "state": "trained"}
        records += [*batch, trained | {"step": step, "since": -1}]
        dropped.update((r.get("reason", ""), step) for r in batch if r["state"] == "dropped")
        recorder.tickets([*batch, records[-1]])
        assert run.tickets.history(3) == [r for r in records if r["number"] == 3]
    if torn:
        with (folder / "tickets.jsonl").open("ab") as file:
            file.write(b'garbage\n{"number": 99999999999999999999}\n{"number": 3, "env"')
    assert run.tickets.history(3, "b") == [r for r in records if r["number"] == 3 and r["env"] == "b"]
    last = {record["number"]: record for record in records}
    for wanted in ({}, {"state": "dropped"}, {"env": "a", "reason": "stale"}):
        fits = [last[n] for n in sorted(last, reverse=True) if all(last[n].get(k) == v for k, v in wanted.items())]
        found = run.tickets.find(**wanted, offset=1, limit=3)
        assert (found.total, found.rows) == (len(fits), fits[1:4])
    told = {(reason, step): count for reason, pairs in run.tickets.dropped().items() for step, count in pairs}
    assert told == dict(dropped)
    assert bool(run.tickets.problems()) == torn


@pytest.mark.parametrize(
    "given_",
    [
        {},
        {"steps": 5, "seed": 3},
        {"batch_size": 16, "group_size": 4, "sampling": {"max_tokens": 33}},
        {"algo": {"type": "max_rl"}},
        {"env": [{"type": "reverse-text"}, {"type": "reverse-text", "name": "other", "group_size": 4}]},
    ],
    ids=str,
)
def test_what_differs_from_the_defaults_is_enough_to_say_the_run(given_):
    config = RunConfig.model_validate(given_)
    found = changed_keys(json.loads(config.model_dump_json(exclude_none=True)))
    keys = {entry.key for entry in found}
    flat = {key for key in given_ if not isinstance(given_[key], dict | list)}
    assert flat <= keys
    assert ("sampling.max_tokens" in keys) == ("sampling" in given_)
    assert ("env[1].name" in keys) == ("env" in given_)
    assert not keys & {"max_inflight", "env[0].algo.type", "env[0].group_size", "env[0].name"}
    if not given_:
        assert found == []
    assert load(None).config == RunConfig()
    assert dump(config)
    assert all(asdict(entry)["value"] != entry.default for entry in found)
