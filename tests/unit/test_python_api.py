"""`paceline.train` from Python: what may be given, what comes back, and what a reward function is called with."""

import asyncio
import json
import os
import re
import runpy
import shutil
import signal
import threading
import tomllib
import warnings
from pathlib import Path

import pytest

import paceline
from paceline.api import TrainingTask, resolve
from paceline.commands import main
from paceline.config import ConfigError
from paceline.data import BadRow, DataError
from paceline.envs import EnvError
from paceline.envs.reward import RewardFunction, reward_functions
from paceline.observe.monitor import RunOutcome, RunPlan, read_jsonl
from paceline.observe.monitor.plain import NotebookView
from paceline.rollout import Reply
from paceline.runtime.signals import Signals

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
ROWS = [{"prompt": f"add: {a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(4)]
SMALL = {
    "steps": 1,
    "batch_size": 4,
    "group_size": 2,
    "sampling": {"max_tokens": 3},
    "eval": {"every": 0},
    "filters": {"zero_advantage": False},
    "quiet": True,
}


def right(completion, answer):
    return completion.strip() == answer


async def shortness(completion):
    return -float(len(completion))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def two_rewards(tmp_path_factory):
    """One run with two reward functions and held-out rows."""
    runs = tmp_path_factory.mktemp("two")
    settings = SMALL | {"steps": 2, "eval": {"every": 1}, "runs": str(runs)}
    weights = {"shortness": 0.25}
    return paceline.train(
        name="two", dataset=ROWS, eval_dataset=ROWS[:4], reward=[right, shortness], reward_weights=weights, **settings
    )


# --- what a reward function is called with


class Scorer:
    async def __call__(self, completion):
        return 7


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda completion, answer: completion == answer, 1.0),
        (lambda text, answer: text == answer, 1.0),
        (lambda answer, completion: completion == answer, 1.0),
        (lambda completion, answer, weight=3: weight, 3.0),
        (lambda completion, **columns: len(columns["answer"]), 1.0),
        (lambda **columns: columns["completion"] == columns["answer"], 1.0),
        (lambda completion, /, *, answer: completion == answer, 1.0),
        (lambda completion, prompt: prompt == "add: 2+3", 1.0),
        (lambda completion, messages: len(messages), 1.0),
        (lambda completion: None, None),
        (shortness, -1.0),
        (Scorer(), 7.0),
        (lambda completions, answer, **kwargs: [float(c == a) for c, a in zip(completions, answer, strict=True)], 1.0),
        (lambda prompts, completions, **kwargs: [len(prompts[0])], 8.0),
        (lambda completions, **kwargs: [None], None),
    ],
)
def test_parameters_are_filled_by_name(function, value):
    row = {"prompt": "add: 2+3", "messages": [{"role": "user", "content": "add: 2+3"}], "answer": "5"}
    reward = RewardFunction("score", function)
    reward.check(row)
    assert asyncio.run(reward(row, Reply("5", False))) == value


def test_a_trl_function_gets_messages_where_the_prompt_is_messages():
    seen = {}

    def score(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0]

    messages = [{"role": "user", "content": "add: 2+3"}]
    asyncio.run(RewardFunction("score", score)({"prompt": messages, "messages": messages, "n": 2}, Reply("5", False)))
    assert seen["completions"] == [[{"role": "assistant", "content": "5"}]]
    assert (seen["prompts"], seen["n"]) == ([messages], [2])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda completion, anwser: 0,
            "takes `anwser`, which is no column of this row; .* did you mean `answer`",
        ),
        (lambda answer: 0, "no parameter for the completion: its first one, `answer`, is a column"),
    ],
)
def test_a_column_that_rows_lack_is_named(function, sentence):
    with pytest.raises(BadRow, match=sentence):
        RewardFunction("score", function).check({"messages": [], "answer": "5"})


@pytest.mark.parametrize("returned", [1.0, [1.0, 2.0], "1"])
def test_a_trl_function_must_return_a_list_of_one(returned):
    with pytest.raises(EnvError, match="for a list of 1 completion: return a list of 1 number"):
        asyncio.run(RewardFunction("score", lambda completions: returned)({"messages": []}, Reply("5", False)))


