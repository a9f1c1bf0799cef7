"""Laws of the doors: other people's code runs off the loop, fails alone, and is asked what its contract says."""

import asyncio
import contextvars
import json
import sys
import textwrap
import threading

import pytest

import child_processes
from paceline.config import ConfigError, RunConfig
from paceline.config.env import CustomEnvConfig, ModuleEnvConfig, ReasoningGymConfig
from paceline.config.inference import SamplingConfig
from paceline.data import DataError, Ticket
from paceline.envs.base import EnvError
from paceline.envs.custom import ModuleEnvironment
from paceline.envs.offloop import UserCodeThreadPool, run_user_code
from paceline.envs.reasoning_gym import split_by_weight
from paceline.orchestrator import Clock, build_train_envs
from paceline.orchestrator.episodes import RolloutRunner
from paceline.rollout import SamplingClient
from paceline.util.importing import HookError, import_object
from real_seats import stage as open_stage

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


@pytest.fixture(scope="module")
def stage():
    with open_stage() as running:
        yield running


# --- off the loop


def here(*args):
    return threading.current_thread(), args, VARIABLE.get()


async def here_async(*args):
    return here(*args)


class Callable:
    async def __call__(self, *args):
        return here(*args)


@pytest.mark.parametrize("function", [here, here_async, lambda *args: here_async(*args), Callable()])
def test_sync_code_leaves_the_loop_async_code_stays_and_both_see_the_callers_context(function):
    async def call():
        VARIABLE.set("the caller's")
        return await run_user_code(function, 1, 2)

    thread, args, seen = asyncio.run(call())
    assert (args, seen) == ((1, 2), "the caller's")
    assert (thread is threading.current_thread()) == (function is not here)


def test_many_sleeping_tools_run_at_once_and_the_loop_goes_on():
    """Two thousand calls that each wait until three hundred others have started: no smaller pool lets them through."""
    started, together = [], threading.Event()

    def tool():
        started.append(1)
        if len(started) >= 300:
            together.set()
        assert together.wait(60)
        return 1

    async def calls():
        ticks = 0
        waiting = asyncio.gather(*(run_user_code(tool) for _ in range(2000)))
        while not waiting.done():
            ticks += 1
            await asyncio.sleep(0)
        return sum(await waiting), ticks

    total, ticks = asyncio.run(calls())
    assert total == len(started) == 2000
    assert ticks > 1


def raiser(error):
    def sync():
        raise error

    async def coroutine():
        raise error

    return [sync, coroutine]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
def test_code_that_ends_the_process_ends_only_its_call(error, kind):
    with pytest.raises(EnvError, match=rf"tried to end the process \({type(error).__name__}"):
        asyncio.run(run_user_code(raiser(error)[kind]))


@pytest.mark.parametrize("error", [ValueError("a"), TimeoutError("its own"), KeyError("b")], ids=repr)
@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
def test_an_error_comes_back_as_it_was_raised(error, kind):
    with pytest.raises(type(error)) as caught:
        asyncio.run(run_user_code(raiser(error)[kind], timeout=60))
    assert caught.value is error


def test_a_cancellation_or_a_stop_of_its_own_does_not_pass_for_the_callers():
    for error, kind in ((asyncio.CancelledError(), EnvError), (StopIteration(), RuntimeError)):
        with pytest.raises(kind):
            asyncio.run(run_user_code(raiser(error)[0]))


def test_a_call_that_hangs_times_out_with_its_name_and_gives_its_place_away():
    release, started = threading.Event(), threading.Semaphore(0)

    def hang():
        started.release()
        release.wait(60)

    async def calls():
        threads = UserCodeThreadPool(limit=2, max_abandoned=3)
        lost = []
        for _ in range(3):
            lost.append(asyncio.create_task(threads.run(hang, ())))
            assert await asyncio.to_thread(started.acquire, timeout=60)
            lost[-1].cancel()
        await asyncio.wait(lost)
        with pytest.raises(EnvError, match="3 calls of user code never came back"):
            await threads.run(here, ())
        release.set()
        while True:  # once they do come back, their places are there again
            try:
                return await threads.run(here, (1,))
            except EnvError:
                await asyncio.sleep(0.001)

    assert asyncio.run(calls())[1] == (1,)
    release.clear()
    try:
        with pytest.raises(TimeoutError, match=r"`.*hang` took longer than 0.01 s"):
            asyncio.run(run_user_code(hang, timeout=0.01))
        with pytest.raises(TimeoutError, match=r"took longer than 0.01 s"):
            asyncio.run(run_user_code(asyncio.sleep, 60, timeout=0.01))
    finally:
        release.set()


