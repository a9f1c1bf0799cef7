"""Laws of the key reference: every key is listed with a meaning, the page is the code's, `check` hides nothing."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from paceline.commands import main
from paceline.commands.run_files import config_markdown
from paceline.config import ConfigError, RunConfig, dump, load
from paceline.config.base import Section
from paceline.config.fields import dotted, key_paths
from paceline.config.keys import find_tables, key_schema, tables

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_what_the_code_says():
    written = (DOCS / "config.md").read_text(encoding="utf-8")
    assert written == config_markdown(tables()) + "\n", "write it anew: paceline config --markdown > docs/config.md"


def test_every_key_has_a_type_a_default_and_a_meaning():
    listed = [(table.header, key) for table in tables() for key in table.keys]
    assert len(listed) > 250
    assert [f"{header} {key.name}" for header, key in listed if not key.meaning] == []
    assert [f"{header} {key.name}" for header, key in listed if not (key.kind and key.default)] == []


def test_every_place_of_the_run_file_is_listed_once():
    addresses = {dotted(path) for path, _ in key_paths() if len(path) <= 4}
    assert {"trainer.optimizer.lr", "env.0.algo.std", "eval.sampling.top_p"} <= addresses
    for address in sorted(addresses):
        assert find_tables(address), address
    listed = [(table.path, table.type, key.name) for table in tables() for key in table.keys]
    assert len(listed) == len(set(listed))


def test_a_part_can_be_asked_for(capsys):
    assert main(["config", "trainer.optimizer"]) == 0
    out = capsys.readouterr().out
    assert "lr = 1e-05   (a number, at least 0)" in out
    assert "Learning rate" in out
    assert "[sampling]" not in out
    (gsm8k,) = find_tables("env.gsm8k")
    assert gsm8k.header == '[[env]] type = "gsm8k"'
    assert (gsm8k.keys[0].name, gsm8k.keys[0].default) == ("dataset", "required")
    (temperature,) = find_tables("eval.sampling.temperature")
    assert (temperature.header, [key.default for key in temperature.keys]) == ("[sampling]", ["1.0"])


def test_a_mistyped_key_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no key `trainer\.optimiser`; did you mean `trainer\.optimizer`"):
        find_tables("trainer.optimiser")
    assert main(["config", "zzzz"]) == 2


def test_json_is_the_schema_of_a_part(capsys):
    assert main(["config", "sampling.temperature", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["minimum"], found["default"]) == (0, 1.0)
    assert key_schema("model.lora")["$defs"]["LoRAConfig"]["properties"]["rank"]["default"] == 16
    assert key_schema("env.0.gsm8k")["properties"]["max_turns"]["maximum"] == 20
    assert key_schema("")["properties"]["steps"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[model.lora]\nrank = 4\n[[env]]\ntype = "reverse-text"\n[[env]]\ntype = "arithmetic"\n',
        '[[env]]\ntype = "custom"\nname = "odd"\nimport_path = "a.py:B"\n[env.kwargs]\n"a.b" = [[1], ["[c]"]]\n',
        '[[env]]\ntype = "custom"\nimport_path = "a.py:B"\n[env.kwargs]\nmode = "paceline:unset"\n',
    ],
)
def test_check_names_unset_keys_in_comments_that_change_nothing(tmp_path: Path, text: str):
    (tmp_path / "run.toml").write_text(text.replace("\\\n", "\n"))
    config = load(tmp_path / "run.toml").config
    shown = dump(config, unset=True)
    (tmp_path / "shown.toml").write_text(shown)
    assert load(tmp_path / "shown.toml").config == config
    assert tomllib.loads(shown) == tomllib.loads(dump(config))
    missing = sorted(re.findall(r"^# (\w+) = \(unset\)$", shown, re.MULTILINE))
    assert missing == sorted(_unset(config))
    model = shown.partition("[model]")[2].partition("\n[")[0]
    assert "# tokenizer = (unset)" in model
    assert ("# lora = (unset)" in model) == (config.model.lora is None)


def test_the_command_prints_unset_keys_too(tmp_path: Path, capsys):
    (tmp_path / "run.toml").write_text("steps = 3\n")
    assert main(["check", str(tmp_path / "run.toml")]) == 0
    shown = capsys.readouterr().out
    assert "# tokenizer = (unset)" in shown.splitlines()
    assert tomllib.loads(shown)["steps"] == 3


def _unset(section) -> list[str]:
    """Names of the keys without a value, wherever they are."""
    found = []
    for name, value in section:
        found += [name] if value is None else []
        for item in value if isinstance(value, list) else [value]:
            found += _unset(item) if isinstance(item, Section) else []
    return found


def test_every_page_of_the_docs_is_in_the_index():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w.-]+.md)\)", index)
    assert set(linked) >= {page.name for page in DOCS.glob("*.md")} - {"README.md"}, "add a line to docs/README.md"
    assert len(linked) == len(set(linked))


def test_a_default_run_file_is_read_off_the_reference():
    """The defaults that are told are those that hold."""
    config = RunConfig()
    for key in find_tables("sampling")[0].keys:
        assert json.loads(key.default) == getattr(config.sampling, key.name)
