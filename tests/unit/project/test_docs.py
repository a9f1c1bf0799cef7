"""Every block of code in README and docs is run, or checked as far as it can be without hours or GPUs."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import paceline
from docs_blocks import PAGES, ROOT, blocks, command_lines
from paceline.commands import command_parsers
from paceline.commands.commands import COMMANDS
from paceline.config import RunConfig
from paceline.config.keys import key_nodes

LANGUAGES = {"bash", "python", "toml", "json", "js", "text"}


def test_every_block_says_its_language_and_none_is_indented_instead():
    assert {block.language for block in blocks()} <= LANGUAGES
    for page in PAGES:
        text = re.sub(r"(?ms)^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"))
        stray = re.findall(r"(?m)^(?![-*:]|\d+\.| ).+\n\n(    \S.*)$", text)
        assert stray == [], page.name


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_can_be_parsed_and_what_it_imports_of_paceline_exists(block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            module = __import__(node.module, fromlist=["_"])
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paceline":
            assert hasattr(paceline, node.attr), f"{block}: paceline.{node.attr}"


ENV_KEYS = {"dataset", "fields"}
"""A block that begins with one of these is the inside of an environment."""


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_is_part_of_a_run_file(block):
    table = tomllib.loads(block.text)
    if table.keys() <= ENV_KEYS:
        table = {"env": [table | {"type": "module", "module": "x.py"}]}
    if isinstance(table.get("env"), dict):  # `[env.algo]` below a `[[env]]` that is not shown
        games = {"type": "arena", "import_path": "x.py:Game"}
        shown = games if table["env"].keys() & {"league", "seats"} else {}
        table["env"] = [shown | table["env"]]
    for env in table.setdefault("env", [{"type": "reverse-text"}]):
        env.setdefault("type", "reverse-text")
    RunConfig.model_validate(table)


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_commands_exist_and_take_these_arguments(block):
    commands = command_parsers()
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in command_lines(block):
        match words:
            case ["paceline", *arguments]:
                known, rest = commands.parser.parse_known_args(arguments)
                flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
                keys = [flag[2:] for flag in flags]
                if known.command == "ab":
                    keys = [re.sub(r"^[ab]\.", "", key) for key in keys]
                assert not flags or COMMANDS[known.command].keys
                assert [key for key in keys if not key_nodes(key) and not key_nodes(f"env.0.{key}")] == []
            case ["make", target, *_]:
                assert target in targets
            case ["python" | "python3", file, *_] if file.endswith(".py"):
                assert (ROOT / file).is_file()
            case ["pip", "install", *wanted]:
                for name in wanted:
                    assert set(re.findall(r"paceline\[(.*)\]", name)) <= set(extras), name
            case _:
                assert words[0] in {"python", "torchrun", "curl", ".", ".venv/bin/python", "pip"}, words


def test_the_site_has_every_page_once_and_the_api_page_every_name():
    class Loader(yaml.SafeLoader):
        """Takes mkdocs' own tags for text."""

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for item in (entry if isinstance(entry, list) else entry.values()) for page in pages(item)]

    listed = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )
    written = re.findall(r"(?m)^::: paceline\.(\w+)", (ROOT / "docs" / "api.md").read_text())
    assert sorted(written) == sorted(set(paceline.__all__) - {"__version__"})


def test_every_function_of_the_architecture_page_is_where_it_says():
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "paceline"
    files = set(re.findall(r"`([\w/]+\.py)`", page))
    assert [file for file in files if not (source / file).is_file()] == []
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", page)
    assert len(named) > 40
    for file, name in named:
        scope: list[ast.stmt] = ast.parse((source / file).read_text()).body
        for part in name.split("."):
            found = [node for node in scope if getattr(node, "name", "") == part]
            assert found, f"{file}: {name}"
            scope = getattr(found[0], "body", [])


def test_the_ways_through_the_code_are_short():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for title, most in (("a row to a gradient", 20), ("a request to a token", 15), ("an optimizer step to served", 10)):
        way = page.partition(f"## From {title}")[2].partition("\n## ")[0]
        assert 5 < len(set(re.findall(r"\| `([\w/]+\.py)` `", way))) <= most


def test_keys_of_other_libraries_are_translated_to_keys_that_exist():
    page = (ROOT / "docs" / "coming-from.md").read_text()
    ours = [row.split("|")[2] for row in re.findall(r"(?m)^\|.*\|$", page)]
    keys = [key for cell in ours for key in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)[^`]*`", cell) if "algo" not in key]
    assert len(keys) > 25
    assert [key for key in keys if not key_nodes(key) and not (ROOT / "docs" / key).is_file()] == []
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    [shown] = re.findall(r"GRPOConfig\((.*?)\n\)", page, re.DOTALL)
    table = page.partition("## TRL")[2].partition("## Unsloth")[0]
    theirs = re.findall(r"(\w+)=", shown) + [
        word for row in re.findall(r"(?m)^\| (.*?) \|", table) for word in re.findall(r"`([a-z_]+)[^`(]*`", row)
    ]
    assert len(theirs) > 15
    assert [name for name in theirs if name not in fields | {"completions", "reward_funcs"}] == []


def test_the_first_page_of_the_tutorial_is_what_init_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert paceline.commands.main(["init", "reward"]) == 0
    capsys.readouterr()
    shown, own = (block.text for block in blocks("python") if block.page == "tutorial.md")
    written = ast.parse(Path("reward.py").read_text()).body[-1]
    assert isinstance(written, ast.FunctionDef)
    body = [node for node in written.body if not isinstance(node, ast.Expr)]
    [function] = ast.parse(shown).body
    assert isinstance(function, ast.FunctionDef)
    assert [ast.dump(node) for node in body] == [ast.dump(node) for node in function.body]
    Path("mine.py").write_text(own)
    [table] = [block.text for block in blocks("toml") if block.page == "tutorial.md"]
    head, _, tail = Path("reward.toml").read_text().partition("[eval]")
    Path("reward.toml").write_text(f"{head}{table}\n[eval]{tail}")
    assert paceline.commands.main(["train", "reward.toml", "--steps", "1", "--eval.every", "0", "--quiet"]) == 0
