"""Laws of the environments of `verifiers` below 0.4: unchanged, they play at real seats and every token is recorded."""

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

import child_processes
from installed_verifiers import needs_classic
from paceline.config.env import VerifiersConfig
from paceline.data import Ticket, open_rows
from paceline.data.sources import Scheme
from paceline.envs.base import EnvError
from paceline.envs.verifiers import verifiers_environment, verifiers_rows
from paceline.rollout import Rollout, assemble
from real_seats import stage as open_stage

pytestmark = needs_classic

MODULES = {
    "classic_sums": """
        import verifiers as vf
        from datasets import Dataset

        def load_environment(count=4, held_out=2, **kwargs):
            def rows(first, n):
                return Dataset.from_list(
                    [{"question": f"add: {i}+{i}", "answer": str(2 * i)} for i in range(first, first + n)]
                )

            async def exact(completion, answer, **kwargs):
                return float(completion[-1]["content"] == answer)

            def short(completion, **kwargs):
                return float(len(completion[-1]["content"]) <= 2)

            def letters(completion, **kwargs):
                return float(len(completion[-1]["content"]))

            rubric = vf.Rubric(funcs=[exact, short, letters], weights=[1.0, 0.5, 0.0])
            held = rows(50, held_out) if held_out else None
            return vf.SingleTurnEnv(
                dataset=rows(0, count), eval_dataset=held, system_prompt="be brief", rubric=rubric, **kwargs
            )
    """,
    "classic_again": """
        import verifiers as vf
        from datasets import Dataset

        class Again(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                return [{"role": "user", "content": f"sort: turn {len(state['trajectory'])}"}]

            @vf.stop
            async def twice(self, state, **kwargs):
                return len(state["trajectory"]) >= 2

        def turns(state, **kwargs):
            return float(len(state["trajectory"]))

        def load_environment(max_turns=5):
            rows = Dataset.from_list([{"question": "sort: cab", "answer": "abc"}] * 2)
            return Again(dataset=rows, max_turns=max_turns, rubric=vf.Rubric(funcs=[turns]))
    """,
    "classic_tools": """
        import verifiers as vf
        from datasets import Dataset

        async def look(where: str) -> str:
            \"\"\"Look somewhere.

            Args:
                where: The place.
            \"\"\"
            return f"a key is {where}"

        def found(completion, **kwargs):
            looked = any("a key is" in str(message["content"]) for message in completion)
            return float(looked and completion[-1]["content"] == "key")

        class Stateful(vf.StatefulToolEnv):
            def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
                return {**tool_args, "place": state["answer"]}

        async def look_there(where: str, place: str) -> str:
            \"\"\"Look somewhere.

            Args:
                where: The place.
                place: Filled in by the environment.
            \"\"\"
            return f"a key is {where} in {place}"

        look_there.__name__ = "look"

        def load_environment(stateful=False):
            rows = Dataset.from_list([{"question": "what is up?", "answer": "room 7"}])
            rubric = vf.Rubric(funcs=[found])
            if not stateful:
                return vf.ToolEnv(tools=[look], dataset=rows, rubric=rubric, max_turns=3)
            env = Stateful(tools=[], dataset=rows, rubric=rubric, max_turns=3)
            env.add_tool(look_there, args_to_skip=["place"])
            return env
    """,
    "classic_best": """
        import verifiers as vf
        from datasets import Dataset

        def best(states, **kwargs):
            return [1.0 for _ in states]

        def load_environment():
            rows = Dataset.from_list([{"question": "copy: a", "answer": "a"}])
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))
    """,
    "classic_broken": """
        raise RuntimeError("no licence")

        def load_environment():
            pass
    """,
}
CALL = '<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>'