def test_calls_beyond_the_limit_wait_and_an_abandoned_one_in_line_never_runs():
    ran, release = [], threading.Event()

    def block():
        release.wait(60)
        ran.append("block")

    async def calls():
        threads = UserCodeThreadPool(limit=1)
        first = asyncio.create_task(threads.run(block, ()))
        second = asyncio.create_task(threads.run(ran.append, ("second",)))
        third = asyncio.create_task(threads.run(ran.append, ("third",)))
        await asyncio.sleep(0.01)
        assert ran == []
        second.cancel()
        await asyncio.wait([second])  # a cancellation arrives with the next turn of the loop, not before
        release.set()
        await asyncio.wait([first, third])

    asyncio.run(calls())
    assert ran == ["block", "third"]


def test_the_process_ends_while_a_call_hangs():
    code = """
    import asyncio, threading
    from paceline.envs.offloop import run_user_code
    try:
        asyncio.run(run_user_code(threading.Event().wait, timeout=0.01))
    except TimeoutError as error:
        print(error)
    """
    done = child_processes.run([sys.executable, "-c", textwrap.dedent(code)], timeout=240)
    assert (done.returncode, done.stdout) == (0, "`Event.wait` took longer than 0.01 s\n")


# --- a module

MODULE = """
import asyncio

seen = []
state = {}
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

def interact(messages):
    state[id(messages)] = state.get(id(messages), 0) + 1
    if messages[-1]["role"] != "assistant":
        raise ValueError("called out of turn")
    what = messages[0]["content"]
    if what == "stop":
        return []
    if what == "nonsense":
        return "more"
    if what == "half":
        return [{"content": "no role"}]
    if what == "number":
        return [{"role": "tool", "content": 3}]
    if what == "raise":
        raise KeyError("lost")
    if what == "exit":
        exit(1)
    if what == "hang":
        import time
        time.sleep(30)
    return [{"role": "tool", "content": f"{len(messages)}"}, {"role": "user", "content": "go on"}]

async def reward_fn(messages, answer):
    await asyncio.sleep(0)
    seen.append((id(messages), [m["role"] for m in messages], state.get(id(messages), 0), answer))
    return {"yes": True, "half": 0.5, "drop": None, "word": "word"}[answer if isinstance(answer, str) else answer[0]]

def cleanup(messages):
    state.pop(id(messages), None)
"""
A_TURN = ["assistant"]
AN_ANSWER = ["tool", "user", "assistant"]


@pytest.fixture
def module(tmp_path):
    """Builds an environment around a module's text; rows are (question, answer)."""

    def build(rows, text=MODULE, **settings):
        file = tmp_path / "task.py"
        file.write_text(text)
        data = tmp_path / "rows.jsonl"
        asked = [{"messages": [{"role": "user", "content": q}], "answer": a} for q, a in rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in asked))
        environment = ModuleEnvironment(ModuleEnvConfig(module=str(file), dataset=str(data), **settings))
        name = ModuleEnvironment(ModuleEnvConfig(module=str(file), dataset=str(data), **settings))._functions[
            "reward_fn"
        ]
        return environment, sys.modules[name.__module__]

    return build


