"""The doors with the real packages behind them, and real seats in front."""

import asyncio
import importlib.util
import os
import random
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from live_server import MODEL, served

from installed_verifiers import needs_tasksets
from paceline.config.env import ReasoningGymConfig as GymSettings
from paceline.config.env import TextArenaConfig as GameSettings
from paceline.config.env import VerifiersConfig as VerifiersSettings
from paceline.data import DataError, Ticket, open_rows
from paceline.data.sources import Scheme
from paceline.envs.base import EnvError
from paceline.rollout import Rollout, assemble
from real_seats import stage as open_stage


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}, which is not installed here")


@pytest.fixture(scope="module")
def stage():
    with open_stage() as running:
        yield running


def play(stage, environment, rows, **sampling):
    episodes = [lambda table, row=row: environment.play(row, table) for row in rows]
    return stage.play(*episodes, actors=environment.actors, **sampling)


def check_tokens(table) -> int:
    """Every sampled token of every seat trains exactly once, where the engine saw it; returns how many there are."""
    total = 0
    for seat in table.values():
        samples = assemble(Rollout(ticket=Ticket(0, "env", 0, 0, 0), member=0, turns=seat.turns))
        sampled = sum(len(turn.completion_ids) for turn in seat.turns)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
        total += sampled
    return total


# --- reasoning-gym

TASKS = [
    "basic_arithmetic",
    "caesar_cipher",
    "chain_sum",
    "count_primes",
    "gcd",
    "leg_counting",
    "letter_counting",
    "number_sorting",
    "prime_factorization",
    "spell_backward",
]