def lesson(result: str) -> list[dict]:
    return [
        {"role": "user", "content": "what is up?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "key"},
    ]


@pytest.fixture(scope="module")
def stage():
    with open_stage() as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield folder


def environment(**settings):
    return verifiers_environment(VerifiersConfig(**settings))


def play(stage, env, rows, **sampling):
    return stage.play(*[lambda table, row=row: env.play(row, table) for row in rows], actors=env.actors, **sampling)


def check_tokens(seat) -> None:
    """Every sampled token trains exactly once."""
    samples = assemble(Rollout(ticket=Ticket(0, "env", 0, 0, 0), member=0, turns=seat.turns))
    assert sum(int(s.loss_mask.sum()) for s in samples) == sum(len(turn.completion_ids) for turn in seat.turns) > 0


def test_a_single_turn_pays_by_its_rubric_and_its_own_held_out_rows_are_evaluated(stage):
    env = environment(id="classic-sums", args={"count": 3}, eval_size=1)
    rows = env.examples("train")
    assert [row["prompt"] for row in rows] == ["add: 0+0", "add: 1+1", "add: 2+2"]
    held_out = env.examples("eval")
    assert [row["prompt"] for row in held_out] == ["add: 50+50"]
    for (outcome, table), row in zip(play(stage, env, [*rows, *held_out]), [*rows, *held_out], strict=True):
        (turn,) = table["policy"].turns
        assert [m["content"] for m in turn.messages] == ["be brief", row["prompt"]]
        exact, short = turn.text == str(2 * int(row["prompt"].split("+")[1])), len(turn.text) <= 2
        assert outcome.rewards == {"policy": exact + 0.5 * short}
        assert (outcome.metrics["exact"], outcome.metrics["letters"]) == (exact, len(turn.text))
        check_tokens(table["policy"])


def test_turns_go_on_until_the_environment_stops_or_the_run_file_does(stage):
    for settings, turns in (({}, 2), ({"max_turns": 1}, 1)):
        env = environment(id="classic-again", **settings)
        for outcome, table in play(stage, env, env.examples("train")):
            assert outcome.rewards == {"policy": float(turns)}
            assert len(table["policy"].turns) == turns
            check_tokens(table["policy"])


@pytest.mark.parametrize(("stateful", "result"), [(False, "a key is up"), (True, "a key is up in room 7")])
def test_tools_are_offered_called_and_recorded(stateful, result):
    env = environment(id="classic-tools", args={"stateful": stateful})
    with open_stage(lesson(result)) as taught:
        ((outcome, table),) = play(taught, env, env.examples("train"), temperature=0.0, max_tokens=120)
    first, second = table["policy"].turns
    assert [tool["function"]["name"] for tool in first.tools] == ["look"]
    assert list(first.tools[0]["function"]["parameters"]["properties"]) == ["where"]
    assert (first.text, second.text, second.messages[-1]["content"]) == (CALL, "key", result)
    assert second.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == first.prompt_ids + first.completion_ids
    assert outcome.rewards == {"policy": 1.0}
    check_tokens(table["policy"])


def test_its_rows_are_a_dataset_by_split_and_the_variables_name_it(monkeypatch, caplog):
    scheme = {"verifiers": Scheme(verifiers_rows)}
    monkeypatch.setenv("VERIFIERS_ENV_ID", "classic-sums")
    monkeypatch.setenv("VERIFIERS_ENV_ARGS", '{"count": 5}')
    for name, answers in (("train?limit=2", "02"), ("training", "02468"), ("train?limit=-1", "02468")):
        rows = open_rows(f"verifiers:{name}", schemes=scheme)
        assert [row["answer"] for row in rows] == list(answers)
        assert [message["role"] for message in rows[0]["messages"]] == ["system", "user"]
    for name in ("eval", "evaluation", "test", "validation", "dev"):
        assert [row["answer"] for row in open_rows(f"verifiers:{name}", schemes=scheme)] == ["100", "102"]
    assert not caplog.text
    monkeypatch.setenv("VERIFIERS_ENV_ARGS", '{"held_out": 0}')
    assert len(open_rows("verifiers:eval?limit=3", schemes=scheme)) == 3
    assert "has no rows of its own for `eval`: the training rows are taken" in caplog.text
    env = verifiers_environment(
        VerifiersConfig(dataset="verifiers:train?limit=3", eval_dataset="verifiers:dev?limit=1")
    )
    assert (len(env.examples("train")), len(env.examples("eval"))) == (3, 1)
    monkeypatch.setenv("VERIFIERS_ENV_ARGS", "[1]")
    with pytest.raises(EnvError, match=r"VERIFIERS_ENV_ARGS must be a JSON object, not \[1\]"):
        open_rows("verifiers:train", schemes=scheme)


def test_loading_one_leaves_ctrl_c_to_the_run():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment(id="classic-sums")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_one_loads_in_a_thread_too():
    env = asyncio.run(asyncio.to_thread(environment, id="classic-sums"))
    assert len(env.examples("train")) == 4


def test_a_file_of_any_folder_is_one_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    file = tmp_path / "classic_in_a_file.py"
    file.write_text(textwrap.dedent(MODULES["classic_sums"]))
    assert len(environment(id=str(file), args={"count": 2}).examples("train")) == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "classic-sums", "args": {"count": "many"}}, "`classic-sums` cannot be loaded: "),
        ({"id": "classic-sums", "agents": {"agent": {}}}, "`agents` and `env` are of verifiers 0.4's interface"),
        ({"id": "classic-broken"}, "`classic-broken` cannot be imported: RuntimeError: no licence"),
        ({"id": "classic-best"}, "scores the rollouts of a group together"),
        ({"id": "nowhere-at-all"}, "verifiers"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_sentence(settings, says):
    with pytest.raises(EnvError, match=says):
        environment(**settings)


def test_the_launch_trains_one_that_variables_name(tmp_path):
    lines = train_seed(tmp_path, VERIFIERS_ENV_ID="classic-sums", VERIFIERS_ENV_ARGS='{"count": 40}')
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 4  # an epoch of 32 of the 40 rows, 8 a step
    assert all(line["dropped/failed_rollouts"] == 0 for line in steps)
    assert all(line["metric/verifiers/letters"] > 0 for line in steps)


def train_seed(folder: Path, **variables: str) -> list[dict]:
    seed = Path(__file__).parents[2] / "examples" / "seeds" / "infinite" / "verifiers.toml"
    flags = ["--name", "run", "--sampling.max_tokens", "12", "--filters.zero-advantage", "false"]
    command = [sys.executable, "-m", "paceline", "train", str(seed), *flags]
    done = child_processes.run(command, timeout=240, cwd=folder, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_one_that_is_not_installed_is_named_with_what_to_install():
    with pytest.raises(EnvError, match=r"`no-such-env` is not installed: there is no module `no_such_env`"):
        environment(id="no-such-env")