def play(stage, environment, split="train"):
    rows = environment.examples(split)
    return stage.play(*(lambda table, row=row: environment.play(row, table) for row in rows))


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_interact_speaks_between_turns_and_never_after_the_last(stage, module, turns):
    environment, code = module([("hi", "yes"), ("stop", ["half", "more"])], max_turns=turns)
    (first, table), (second, _) = play(stage, environment)
    assert (first.rewards, first.metrics) == ({"policy": 1.0}, {"turns": turns})
    assert (second.rewards, second.metrics) == ({"policy": 0.5}, {"turns": 1})
    roles = {answer if isinstance(answer, str) else answer[0]: (said, calls) for _, said, calls, answer in code.seen}
    assert roles["yes"] == (["user", *A_TURN, *AN_ANSWER * (turns - 1)], turns - 1)
    assert roles["half"] == (["user", *A_TURN], min(1, turns - 1))
    assert len(table["policy"].turns) == turns
    assert all(turn.tools == code.tools for turn in table["policy"].turns)


def test_state_under_the_conversations_id_lives_as_long_as_its_episode(stage, module):
    """The same list throughout, another for each episode, and forgotten even when the episode fails."""
    environment, code = module([("hi", "yes"), ("hi", "yes"), ("raise", "yes"), ("hi", "drop")], max_turns=3)
    ends = play(stage, environment)
    assert {calls for _, _, calls, _ in code.seen} == {2}
    assert len({which for which, *_ in code.seen}) == 3
    assert code.state == {}
    assert ends[3][0] is None


@pytest.mark.parametrize(
    ("asked", "answer", "says"),
    [
        ("raise", "yes", r"task\.py: interact raised KeyError: 'lost'"),
        ("exit", "yes", r"task\.py: interact raised EnvError: `interact` tried to end the process \(SystemExit: 1\)"),
        (
            "hang",
            "yes",
            r"interact raised TimeoutError: `interact` took longer than 1 s: raise `call_timeout` in \[\[env\]\]",
        ),
        ("nonsense", "yes", r"task\.py: interact returned 'more': `messages` must be a list of messages, not str"),
        ("half", "yes", r"task\.py: interact returned .*no role.*: messages\[0\] has no `role`"),
        ("number", "yes", r"task\.py: interact returned .*: messages\[0\]: `content` must be text, not int"),
        ("stop", "word", r"task\.py: reward_fn returned 'word': return a number"),
        ("stop", "typo", r"task\.py: reward_fn raised KeyError: 'typo'"),
    ],
)
def test_an_error_in_a_module_names_file_and_function(stage, module, asked, answer, says):
    environment, _ = module([(asked, answer), ("hi", "yes")], max_turns=2, call_timeout=1.0 if asked == "hang" else 30)
    (failed, _), (fine, _) = play(stage, environment)
    with pytest.raises(EnvError, match=says):
        raise failed
    assert fine.rewards == {"policy": 1.0}


def test_a_module_without_interact_is_one_turn(stage, module):
    environment, _ = module([("hi", "there")], text="def reward_fn(messages, answer):\n    return answer == 'there'")
    ((outcome, table),) = play(stage, environment)
    assert (outcome.rewards, outcome.metrics) == ({"policy": 1.0}, {"turns": 1})
    assert table["policy"].turns[0].tools is None
    assert environment.examples("eval") == []


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("", {}, "task.py has no `reward_fn`"),
        ("reward_fn = 3", {}, "`reward_fn` is of type int: it must be a function"),
        ("def reward_fn(m, a): ...\ninteract = []", {}, "`interact` is of type list"),
        ("def reward_fn(m, a): ...", {"max_turns": 2}, r"max_turns = 2 needs a function `interact\(messages\)`"),
        ("def reward_fn(m, a): ...\ntools = {'a': 1}", {}, "`tools` must be a list of"),
        ("1/0", {}, "raised ZeroDivisionError"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_before_it_plays(module, text, settings, says):
    with pytest.raises((EnvError, HookError), match=says):
        module([("hi", "x")], text=text, **settings)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "x"}, r"rows\.jsonl:2: a row needs `messages`"),
        ({"messages": [{"role": "user", "content": "x"}]}, r"rows\.jsonl:2: a row needs `answer`"),
        ({"input_token_ids": [1, 2], "answer": "x"}, r"rows\.jsonl:2: a row needs `messages`"),
        ({"prompt": "x", "answer": []}, r"rows\.jsonl:2: `answer` must not be empty: it is \[\]"),
        ({"prompt": "x", "answer": ["a", " "]}, r"rows\.jsonl:2: `answer` must not be empty"),
        ({"prompt": "x", "answer": [None]}, r"rows\.jsonl:2: `answer` must not be empty"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(module, tmp_path, row, says):
    environment, _ = module([("hi", "x")])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row))
    with pytest.raises(DataError, match=says):
        environment.examples("train")