@pytest.mark.parametrize(
    ("rewards", "weights", "sentence"),
    [
        ([right, right], {}, "two reward functions are called `right`"),
        ([], {}, "the list of reward functions is empty"),
        ({"length": right, "b": right}, {}, "`length` cannot name a part of the reward"),
        ([right], {"rite": 1.0}, "reward_weights names `rite`"),
        ([right, 3], {}, "reward `int` is 3: give a function"),
        (3, {}, "the reward is 3: give a function, a list of functions"),
        (lambda: 0, {}, "takes no argument"),
    ],
)
def test_rewards_that_cannot_be_are_refused(rewards, weights, sentence):
    with pytest.raises(EnvError, match=sentence):
        reward_functions(rewards, weights)


# --- what `train` takes


def test_each_part_of_the_reward_is_logged(two_rewards):
    step = two_rewards.metrics[-1]
    for place in ("metric/two/right", "metric/two/shortness", "eval/two/right", "eval/two/shortness"):
        assert place in step, step
    total = step["eval/two/right"] + 0.25 * step["eval/two/shortness"]
    assert step["eval/two/reward"] == pytest.approx(total)
    rollout = read_jsonl(two_rewards.directory / "rollouts.jsonl")[0]
    assert rollout["reward"] == pytest.approx(rollout["metrics"]["right"] + 0.25 * rollout["metrics"]["shortness"])


def test_datasets_of_every_kind_give_the_same_rows():
    datasets = pytest.importorskip("datasets")
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kinds = [ROWS, datasets.Dataset.from_list(ROWS), "sums.jsonl", Path("sums.jsonl"), ["sums.jsonl"]]
    for dataset in kinds:
        config, environments = resolve(None, TrainingTask(dataset=dataset, eval_dataset=dataset, reward=right), {})
        for split in ("train", "eval"):
            rows = environments[config.env[0].name].examples(split)
            assert [(row["prompt"], row["answer"]) for row in rows] == [(r["prompt"], r["answer"]) for r in ROWS]
            assert rows[0]["messages"] == [{"role": "user", "content": ROWS[0]["prompt"]}]


def test_names_alone_need_no_objects():
    """So that the run can be taken over by other processes, and resumed from the command line."""
    Path("mine.py").write_text("def score(completion, answer):\n    return 1.0\n")
    config, environments = resolve(None, TrainingTask(dataset="sums.jsonl", reward="mine.py:score"), {})
    assert environments == {}
    assert (config.env[0].type, config.env[0].name) == ("reward", "sums")


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "dataset holds no rows"),
        (["a", {"prompt": "b"}], "dataset, row 1 is 'a': give a list of dicts"),
        ({"train": ROWS}, "dataset is a dict of train: choose one"),
        ((row for row in ROWS), "dataset is of type generator: give a list of dicts"),
        ([{"prompt": "add: 1+1"}], "dataset, row 1: the reward `right` takes `answer`"),
        ([{"text": "add: 1+1"}], "dataset, row 1: a row needs `messages`, `prompt`"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named_and_leaves_no_folder(dataset, sentence):
    with pytest.raises(paceline.RunFailed, match=sentence) as caught:
        paceline.train(dataset=dataset, reward=right, **SMALL)
    assert isinstance(caught.value.result.error, DataError)
    assert not Path("runs").exists()


def test_a_config_a_loaded_file_and_a_path_train():
    small = {key: value for key, value in SMALL.items() if key != "quiet"}
    config = paceline.RunConfig(**small, name="config", env=[{"type": "arithmetic"}])
    Path("run.toml").write_text(paceline.config.dump(config))
    loaded = paceline.load("run.toml", ["--name", "loaded"])
    assert paceline.train(loaded).directory == Path("runs/loaded").absolute()
    assert paceline.train(config, quiet=True).outcome.step == 1
    assert paceline.train("run.toml", **SMALL | {"name": "path"}).outcome.step == 1
    assert (
        paceline.train(loaded, reward=right, dataset=ROWS, name="mixed", **SMALL).metrics[-1]["reward/mixed/mean"] >= 0
    )


def test_environments_need_no_import_path():
    class Echo(paceline.SingleTurn):
        def examples(self, split):
            return [{"messages": [{"role": "user", "content": "copy: ab"}]}] if split == "train" else []

        def score(self, example, reply):
            return paceline.Outcome.solo(reply.text == "ab")

    async def rollout(row, seat):
        reply = await seat.chat([{"role": "user", "content": row["prompt"]}])
        return float(reply.text == row["answer"])

    result = paceline.train(environments={"echo": Echo(), "sums": rollout}, dataset=ROWS, **SMALL | {"steps": 2})
    assert {"reward/echo/mean", "reward/sums/mean"} <= {key for line in result.metrics for key in line}


def test_runs_without_a_name_do_not_meet(two_rewards):
    first, second = (paceline.train(dataset=ROWS, reward=right, **SMALL).directory for _ in range(2))
    assert (first, second) == (Path("runs/run-1").absolute(), Path("runs/run-2").absolute())


def test_a_run_of_objects_goes_on_from_python_and_says_so_elsewhere(capsys):
    paceline.train(dataset=ROWS, reward=right, name="on", **SMALL)
    again = paceline.train(dataset=ROWS, reward=right, name="on", resume="latest", **SMALL | {"steps": 2})
    assert again.outcome.step == 2
    main(["train", "runs/on/config.toml", "--resume", "latest", "--steps", "3", "--quiet"])
    assert "paceline.train: call it again with the same arguments" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"stepz": 3}, "there is no key `stepz` at the top level; did you mean `steps`?"),
        ({"steps": "3"}, 'steps: expected a whole number, at least 1, got "3"'),
        ({"sampling": {"max_token": 3}}, "did you mean `sampling.max_tokens`?"),
        ({"sampling.max_token": 3}, "did you mean `sampling.max_tokens`?"),
        ({"learning_rate": 1e-5}, "did you mean `trainer.optimizer.lr`"),
        ({"batch_size": 12}, "batch_size = 12 is not a multiple of group_size = 8"),
        ({"reward": right}, "reward: name the rows to train on, with dataset=..."),
        ({"dataset": ROWS}, "dataset: say what a completion is worth, with reward=..."),
        ({"reward_weights": [1.0]}, "reward_weights: there is nothing to weigh"),
        ({"dataset": ROWS, "reward": right, "env": []}, "give either `reward` or `env`, not both"),
        ({"dataset": ROWS, "reward": [right], "reward_weights": [1, 2]}, "2 weights for 1 reward functions"),
        ({"environments": {"a": 3}}, "`a` is 3: give a paceline.Environment object"),
    ],
)
def test_arguments_are_refused_with_the_sentences_of_the_command_line(arguments, sentence):
    with pytest.raises((ConfigError, EnvError)) as caught:
        paceline.train(**arguments)
    assert sentence in str(caught.value)
    assert not Path("runs").exists()


