"""Other people's environments trained by the real command, from the run files of `examples/doors` as they are."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import child_processes
from paceline.config.model import ModelConfig
from paceline.model import end_tokens, load_tokenizer, resolve
from paceline.rollout import Renderer
from real_seats import parts, teach

DOORS = Path(__file__).parents[2] / "examples" / "doors"
CALL = '<tool_call>{{"name": "world_look", "arguments": {{"where": "{place}"}}}}</tool_call>'


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}, which is not installed here")


class Trained:
    """What a finished run left behind."""

    def __init__(self, folder: Path) -> None:
        self.steps = [line for line in _lines(folder / "metrics.jsonl") if line["step"] > 0]
        self.rollouts = _lines(folder / "rollouts.jsonl")

    def check(self, steps: int, rollouts: int) -> None:
        """Every step trained whole batches of rollouts that were played to their end."""
        assert [line["step"] for line in self.steps] == list(range(1, steps + 1))
        for line in self.steps:
            assert line["batch/rollouts"] == rollouts
            assert line["batch/samples"] > 0
            assert line["dropped/failed_rollouts"] == 0
            assert math.isfinite(line["loss"])
        for rollout in self.rollouts:
            assert rollout["error"] is None
            assert rollout["tokens"] > 0
            assert rollout["messages"][-1]["role"] == "assistant"


def train(folder: Path, file: str, *arguments: str) -> Trained:
    """Two steps of a run file. Sampler and trainer take turns: otherwise a batch holds whatever was played first, and
    what is checked would depend on the machine's haste."""
    command = [sys.executable, "-m", "paceline", "train", str(DOORS / file), "--name", "run", "--steps", "2"]
    settings = ["--staleness", "0", "--eval.every", "0", "--record.rollouts", "100"]
    done = child_processes.run([*command, *settings, *arguments], timeout=240, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Trained(folder / "runs" / "run")


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@needs("reasoning_gym")
def test_ten_reasoning_gym_tasks_train_from_a_run_file(tmp_path):
    """Ten rows are one of each task, so that every epoch of ten draws trains all of them."""
    run = train(tmp_path, "reasoning_gym.toml", "--batch-size", "20", "--group-size", "2", "--env.0.size", "10")
    run.check(steps=2, rollouts=20)
    first = {name.removeprefix("metric/reasoning-gym/") for name in run.steps[0] if "score/" in name}
    assert len(first) == 10
    for line in run.steps:
        scores = [line[f"metric/reasoning-gym/{name}"] for name in first]
        assert all(0 <= score <= 1 for score in scores)
        assert line["reward/reasoning-gym/mean"] == pytest.approx(sum(scores) / 10)
    questions = {rollout["messages"][0]["content"] for rollout in run.rollouts}
    assert len(questions) == 10


@needs("textarena")
def test_a_game_against_oneself_trains_from_a_run_file(tmp_path):
    run = train(tmp_path, "textarena.toml", "--batch-size", "4")
    run.check(steps=2, rollouts=4)
    assert all(line["grad_norm"] > 0 for line in run.steps)
    # It knows no move, so the opening seat is warned once, then loses by the game's own rule; the other never spoke.
    for rollout in run.rollouts:
        assert (rollout["actor"], rollout["reward"]) == ("player_0", -1.0)
        assert rollout["metrics"] == {"turns": 2.0, "unfinished": 0.0, "illegal": 1.0}
        opening, _, warning, _ = (message["content"] for message in rollout["messages"])
        assert "Welcome to Nim" in opening
        assert "invalid move" in warning


@needs("verifiers")
def test_one_question_and_a_talk_of_several_turns_train_from_a_run_file(tmp_path):
    few = ["--batch-size", "16", "--group-size", "4", "--env.0.args.count", "8", "--env.1.size", "8"]
    run = train(tmp_path, "verifiers.toml", *few, "--filters.zero-advantage", "false")
    run.check(steps=2, rollouts=16)
    by_env = {env: [rollout for rollout in run.rollouts if rollout["env"] == env] for env in ("copy", "sort")}
    for rollout in by_env["copy"]:
        asked, said = rollout["messages"]
        exact = said["content"] == asked["content"].removeprefix("copy: ")
        values = rollout["metrics"]
        assert values["reward/exact"] == exact
        assert values["letters"] == len(said["content"])
        assert rollout["reward"] == pytest.approx(exact + 0.5 * values["reward/alike"])
    for rollout in by_env["sort"]:
        asked, answers = rollout["messages"][0::2], rollout["messages"][1::2]
        assert rollout["metrics"]["turns"] == len(answers) == 2
        right = [
            answer["content"] == "".join(sorted(question["content"].removeprefix("sort: ")))
            for question, answer in zip(asked, answers, strict=True)
        ]
        assert rollout["reward"] == sum(right) / 2
    assert all(by_env.values())
    assert all(line["grad_norm"] > 0 for line in run.steps)
    assert len({rollout["reward"] for rollout in run.rollouts}) > 2


@needs("verifiers")
def test_calls_of_real_tools_train_from_a_run_file(tmp_path):
    """The quickstart model calls no tools, so it is first taught to, word for word."""
    taught = teach_calls(tmp_path / "taught", ("up", "down", "here", "there"))
    few = ["--batch-size", "4", "--group-size", "2", "--sampling.temperature", "0.2"]
    run = train(tmp_path, "verifiers_tools.toml", "--model.name", str(taught), *few)
    run.check(steps=2, rollouts=4)
    found = [rollout for rollout in run.rollouts if rollout["reward"] == 1.0]
    assert found
    for rollout in found:
        asked, called, told, said = rollout["messages"]
        place = asked["content"].removeprefix("what is ").removesuffix("?")
        (call,) = called["tool_calls"]
        assert call["function"]["name"] == "world_look"
        assert json.loads(call["function"]["arguments"]) == {"where": place}
        assert told == {**told, "role": "tool", "content": f"a key is {place}"}
        assert said["content"] == "key"
        assert rollout["metrics"] == {"reward/found": 1.0, "turns": 2.0}


def teach_calls(folder: Path, places: tuple[str, ...]) -> Path:
    config = ModelConfig()
    tokenizer = load_tokenizer(config)
    model = AutoModelForCausalLM.from_pretrained(resolve(config.name), attn_implementation="sdpa")
    ends = end_tokens(tokenizer, model)
    renderer = Renderer(tokenizer, ends)
    lessons = [
        [
            {"role": "user", "content": f"what is {place}?"},
            {"role": "assistant", "content": CALL.format(place=place)},
            {"role": "tool", "content": f"a key is {place}"},
            {"role": "assistant", "content": "key"},
        ]
        for place in places
    ]
    teach(model, [part for lesson in lessons for part in parts(lesson, renderer, tokenizer, ends[0])])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