def test_fields_may_have_other_names(stage, module, tmp_path):
    module([("hi", "x")])
    (tmp_path / "other.jsonl").write_text('{"ask": "hi", "gold": "yes"}\n')
    settings = {"dataset": str(tmp_path / "other.jsonl"), "fields": {"ask": "prompt", "gold": "answer"}}
    ((outcome, _),) = play(stage, ModuleEnvironment(ModuleEnvConfig(module=str(tmp_path / "task.py"), **settings)))
    assert outcome.rewards == {"policy": 1.0}


def test_a_module_can_be_named_as_a_package(stage, module, tmp_path, monkeypatch):
    module([("hi", "x")])
    package = tmp_path / "given_by_name.py"
    package.write_text("def reward_fn(messages, answer): return len(messages)")
    monkeypatch.syspath_prepend(tmp_path)
    settings = ModuleEnvConfig(module="given_by_name", dataset=str(tmp_path / "rows.jsonl"))
    ((outcome, _),) = play(stage, ModuleEnvironment(settings))
    assert outcome.rewards == {"policy": 2.0}


# --- a function, and the rollouts it makes by hand

FUNCTION = """
import dataclasses
import numpy
from paceline import Rollout, Ticket
from paceline.rollout import RolloutSample, Turn

def made(turns, **about):
    return Rollout(**{"ticket": Ticket(-1, "elsewhere", 0, 0, 0), "member": 9, "turns": turns, "reward": 0.5} | about)

async def talk(seat):
    messages = [{"role": "user", "content": "reverse: abc"}]
    messages.append((await seat.chat(messages)).message)
    await seat.chat([*messages, {"role": "user", "content": "again"}])

RECORDED = []

async def copied(row, seat):
    await talk(seat)
    RECORDED.append(list(seat.turns))
    arrays = ("prompt_ids", "completion_ids", "logprobs", "versions")
    return made([dataclasses.replace(t, **{a: numpy.array(getattr(t, a)) for a in arrays}) for t in seat.turns])

async def last_only(row, seat):
    await talk(seat)
    return made(seat.turns[-1:], metrics={"kept": 1.0}, reward=True)

TURN = {
    "prompt_ids": [5, 6], "completion_ids": [7, 8, 2], "logprobs": [-1, -2.5, 0.0], "versions": [0, 0, 1],
    "finish": "length", "temperature": 0.5,
}

async def foreign(row, seat, turn={}, about={}, dropped=False):
    return made([Turn(**TURN), Turn(**TURN | turn)], **about | {"dropped": dropped})

async def empty(row, seat, **about):
    return made([3] if about.pop("three", False) else [], **about)

async def without_reward(row, seat):
    return made([Turn(**TURN)], reward=None)

async def flat(row, **about):
    given = {"tokens": [5, 6, 7, 8, 9], "logprobs": [0, 0, -1, None, -2], "loss_mask": [0, 0, 1, 0, 1], "reward": 1}
    return RolloutSample(**given | about) if row["n"] == 0 else None

async def dropped(row):
    return None
"""


@pytest.fixture
def rolled(stage, tmp_path):
    """Plays the group of one ticket as a run does: by the name of a function, two rollouts on one row."""
    (tmp_path / "play.py").write_text(FUNCTION)
    (tmp_path / "rows.jsonl").write_text('{"n": 0}\n')

    def play(name, **kwargs):
        path = f"{tmp_path / 'play.py'}:{name}"
        section = CustomEnvConfig(name="mine", import_path=path, dataset=str(tmp_path / "rows.jsonl"), kwargs=kwargs)
        course = build_train_envs(RunConfig(env=[section], group_size=2, batch_size=2))["mine"]
        client = SamplingClient(stage._pool, stage._renderer, SamplingConfig(max_tokens=8), frozenset(stage._ends))
        return asyncio.run(RolloutRunner(client, Clock(), seed=0).run_group(course, Ticket(4, "mine", 0, 0, 0)))

    return play