def test_a_bad_config_made_in_python_is_told_as_on_the_command_line(capsys):
    Path("run.toml").write_text("")
    assert main(["check", "run.toml", "--stepz", "3"]) == 2
    told = capsys.readouterr().err.partition("there is")[2]
    with pytest.raises(ConfigError) as caught:
        paceline.RunConfig(stepz=3)  # ty: ignore[unknown-argument]
    assert str(caught.value).partition("there is")[2] == told.rstrip().replace("--", "")


def test_a_warning_of_the_config_is_a_python_warning():
    with pytest.warns(paceline.config.ConfigWarning, match="oversample = 0.1 has no effect"):
        paceline.train(dataset=ROWS, reward=right, oversample=0.1, **SMALL)


# --- in a running event loop


def test_train_works_inside_a_running_loop(capsys):
    """As in the cells of a notebook."""
    small = {key: value for key, value in SMALL.items() if key != "quiet"}
    config = paceline.RunConfig(**small, name="cell", env=[{"type": "arithmetic"}])

    async def cell():
        return paceline.train(config)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(cell()).outcome.status == "finished"
    assert "TrainingTask was destroyed" not in capsys.readouterr().err


@pytest.mark.parametrize("looped", [True, False])
def test_ctrl_c_ends_the_run_resumably(looped):
    """The first time; also where an event loop runs, and `asyncio.run` has a handler of its own."""

    def score(completion):
        if len(seen) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(completion)
        return len(completion)

    seen: list[str] = []
    settings = SMALL | {"steps": 100_000}

    async def cell():
        return paceline.train(dataset=ROWS, reward=score, name="long", **settings)

    before = signal.getsignal(signal.SIGINT)
    result = asyncio.run(cell()) if looped else paceline.train(dataset=ROWS, reward=score, name="long", **settings)
    assert result.outcome.status == "interrupted"
    assert result.outcome.checkpoint is not None
    assert signal.getsignal(signal.SIGINT) is before
    steps = result.outcome.step + 1
    again = paceline.train(dataset=ROWS, reward=len, name="long", resume="latest", **settings | {"steps": steps})
    assert (again.outcome.status, again.outcome.step) == ("finished", steps)