class Said:
    """A seat that says what a test wants to hear judged."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def chat(self, messages):
        from paceline.rollout import Reply

        return Reply(self.text, truncated=False)


@needs("reasoning_gym")
@pytest.mark.parametrize("task", TASKS)
def test_a_task_runs_and_pays_what_its_own_rule_says(stage, task):
    from paceline.envs.reasoning_gym import ReasoningGym

    environment = ReasoningGym(GymSettings(task=task, size=2, eval_size=2))
    rows = environment.examples("train")
    for outcome, table in play(stage, environment, rows):
        assert 0 <= outcome.rewards["policy"] <= 1
        assert outcome.metrics[f"score/{task}"] == outcome.rewards["policy"]
        assert check_tokens(table) > 0
    for row in rows:
        right = asyncio.run(
            environment.play(row, {"policy": Said(f"so <answer>no</answer>\n<answer> {row['answer']} </answer>")})
        )
        wrong = asyncio.run(environment.play(row, {"policy": Said(row["answer"])}))
        assert (right.rewards["policy"], right.metrics["answered"]) == (1.0, 1.0)
        assert (wrong.rewards["policy"], wrong.metrics["answered"]) == (0.0, 0.0)


@needs("reasoning_gym")
def test_tasks_mix_by_weight_and_held_out_rows_are_others():
    from paceline.envs.reasoning_gym import PROMPT, ReasoningGym

    settings = GymSettings(
        tasks={"chain_sum": 3.0, "gcd": 1.0},
        args={"chain_sum": {"min_digits": 6, "max_digits": 8}},
        size=40,
        eval_size=20,
    )
    rows = {split: ReasoningGym(settings).examples(split) for split in ("train", "eval")}
    assert rows == {split: ReasoningGym(settings).examples(split) for split in ("train", "eval")}
    assert [row["task"] for row in rows["train"]].count("chain_sum") == 30
    assert [row["task"] for row in rows["eval"]].count("chain_sum") == 15
    asked = {
        split: {row["messages"][-1]["content"] for row in rows[split] if row["task"] == "chain_sum"} for split in rows
    }
    assert asked["train"].isdisjoint(asked["eval"])
    assert all(len(number) >= 6 for text in asked["train"] for number in re.findall(r"\d+", text))
    assert {row["messages"][0]["content"] for row in rows["train"]} == {PROMPT}


@needs("reasoning_gym")
def test_the_whole_reply_can_be_the_answer_and_an_unreadable_one_is_worth_nothing():
    from paceline.envs.reasoning_gym import ReasoningGym

    environment = ReasoningGym(GymSettings(task="prime_factorization", answer="text", size=1, eval_size=0))
    (row,) = environment.examples("train")
    assert [message["role"] for message in row["messages"]] == ["user"]
    assert environment.examples("eval") == []
    right = asyncio.run(environment.play(row, {"policy": Said(f"{row['answer']}\n")}))
    babble = asyncio.run(environment.play(row, {"policy": Said("seven or so")}))
    assert (right.rewards["policy"], right.metrics["unscorable"]) == (1.0, 0.0)
    assert (babble.rewards["policy"], babble.metrics["unscorable"]) == (0.0, 1.0)


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "gdc"}, r"reasoning-gym has no task \['gdc'\]"),
        ({"task": "gcd", "args": {"min_numbers": 0}}, "task `gcd` refuses its args"),
        ({"task": "gcd", "args": {"colour": 1}}, "task `gcd` refuses its args.*colour"),
    ],
)
def test_a_task_that_does_not_exist_or_a_setting_it_refuses_is_one_sentence(settings, says):
    from paceline.envs.reasoning_gym import ReasoningGym

    with pytest.raises(EnvError, match=says):
        ReasoningGym(GymSettings(**settings))


@needs("reasoning_gym")
def test_a_task_is_a_dataset_for_other_environments_too():
    from paceline.envs.reasoning_gym import reasoning_gym_rows

    gym = {"reasoning-gym": Scheme(reasoning_gym_rows, ("size", "seed"))}
    rows = open_rows("reasoning-gym:gcd?size=5&seed=7", schemes=gym, require=("messages", "answer"))
    assert len(rows) == 5
    assert all(row["answer"].isdigit() for row in rows)
    assert rows[0] == open_rows("reasoning-gym:gcd?size=1&seed=7", schemes=gym)[0]


# --- textarena


@needs("textarena")
@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0", "IteratedPrisonersDilemma-v0"])
def test_self_play_trains_every_seat_on_its_own_view_of_the_game(stage, game):
    from paceline.envs.textarena import TextArena

    environment = TextArena(GameSettings(game=game, size=3, max_turns=12))
    assert environment.actors == ("player_0", "player_1")
    for outcome, table in play(stage, environment, environment.examples("train")):
        assert outcome.rewards.keys() == {"player_0", "player_1"}
        assert outcome.metrics["turns"] == sum(len(seat.turns) for seat in table.values()) <= 12
        assert outcome.metrics["unfinished"] or sum(outcome.rewards.values()) == 0
        assert check_tokens(table) > 0
        for seat in table.values():
            for before, after in zip(seat.turns, seat.turns[1:], strict=False):
                assert after.messages[: len(before.messages) + 1] == [*before.messages, before.message]


@needs("textarena")
def test_a_game_for_one_needs_no_opponent_and_stops_at_max_turns(stage):
    from paceline.envs.textarena import TextArena

    environment = TextArena(GameSettings(game="GuessTheNumber-v0", size=2, max_turns=1, system_prompt="guess"))
    for outcome, table in play(stage, environment, environment.examples("train")):
        assert (outcome.rewards, outcome.metrics["unfinished"]) == ({"policy": 0.0}, 1.0)
        assert table["policy"].turns[0].messages[0] == {"role": "system", "content": "guess"}
    with pytest.raises(EnvError, match="is for one player: leave `opponent` out"):
        TextArena(GameSettings(game="GuessTheNumber-v0", opponent="random"))


@needs("textarena")
def test_the_policy_sits_at_every_place_in_turn_against_an_opponent_who_never_breaks_a_rule(stage):
    """An opponent that moved illegally would lose by it now and then; against this babbling policy it never loses."""
    from paceline.envs.textarena import TextArena

    environment = TextArena(GameSettings(game="TicTacToe-v0", opponent="random", size=6))
    rows = environment.examples("train")
    assert [row["seat"] for row in rows] == [0, 1] * 3
    for (outcome, table), row in zip(play(stage, environment, rows), rows, strict=True):
        assert f"You are Player {row['seat']} " in table["policy"].turns[0].messages[0]["content"]
        assert outcome.metrics["illegal"] == 1
        assert outcome.rewards == {"policy": -1.0}


@needs("textarena")
def test_random_games_end_by_the_rules_and_do_not_share_their_luck():
    from paceline.envs.textarena import Game, random_move

    def moves(game, luck, told, count=100):
        made = []
        while not game.over and len(made) < count:
            player, text = game.look()
            told.setdefault(player, []).append(text)
            made.append((text, random_move(game, told[player], luck)))
            game.move(made[-1][1])
        return made

    def fresh(seed):
        return Game("KuhnPoker-v0", {"max_rounds": 9}, 2, seed), random.Random(seed), {}

    alone = moves(*fresh(1))
    random.seed(5)
    outside = random.getstate()
    one, other = fresh(1), fresh(2)
    mixed = []
    while not one[0].over:
        mixed += moves(*one, count=1)
        moves(*other, count=1)
    assert mixed == alone
    assert random.getstate() == outside
    assert one[0].over
    assert not any(one[0].lost_by_rule(player) for player in (0, 1))
    assert sum(one[0].rewards.values()) == 0


@needs("textarena")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"game": "TicTacTo-v0"}, "textarena has no game `TicTacTo-v0`"),
        ({"game": "TicTacToe-v0", "players": 3}, "`TicTacToe-v0` with 3 players: .*has to be 2"),
        ({"game": "TicTacToe-v0", "args": {"size": 9}}, "cannot be opened: .*size"),
    ],
)
def test_a_game_that_cannot_be_played_is_one_sentence(settings, says):
    from paceline.envs.textarena import TextArena

    with pytest.raises(EnvError, match=says):
        TextArena(GameSettings(**settings))


# --- verifiers

TASKSETS = {
    "sums_v1": """
        import verifiers.v1 as vf

        class Sum(vf.TaskData):
            answer: str

        class SumTask(vf.Task[Sum]):
            @vf.reward
            async def exact(self, trace: vf.Trace) -> float:
                return float(trace.last_reply == self.data.answer)

            @vf.reward(weight=0.5)
            async def short(self, trace: vf.Trace) -> float:
                return float(len(trace.last_reply) <= 2)

            @vf.metric
            async def letters(self, trace: vf.Trace) -> float:
                return float(len(trace.last_reply))

        class Settings(vf.TasksetConfig):
            count: int = 4
            first: int = 0

        class Sums(vf.Taskset[SumTask, Settings]):
            def load(self):
                for i in range(self.config.first, self.config.first + self.config.count):
                    data = Sum(idx=i, prompt=f"add: {i}+{i}", system_prompt="be brief", answer=str(2 * i))
                    yield SumTask(data, self.config.task)

        __all__ = ["Sums"]
    """,
    "halves_v1": """
        from typing import Literal

        import verifiers.v1 as vf

        class Settings(vf.TasksetConfig):
            split: Literal["train", "test"] = "train"

        class Halves(vf.Taskset[vf.Task, Settings]):
            def load(self):
                split = self.config.split
                return [vf.Task(vf.TaskData(idx=i, prompt=f"{split} {i}"), self.config.task) for i in range(3)]

        __all__ = ["Halves"]
    """,
    "look_v1": """
        import verifiers.v1 as vf

        class World(vf.Toolset[vf.SharedToolsetConfig]):
            TOOL_PREFIX = "world"

            @vf.tool
            async def look(self, where: str) -> str:
                \"\"\"Look somewhere.\"\"\"
                return f"a key is {where}"

        class Settings(vf.TasksetConfig):
            tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()

        class LookTask(vf.Task[vf.TaskData]):
            @vf.reward
            async def found(self, trace: vf.Trace) -> float:
                return float("key" in trace.transcript and trace.last_reply == "key")

            @vf.metric
            async def turns(self, trace: vf.Trace) -> float:
                return float(trace.num_turns)

        class Looks(vf.Taskset[LookTask, Settings]):
            def load(self):
                return [LookTask(vf.TaskData(idx=0, prompt="what is up?"), self.config.task)]

            @classmethod
            def toolsets(cls, config):
                return [World(config.tools)]

        __all__ = ["Looks"]

        if __name__ == "__main__":
            World.run()
    """,
    "debate_v1": """
        import verifiers.v1 as vf

        class Settings(vf.EnvConfig):
            pro: vf.AgentConfig = vf.AgentConfig()
            con: vf.AgentConfig = vf.AgentConfig()
            judge: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, max_turns=1)

        class Topics(vf.Taskset[vf.Task, vf.TasksetConfig]):
            def load(self):
                return [vf.Task(vf.TaskData(idx=0, prompt="copy: yes"), self.config.task)]

        class Debate(vf.Env[Settings]):
            async def setup(self, agents):
                agents.judge.trainable = False

            async def run(self, task, agents):
                pro = await agents.pro.run(task)
                con = await agents.con.run(task)
                said = f"{pro.last_reply}{con.last_reply}"
                await agents.judge.run(vf.Task(vf.TaskData(idx=0, prompt=f"sort: {said}")))

            async def finalize(self, task, episode):
                for name, reward in (("pro", 1.0), ("con", -1.0)):
                    (trace,) = episode.by_agent[name]
                    trace.record_reward("won", reward)

        __all__ = ["Topics", "Debate"]
    """,
    "judged_v1": """
        import verifiers.v1 as vf

        class Length(vf.Judge[float]):
            prompt = "copy: {response}"

            def parse(self, response):
                return float(len(response.text))

        class TaskSettings(vf.TaskConfig):
            judge: vf.JudgeConfig = vf.JudgeConfig()

        class JudgedTask(vf.Task[vf.TaskData, vf.State, TaskSettings]):
            @vf.reward
            async def judged(self, trace: vf.Trace) -> float:
                verdict = await Length(self.config.judge).evaluate(trace=trace, response=trace.last_reply)
                return 1.0 + verdict.parsed

        class Settings(vf.TasksetConfig):
            task: TaskSettings = TaskSettings()

        class Judged(vf.Taskset[JudgedTask, Settings]):
            def load(self):
                return [JudgedTask(vf.TaskData(idx=0, prompt="copy: tobi"), self.config.task)]

        __all__ = ["Judged"]
    """,
    "fails_v1": """
        import verifiers.v1 as vf

        class Broken(vf.Task[vf.TaskData]):
            @vf.reward
            async def broken(self, trace: vf.Trace) -> float:
                raise KeyError("rubric")

        class Forever(vf.Taskset[Broken, vf.TasksetConfig]):
            INFINITE = True

            def load(self):
                while True:
                    yield Broken(vf.TaskData(idx=0, prompt="copy: a"), self.config.task)

        __all__ = ["Forever"]
    """,
}
CALL = '<tool_call>{"name": "world_look", "arguments": {"where": "up"}}</tool_call>'
LESSON = [
    {"role": "user", "content": "what is up?"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "a key is up"},
    {"role": "assistant", "content": "key"},
]


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory):
    """Tasksets as packages one can import, also from the processes that serve their tools."""
    folder = tmp_path_factory.mktemp("tasksets")
    for name, text in TASKSETS.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield Path(folder)


def verifiers_environment(**settings):
    from paceline.envs.verifiers import verifiers_environment as build

    return build(VerifiersSettings(**settings))


@needs_tasksets
def test_a_taskset_may_be_a_file_of_any_folder(tmp_path, monkeypatch):
    """The folder is importable afterwards, in this process and in those it starts."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    file = tmp_path / "sums_in_a_file.py"
    file.write_text(textwrap.dedent(TASKSETS["sums_v1"]))
    environment = verifiers_environment(id=str(file), args={"count": 2})
    assert [row["prompt"] for row in environment.examples("train")] == ["add: 0+0", "add: 1+1"]
    assert (sys.path[-1], os.environ["PYTHONPATH"]) == (str(tmp_path), str(tmp_path))
    with pytest.raises(EnvError, match="`json` is another module"):
        verifiers_environment(id=str(file.rename(tmp_path / "json.py")))
    with pytest.raises(EnvError, match="no such file"):
        verifiers_environment(id=str(file))


