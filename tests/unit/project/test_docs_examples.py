"""What the pages show of custom losses, tool calls and modules is what the code does."""

import asyncio
import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from paceline.clients.tools import ToolParser
from paceline.config.env import CurriculumConfig, ModuleEnvConfig
from paceline.config.filters import PriorityConfig
from paceline.config.trainer import CustomLossConfig
from paceline.envs import POLICY
from paceline.envs.custom import ModuleEnvironment
from paceline.rollout.seat import Reply
from paceline.trainer.terms import Streams, rl_term

DOCS = Path(__file__).parents[3] / "docs"


def block(page: str, start: str) -> str:
    """The fenced block of a page that begins with this line."""
    found = re.findall(r"(?ms)^```\w+\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"))
    return next(text for text in found if text.startswith(f"{start}\n"))


def test_a_custom_loss_as_shown_gets_the_streams_that_are_listed(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_loss.py").write_text(block("training.md", "# my_loss.py"))
    table = tomllib.loads(block("training.md", "[trainer.loss]"))["trainer"]["loss"]
    assert rl_term(CustomLossConfig.model_validate(table))
    scope: dict = {}
    exec(Path("my_loss.py").read_text(), scope)
    columns = {field.name: torch.zeros(3) for field in dataclasses.fields(Streams)}
    columns |= {"log_ratio": torch.tensor([0.0, 3.0, -1.0]), "advantages": torch.tensor([1.0, 2.0, -1.0])}
    loss = scope["clipped"](Streams(**columns), **table["kwargs"])
    torch.testing.assert_close(loss, torch.tensor([-1.0, -4.0, torch.e**-1]))
    page = (DOCS / "training.md").read_text(encoding="utf-8").partition("| stream |")[2]
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert listed == [field.name for field in dataclasses.fields(Streams)]


def test_a_tool_call_has_the_shape_that_is_shown():
    (line,) = re.findall(r'^(\{"id": "call_.*)$', (DOCS / "environments.md").read_text(), re.MULTILINE)
    shown = json.loads(line)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    reader = ToolParser(["add"])
    heard = reader.feed(said)[1] + reader.flush()[1]
    assert [call.as_dict() | {"id": ""} for call in heard] == [shown | {"id": ""}]
    assert json.loads(shown["function"]["arguments"]) == {"a": 1, "b": 2}


def test_the_settings_shown_as_defaults_are_the_defaults():
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("environments.md", "staleness.md")}
    (shown,) = re.findall(r"^curriculum = (\{.*\})$", pages["environments.md"], re.MULTILINE)
    assert CurriculumConfig(**tomllib.loads(f"x = {shown}")["x"]) == CurriculumConfig()
    blocks = re.findall(r"(?ms)^```toml\n(.*?)^```", pages["staleness.md"])
    (table,) = (tomllib.loads(text)["replay"]["priority"] for text in blocks if "[replay.priority]" in text)
    assert PriorityConfig(**table | {"metrics": {}, "importance": 0.0}) == PriorityConfig()


class Said:
    """A seat that says these things in turn."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    async def chat(self, messages, tools=None) -> Reply:
        return Reply(next(self._texts), False)


@pytest.mark.parametrize(
    ("said", "reward", "turns"), [(("7",), 1.0, 1), (("seven", "7"), 1.0, 2), (("a", "b", "c"), 0.0, 3)]
)
def test_a_module_as_shown_plays_and_scores(tmp_path: Path, monkeypatch, said, reward, turns):
    monkeypatch.chdir(tmp_path)
    Path("guess.py").write_text(block("environments.md", "# guess.py"))
    Path("rows.jsonl").write_text('{"prompt": "3 + 4?", "answer": "7"}\n')
    shown = (DOCS / "environments.md").read_text(encoding="utf-8").partition("## A module of two functions")[2]
    table = shown.partition("```toml\n")[2].partition("```")[0]
    section = tomllib.loads(table)["env"][0]
    environment = ModuleEnvironment(ModuleEnvConfig.model_validate(section))
    (row,) = environment.examples("train")
    outcome = asyncio.run(environment.play(row, {POLICY: Said(*said)}))
    assert (outcome.rewards[POLICY], outcome.metrics["turns"]) == (reward, turns)


def test_the_files_and_names_to_copy_are_where_contributors_are_sent():
    root = DOCS.parent
    page = " ".join((root / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    files = re.findall(r"`((?:src|tests|examples|scripts)/[\w./]+)`", page)
    assert len(files) > 15
    assert [file for file in files if not (root / file).is_file()] == []
    names = re.findall(r"`([A-Za-z_]+)`[^`.]{0,30}? (?:in|of) `(src/[\w./]+)`", page)
    assert len(names) > 6
    assert [name for name, file in names if not re.search(rf"\b{name}\b", (root / file).read_text())] == []