def test_a_rollout_made_of_what_was_recorded_trains_what_was_recorded(rolled, tmp_path):
    group = rolled("copied")
    assert [rollout.error for rollout in group.failed] == []
    recorded = import_object(f"{tmp_path / 'play.py'}:RECORDED")
    assert [rollout.turns for rollout in group.rollouts] in (recorded, recorded[::-1])
    for member, rollout in enumerate(group.rollouts):
        assert (rollout.ticket, rollout.member, rollout.reward) == (group.ticket, member, 0.5)
        told = json.loads(json.dumps(rollout.record()))
        assert told["tokens"] == sum(int(sample.loss_mask.sum()) for sample in rollout.samples) > 0


def test_a_flat_sample_of_a_function_that_takes_the_row_alone_trains_where_its_mask_is(rolled, stage):
    decode = stage._renderer.decode
    for rollout in rolled("flat", finish_reason="length").rollouts:
        (sample,) = rollout.samples
        assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])
        assert (sample.logprobs.tolist(), sample.versions.tolist()) == ([0, 0, -1, 0, -2], [-1, -1, 0, -1, 0])
        assert (rollout.reward, sample.ended) == (1.0, "truncated")
        assert [turn.text for turn in rollout.turns] == [decode([7]), decode([9])] != ["", ""]
    for rollout in rolled("flat", text="mine").rollouts:
        assert [turn.text for turn in rollout.turns] == [decode([7]), "mine"]
    assert [rollout.dropped for rollout in rolled("dropped").failed] == [True, True]


def test_a_rollout_made_by_hand_stands_for_what_the_seat_recorded(rolled):
    for rollout in rolled("last_only").rollouts:
        assert (len(rollout.turns), rollout.reward, rollout.metrics) == (1, 1.0, {"kept": 1.0})
        (sample,) = rollout.samples
        assert sample.loss_mask.sum() == len(rollout.turns[0].completion_ids)