@pytest.fixture
def heard(monkeypatch):
    """Set once the first Ctrl-C is heard: two that wait to be delivered are one."""
    event, interrupt = threading.Event(), Signals.interrupt

    def hear(signals: Signals) -> None:
        interrupt(signals)
        event.set()

    monkeypatch.setattr(Signals, "interrupt", hear)
    return event


def test_a_second_ctrl_c_stops_at_once(heard):
    """An evaluation that hangs is part of the step that a first one waits for."""
    hanging = threading.Event()

    async def score(completion):
        if not hanging.is_set():
            hanging.set()
            os.kill(os.getpid(), signal.SIGINT)
            while not heard.is_set():  # noqa: ASYNC110 - the main thread hears it
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(100)

    async def cell():
        settings = SMALL | {"eval": {"every": 1}}
        return paceline.train(dataset=ROWS, eval_dataset=ROWS, reward=score, name="stuck", **settings)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())


def test_a_second_ctrl_c_comes_back_from_a_run_whose_event_loop_is_blocked(monkeypatch, heard):
    """In a notebook the run has a thread of its own, which can be left behind; the kernel lives on."""
    monkeypatch.setattr("paceline.api.STOP_SECONDS", 0.1)
    free = threading.Event()
    blocked: list[str] = []

    async def score(completion):
        if not blocked:
            blocked.append(completion)
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(240)
            os.kill(os.getpid(), signal.SIGINT)
            free.wait(100)
        return len(completion)

    async def cell():
        return paceline.train(dataset=ROWS, reward=score, name="blocked", **SMALL)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    free.set()
    for thread in threading.enumerate():
        if thread.name == "paceline train":
            thread.join(100)


# --- what comes back


def test_a_result_is_short_in_words_and_shows_its_curve(two_rewards):
    first, last = (two_rewards.metrics[step]["reward/two/mean"] for step in (1, 2))
    told = repr(two_rewards)
    assert told == (f"RunResult(two: finished after 2 steps, reward {first:.3f} → {last:.3f}, {two_rewards.directory})")
    assert 'src="data:image/png;base64,' in two_rewards._repr_html_()


def test_a_run_that_fails_raises_with_what_it_left(capsys):
    def broken(completion):
        raise ValueError("my mistake")

    with pytest.raises(paceline.RunFailed, match="my mistake") as caught:
        paceline.train(dataset=ROWS, reward=broken, name="broken", **SMALL)
    assert isinstance(caught.value, paceline.PacelineError)
    assert caught.value.result.outcome.status == "failed"
    assert Path("runs/broken/config.toml").is_file(), "evidence of a run that began is kept"
    assert repr(caught.value.result).startswith("RunResult(broken: failed after 0 steps")
    Path("wrong.py").write_text("def score(completion):\n    raise ValueError('my mistake')\n")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("run.toml").write_text('[[env]]\ntype = "reward"\ndataset = "rows.jsonl"\nimport_path = "wrong.py:score"\n')
    assert main(["train", "run.toml", "--quiet"]) == 1
    assert "my mistake" in capsys.readouterr().err


def test_progress_is_shown_unless_quiet(capsys):
    loud = {key: value for key, value in SMALL.items() if key != "quiet"}
    paceline.train(dataset=ROWS, reward=right, **loud)
    assert "step 1/1" in " ".join(capsys.readouterr().out.split())
    paceline.train(dataset=ROWS, reward=right, **SMALL)
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_a_bar_and_the_latest_steps():
    shown: list[str] = []

    class Handle:
        def update(self, view):
            shown.append(view._repr_html_())

    clock = iter(range(1000))
    view = NotebookView(lambda view, display_id: Handle(), clock=lambda: next(clock))
    view.phase("loading model <b>")
    view.begin(RunPlan("a<b", Path("runs/a"), 20, 0, {}, ("sums",), "cpu", 604_000))
    for step in range(1, 13):
        view.step(step, {"reward/sums/mean": step / 100, "metric/sums/right": 0.5, "time/step": 0.25})
    view.note("a note")
    view.end(RunOutcome("finished", 12))
    assert '<progress value="12" max="20"' in shown[-1]
    assert "<td>0.120</td>" in shown[-1]
    assert "<td>0.010</td>" not in shown[-1], "only the latest steps"
    assert "a&lt;b" in shown[-1]
    assert repr(view).startswith("finished at step 12; step  12/20  reward 0.120")