@needs_tasksets
def test_a_taskset_runs_unchanged_with_its_rewards_and_metrics(stage, tasksets):
    environment = verifiers_environment(
        id="sums-v1", args={"count": 3}, eval_args={"first": 7, "count": 9}, eval_size=2
    )
    rows = environment.examples("train")
    assert [row["prompt"] for row in rows] == ["add: 0+0", "add: 1+1", "add: 2+2"]
    held_out = environment.examples("eval")
    assert [row["prompt"] for row in held_out] == ["add: 7+7", "add: 8+8"]
    for (outcome, table), row in zip(play(stage, environment, [*rows, *held_out]), [*rows, *held_out], strict=True):
        (turn,) = table["policy"].turns
        assert [m["content"] for m in turn.messages] == ["be brief", row["prompt"]]
        exact = turn.text == str(2 * int(row["prompt"].split("+")[1]))
        assert outcome.rewards == {"policy": exact + 0.5 * (len(turn.text) <= 2)}
        assert outcome.metrics["letters"] == len(turn.text)
        assert outcome.metrics["reward/exact"] == exact
        assert check_tokens(table) > 0


@needs_tasksets
def test_a_tasksets_tools_are_called_over_its_own_servers_and_the_call_is_recorded(tasksets):
    environment = verifiers_environment(id="look-v1")
    with open_stage(LESSON) as taught:
        ((outcome, table),) = play(taught, environment, environment.examples("train"), temperature=0.0, max_tokens=120)
    assert (outcome.rewards, outcome.metrics["turns"]) == ({"policy": 1.0}, 2)
    first, second = table["policy"].turns
    assert [tool["function"]["name"] for tool in first.tools] == ["world_look"]
    assert (first.text, second.text) == (CALL, "key")
    assert second.messages[-1]["content"] == "a key is up"
    assert (
        second.prompt_ids[: len(first.prompt_ids) + len(first.completion_ids)]
        == first.prompt_ids + first.completion_ids
    )
    (sample,) = assemble(Rollout(ticket=Ticket(0, "env", 0, 0, 0), member=0, turns=[first, second]))
    assert int(np.sum(sample.loss_mask)) == len(first.completion_ids) + len(second.completion_ids)