def test_a_rollout_from_elsewhere_becomes_samples_of_its_ticket(rolled):
    first, _ = rolled("foreign", turn={"prompt_ids": [5, 6, 7, 8, 2, 9], "finish": "stop"}).rollouts
    (sample,) = first.samples  # the second turn goes on from the first
    assert (sample.ticket, sample.rollout, sample.ended) == (Ticket(4, "mine", 0, 0, 0), 0, "terminated")
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 2, 9, 7, 8, 2]
    assert sample.versions.tolist() == [-1, -1, 0, 0, 1, -1, 0, 0, 1]
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == [0, 0, -1, -2.5, 0, 0, -1, -2.5, 0]
    assert sample.temperatures[sample.loss_mask].tolist() == [0.5] * 6


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("foreign", {"turn": {"logprobs": [-1, -2]}}, "turn 2: `logprobs` has 2 entries, but `completion_ids` has 3"),
        ("foreign", {"turn": {"versions": [0] * 4}}, "turn 2: `versions` has 4 entries, but `completion_ids` has 3"),
        ("foreign", {"turn": {"log_z": [0.0]}}, "turn 2: `log_z` has 1 entries, but `completion_ids` has 3"),
        ("foreign", {"turn": {"completion_ids": [7, 8]}}, "turn 2: `logprobs` has 3 entries, but `completion_ids` has"),
        ("foreign", {"turn": {"completion_ids": []}}, "turn 2: `completion_ids` is empty"),
        ("foreign", {"turn": {"prompt_ids": []}}, "turn 2: `prompt_ids` is empty"),
        ("foreign", {"turn": {"prompt_ids": [5, 6.5]}}, "turn 2: `prompt_ids` holds 6.5: it must hold whole numbers"),
        ("foreign", {"turn": {"versions": [0, 0, -1]}}, "turn 2: `versions` holds -1"),
        ("foreign", {"turn": {"logprobs": [0, 0, "x"]}}, "turn 2: `logprobs` holds 'x': it must hold finite numbers"),
        ("foreign", {"turn": {"finish": "end"}}, "turn 2: `finish` is 'end': write 'stop' or 'length'"),
        ("foreign", {"turn": {"temperature": -1.0}}, "turn 2: `temperature` is -1.0"),
        (
            "foreign",
            {"turn": {"completion_ids": [7, 8, 10**6]}},
            "turn 2: `completion_ids` holds 1000000: it",
        ),
        ("foreign", {"turn": {"versions": [0, 0, 2**40]}}, "turn 2: `versions` holds 1099511627776"),
        ("foreign", {"turn": {"logprobs": [0, 0, -1e39]}}, "turn 2: `logprobs` holds -1e+39"),
        ("foreign", {"turn": {"temperature": "warm"}}, "turn 2: `temperature` is 'warm'"),
        ("flat", {"logprobs": [0.0]}, "a RolloutSample has 5 tokens and 1 entries in `logprobs`"),
        ("flat", {"loss_mask": [0] * 5}, "no token in its `loss_mask`: return None to drop the episode"),
        ("flat", {"loss_mask": [0, 0, 0.5, 0, 1]}, "0.5 in its `loss_mask`: 1 trains a token"),
        ("flat", {"loss_mask": 1}, "a RolloutSample has 5 tokens and 0 entries in `loss_mask`"),
        ("flat", {"loss_mask": [1, 0, 0, 0, 0]}, "turn 1: `prompt_ids` is empty"),
        ("flat", {"logprobs": [0, 0, -1e39, 0, -1]}, "turn 1: `logprobs` holds -1e+39"),
        ("flat", {"logprobs": [0, 0, 0.5, 0, -1]}, "turn 1: `logprobs` holds 0.5: a log probability is at most 0"),
        ("flat", {"versions": [0, 0, 2, 0, 0]}, "turn 1: `versions` holds 2: it must hold whole numbers from 0 to 1"),
        ("flat", {"tokens": [5, 6, 10**6, 8, 9]}, "turn 1: `completion_ids` holds 1000000"),
        ("flat", {"versions": [0, 0]}, "a RolloutSample has 5 tokens and 2 entries in `versions`"),
        ("foreign", {"about": {"error": "lost"}}, "returned a Rollout with an error: lost"),
        ("foreign", {"about": {"reward": "much"}}, "returned 'much': return a number"),
        ("without_reward", {}, "returned a Rollout without a `reward`"),
        ("empty", {}, "returned a Rollout without turns"),
        ("empty", {"three": True}, "turn 1 of the Rollout is of type int"),
    ],
)
def test_a_rollout_that_does_not_fit_is_a_sentence_and_trains_nothing(rolled, name, kwargs, says):
    group = rolled(name, **kwargs)
    assert group.rollouts == []
    for rollout in group.failed:
        assert f"play.py:{name}" in rollout.error
        assert says in rollout.error


def test_a_dropped_rollout_drops_its_episode(rolled):
    group = rolled("foreign", dropped=True)
    assert [rollout.dropped for rollout in group.failed] == [True, True]
    assert group.rollouts == []


# --- sections of the run file


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "name one reasoning-gym task with `task`, or several with `tasks`"),
        ({"task": "gcd", "tasks": ["gcd"]}, "name one reasoning-gym task"),
        ({"tasks": {"gcd": 0.0}}, "weight of task `gcd` is 0: it must be above 0"),
        ({"tasks": ["gcd"], "args": {"size": 3}}, r"args for \['size'\], which `tasks` does not name"),
        ({"tasks": ["gcd"], "args": {"gcd": 3}}, "args of task `gcd` must be a table"),
        ({"task": "gcd", "args": {"a": None}}, "use only what TOML can hold"),
    ],
)
def test_reasoning_gym_sections_that_make_no_sense_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        ReasoningGymConfig(**settings)


def test_shares_add_up_and_follow_the_weights():
    for size in range(40):
        for weights in ({"a": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 0.1, "b": 0.2, "c": 3.0}):
            cut = split_by_weight(weights, size)
            assert sum(cut.values()) == size
            total = sum(weights.values())
            assert all(abs(cut[name] - size * weight / total) < 1 for name, weight in weights.items())