# --- chat with it


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A LoRA run whose adapter says something else than its base."""
    settings = SMALL | {
        "steps": 2,
        "runs": str(tmp_path_factory.mktemp("lora")),
        "trainer": {"optimizer": {"lr": 0.02}},
    }
    model = {"name": "paceline:quickstart", "lora": {"rank": 4}}
    return paceline.train(dataset=ROWS, reward=lambda completion: completion.count("1"), model=model, **settings)


PROMPTS = ["reverse: hello", "copy: paceline", "add: 12+30"]


def replies(source):
    with paceline.Policy(source) as policy:
        return [policy.chat(prompt, temperature=0, max_tokens=8) for prompt in PROMPTS]


def test_export_adapter_checkpoint_and_run_are_one_policy(adapted):
    export = adapted.outcome.export
    expected = replies(export)
    assert expected != replies("paceline:quickstart")
    for source in (export / "adapter", adapted.outcome.checkpoint, adapted.directory):
        assert replies(source) == expected, source


def test_a_result_chats_in_the_next_cell(two_rewards):
    async def cell():
        return two_rewards.policy.chat("copy: ab", temperature=0, max_tokens=4)

    said = asyncio.run(cell())
    assert isinstance(said, str)
    assert said.message == {"role": "assistant", "content": str(said)}
    assert two_rewards.policy.chat([{"role": "user", "content": "copy: ab"}], temperature=0, max_tokens=4) == said
    one, same, other = (two_rewards.policy.generate("abc", seed=seed, max_tokens=6) for seed in (1, 1, 2))
    assert (one == same, one.tokens) == (True, same.tokens)
    assert other.tokens >= 1
    two_rewards.policy.close()
    assert two_rewards.policy.chat("copy: ab", temperature=0, max_tokens=1).truncated, "it is loaded again"
    two_rewards.policy.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline policy"]


def test_a_policy_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean `sampling\.max_tokens`"):
        paceline.Policy("paceline:quickstart").chat("x", max_token=3)
    with pytest.raises(paceline.PacelineError, match="no such folder"):
        paceline.Policy("./nowhere").chat("x")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(paceline.PacelineError, match="does not name the model it belongs to"):
        paceline.Policy(tmp_path)


# --- the examples


def test_the_sums_train_in_ten_lines_of_python_or_of_toml(monkeypatch, tmp_path):
    for name in ("sums.py", "sums.toml", "sums.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    assert len(Path("sums.jsonl").read_text().splitlines()) == 200
    for name in ("sums.py", "sums.toml"):
        assert len([line for line in Path(name).read_text().splitlines() if line.strip()]) <= 10
    real, results = paceline.train, []
    few = {"steps": 2, "batch_size": 16, "quiet": True}
    monkeypatch.setattr(paceline, "train", lambda **keys: results.append(real(**keys | few)), raising=False)
    runpy.run_path("sums.py", run_name="__main__")
    assert results[0].metrics[-1]["reward/sums/mean"] >= 0
    flags = ["--steps", "2", "--batch-size", "16", "--name", "toml", "--quiet"]
    assert main(["train", "sums.toml", *flags]) == 0
    assert "reward/reward/mean" in read_jsonl(Path("runs/toml/metrics.jsonl"))[-1]
    assert tomllib.loads(Path("sums.toml").read_text())["env"][0]["import_path"] == "sums.py:score"


ROOT = EXAMPLES.parents[1]


def test_every_block_of_the_page_runs(capsys):
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL):
        exec(block.replace("steps=20", "steps=1"), namespace)
    shown = capsys.readouterr().out
    assert "did you mean `sampling.max_tokens`?" in shown
    assert "RunResult(two-parts: finished after 2 steps, reward " in shown
    assert namespace["result"].outcome.step == 3
    [table] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    assert paceline.config.env.RewardEnvConfig(**tomllib.loads(table)["env"][0]).import_path == "sums.py:score"


def test_the_blocks_of_the_readme_run(monkeypatch):
    task = (ROOT / "README.md").read_text().partition("## Your own task")[2].partition("## Your own algorithm")[0]
    environment, script = re.findall(r"```python\n(.*?)```", task, re.DOTALL)
    [run_file] = re.findall(r"```toml\n(.*?)```", task, re.DOTALL)
    Path("parrot.py").write_text(environment)
    Path("parrot.toml").write_text(run_file)
    assert main(["train", "parrot.toml", "--steps", "1", "--batch-size", "8", "--eval.every", "0", "--quiet"]) == 0
    namespace: dict = {}
    exec(script.replace("steps=20", "steps=1, batch_size=8"), namespace)
    assert namespace["result"].outcome.status == "finished"