@needs_tasksets
def test_a_judge_speaks_from_its_own_endpoint_and_is_no_part_of_the_episode(stage, tasksets):
    with served() as server:
        judge = {"base_url": f"{server.url}/v1", "model": MODEL, "api_key_var": "NO_KEY_NEEDED"}
        judge["sampling"] = {"max_tokens": 5, "temperature": 0.0}
        environment = verifiers_environment(id="judged-v1", args={"task": {"judge": judge}})
        ((outcome, table),) = play(stage, environment, environment.examples("train"))
        (turn,) = table["policy"].turns
        asked = [{"role": "user", "content": f"copy: {turn.text}"}]
        said = server.openai.chat.completions.create(model=MODEL, messages=asked, max_tokens=5, temperature=0)
    assert outcome.rewards == {"policy": 1.0 + len(said.choices[0].message.content)}


@needs_tasksets
def test_agents_sit_in_seats_of_their_own_and_an_untrained_one_is_not_trained(stage, tasksets):
    environment = verifiers_environment(id="debate-v1")
    assert environment.actors == ("pro", "con", "judge")
    judge = environment._env.config.judge
    assert (judge.harness.id, judge.max_turns) == ("paceline_chat", 1)
    ((outcome, table),) = play(stage, environment, environment.examples("train"))
    assert outcome.rewards == {"pro": 1.0, "con": -1.0}
    assert outcome.metrics["pro/reward/won"] == 1.0
    assert {name: (len(seat.turns), seat.trained) for name, seat in table.items()} == {
        "pro": (1, True),
        "con": (1, True),
        "judge": (1, False),
    }
    said = table["pro"].turns[0].text + table["con"].turns[0].text
    assert table["judge"].turns[0].messages[-1]["content"] == f"sort: {said}"


@needs_tasksets
def test_an_environment_that_fails_says_why_and_one_that_never_ends_must_be_bounded(stage, tasksets):
    with pytest.raises(EnvError, match="makes tasks without end: set `size`"):
        verifiers_environment(id="fails-v1").examples("train")
    environment = verifiers_environment(id="fails-v1", size=2)
    for error, _ in play(stage, environment, environment.examples("train")):
        with pytest.raises(EnvError, match=r"verifiers environment `fails-v1`: .*rubric"):
            raise error


@needs_tasksets
def test_a_taskset_is_a_dataset_for_other_environments_too(tasksets, monkeypatch, caplog):
    from paceline.envs.verifiers import verifiers_rows

    scheme = {"verifiers": Scheme(verifiers_rows)}
    monkeypatch.delenv("VERIFIERS_ENV_ID", raising=False)
    with pytest.raises(EnvError, match=r"name the verifiers environment with .*VERIFIERS_ENV_ID"):
        open_rows("verifiers:train", schemes=scheme)
    monkeypatch.setenv("VERIFIERS_ENV_ID", "sums-v1")
    monkeypatch.setenv("VERIFIERS_ENV_ARGS", '{"first": 5}')
    rows = open_rows("verifiers:train?limit=2", schemes=scheme, require=("answer",))
    assert [(row["messages"][1]["content"], row["answer"]) for row in rows] == [("add: 5+5", "10"), ("add: 6+6", "12")]
    assert [len(open_rows(f"verifiers:{name}", schemes=scheme)) for name in ("train", "train?limit=-1")] == [4, 4]
    with caplog.at_level("WARNING"):
        held_out = open_rows("verifiers:eval?limit=1", schemes=scheme)
    assert [row["answer"] for row in held_out] == ["10"]
    assert "`sums-v1` has no rows of its own for `eval`: the training rows are taken" in caplog.text
    with pytest.raises(DataError, match="there is no split `best`; write one of train, training, eval"):
        open_rows("verifiers:best", schemes=scheme)


@needs_tasksets
@pytest.mark.parametrize("name", ["eval", "test", "dev"])
def test_a_tasksets_own_split_is_found_whichever_of_its_names_is_asked_for(tasksets, name):
    environment = verifiers_environment(id="halves-v1", eval_dataset=f"verifiers:{name}?limit=2")
    assert [row["prompt"] for row in environment.examples("train")] == ["train 0", "train 1", "train 2"]
    assert [row["prompt"] for row in environment.examples("eval")] == ["test 0", "test 1"]
    assert environment._env.config.agent.max_turns is None
    limited = verifiers_environment(id="halves-v1", dataset="verifiers:train?limit=2", max_turns=3)
    assert limited._env.config.agent.max_turns == 3
    assert len(limited.examples("train")) == 2
    assert limited.examples("eval") == []


@needs_tasksets
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "nowhere-v1"}, "`nowhere-v1` cannot be loaded: .*not found"),
        ({"id": "sums-v1", "args": {"counts": 3}}, "`sums-v1` cannot be loaded: .*counts"),
        ({"id": "sums-v1", "env": "nowhere"}, "`sums-v1` cannot be loaded: .*nowhere"),
        ({"id": "sums-v1", "agents": {"agent": {"model": "m"}}}, "leaves no agent to the policy"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_sentence(tasksets, settings, says):
    with pytest.raises(EnvError, match=says):
        verifiers_environment(**settings)


@pytest.mark.skipif(
    "verifiers" in sys.modules or importlib.util.find_spec("verifiers") is not None, reason="it is installed"
)
def test_a_missing_package_is_one_sentence():
    with pytest.raises(EnvError, match=r"verifiers 0.4 is not installed.*pip install"):
        verifiers_environment(id="sums-v1")
