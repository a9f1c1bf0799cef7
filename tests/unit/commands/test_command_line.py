"""The command line itself: help, suggestions, one spelling per idea, names of examples, typed tables."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.commands import command_parsers, main
from paceline.commands.commands import COMMON_KEYS
from paceline.config import ConfigError, load
from paceline.config.document import files_of, resolve_paths
from paceline.config.load import example_names, find_run_file
from paceline.config.serve import load_served
from paceline.config.target import load_arms, load_target
from paceline.envs.workers import Workers
from paceline.util.importing import HookError, import_object

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture
def help_of(capsys):
    """What `--help` prints for a command, or for none."""

    def ask(*command: str) -> str:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize("name", command_parsers().parsers)
def test_every_command_has_help_with_an_example_that_names_files_a_pip_user_has(name, help_of):
    text = help_of(name)
    assert re.search(rf"^ *(?:\S+=\S+ )?paceline {name}\b", text.partition("examples")[2], re.MULTILINE), text
    assert "examples/" not in text


def test_the_help_and_the_readme_recommend_first_what_a_pip_user_can_type(help_of):
    text = help_of()
    assert "paceline train quickstart" in text
    assert "examples/" not in text
    first = README.read_text(encoding="utf-8").partition("```bash\n")[2].partition("```")[0].splitlines()
    assert [line.partition("#")[0].split() for line in first[:2]] == [
        ["pip", "install", "paceline"],
        ["paceline", "train", "quickstart"],
    ]


def test_the_help_of_train_lists_common_keys_in_the_words_of_the_schema(help_of):
    text = " ".join(help_of("train").split())
    assert [key for key in ("--resume", "--name", "--steps") if f"{key} " not in text] == []
    for key in COMMON_KEYS:
        assert f"--{key.replace('_', '-')} " in text
    for key, words in (("--resume", "`latest`, or the path of a checkpoint"), ("--seed", "Fixes row order")):
        assert f"{key} {words}" in text


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["trian"], "there is no command `trian`; did you mean `train`?"),
        (["zzz"], "there is no command `zzz`; the commands are init, train,"),
        (["diff", "a", "b", "--toleranse", "1"], "no option `--toleranse`; did you mean `--tolerance`?"),
        (["train", "quickstart", "--overwite"], "did you mean the option `--overwrite` instead of `--overwite`?"),
        (["train", "quikstart"], "no run file, example or environment type `quikstart`; did you mean `quickstart`?"),
        (["check", "gea"], "did you mean `algorithms/gae`?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(capsys, typed, sentence):
    assert main(typed) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "file", "rest"),
    [
        (["train", "--steps", "5", "quickstart"], "quickstart", ["--steps=5"]),
        (["train", "--trainer.optimizer.lr", "-1e-3", "quickstart"], "quickstart", ["--trainer.optimizer.lr=-1e-3"]),
        (["train", "--env.0.group-size", "4", "quickstart"], "quickstart", ["--env.0.group-size=4"]),
        (["train", "--deterministic", "quickstart", "--steps", "5"], "quickstart", ["--deterministic", "--steps=5"]),
        (["train", "--overwrite", "--engine.compile", "quickstart"], "quickstart", ["--engine.compile"]),
        (["train", "--no-steps", "quickstart", "--epochs=2"], "quickstart", ["--no-steps", "--epochs=2"]),
        (["serve", "--port", "80", "--device", "cpu", "model"], "model", ["--device=cpu"]),
    ],
)
def test_keys_may_stand_before_the_file(monkeypatch, typed, file, rest):
    seen = []
    commands = command_parsers()
    commands.parsers[typed[0]].set_defaults(run=lambda known, rest: seen.append((known, rest)) or 0)
    monkeypatch.setattr("paceline.commands.command_parsers", lambda: commands)
    assert main(typed) == 0
    ((known, keys),) = seen
    assert (getattr(known, "file", None) or known.model, keys) == (file, rest)


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (["play", "x"], "--url", "endpoint"),
        (["play", "x"], "--games", "count"),
        (["data", "x"], "--limit", "count"),
        (["ui"], "--key", "api_key"),
        (["search-server"], "--embeddings-url", "embeddings_endpoint"),
    ],
)
def test_an_idea_has_one_spelling_and_the_old_one_still_works(command, old, new, help_of):
    option = f"--{new.replace('_', '-')}"
    text = help_of(command[0])
    assert option in text
    assert f"{old} " not in text
    parser = command_parsers().parser
    for flag in (old, option):
        known, rest = parser.parse_known_args([*command, flag, "3"])
        assert (str(getattr(known, new)), rest) == ("3", [])


def test_a_typed_table_of_free_keys_replaces_and_a_section_merges(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "sampling = {temperature = 0.5}\n"
        '[[env]]\ntype = "reverse-text"\n[env.algo]\ntype = "custom"\nimport_path = "m:f"\n'
        "kwargs = {a = 1, b = {c = 2}}\n"
    )

    def kwargs(*typed: str):
        return load(file, typed).config.env[0].algo.kwargs

    assert kwargs("--env.0.algo.kwargs", "{}") == {}
    assert kwargs("--env.0.algo.kwargs", "{b = {d = 1}}") == {"b": {"d": 1}}
    assert kwargs("--env.0.algo.kwargs.b", "{d = 1}") == {"a": 1, "b": {"d": 1}}
    assert kwargs("--env.0.algo.kwargs.x", "3", "--env.0.algo.kwargs", "{y = 1}") == {"x": 3, "y": 1}
    sampling = load(file, ["--sampling", "{max_tokens = 9}"]).config.sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 9)


# --- names of examples


def test_every_command_finds_an_example_by_its_name_and_a_path_that_exists_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"quickstart", "algorithms/gae", "arenas/kuhn_poker"} <= set(example_names())
    for name in ("quickstart", "examples/quickstart.toml"):
        assert load_target(name).config.name == load(name).config.name == "quickstart"
    assert load_arms("quickstart", ["--b.seed", "1"])["b"].config.name == "quickstart-b"
    assert load_served("quickstart", []).config.model.name == "paceline:quickstart"
    assert load_served("owner/quickstart", []).config.model.name == "owner/quickstart"
    by_type = load_target("reverse-text", ["--partial-credit", "0", "--steps", "3"]).config
    assert (by_type.name, by_type.env[0].partial_credit, by_type.steps) == ("reverse-text", 0.0, 3)
    (tmp_path / "algorithms").mkdir()
    assert load_target("algorithms/gae").config.env[0].algo.type == "gae"
    Path("quickstart").write_text('name = "mine"\n')
    assert load_target("quickstart").config.name == "mine"


ROWS_OF_THE_USER = {f"seeds/async_rl_loop/{name}" for name in ("gsm8k", "gsm8k_warm_up", "token_in")}
"""Examples whose rows the user brings, as they say at their top."""


@pytest.mark.parametrize("name", example_names())
def test_every_example_is_valid_and_finds_its_files_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    loaded = load_target(name)
    file = find_run_file(name)
    assert file is not None
    for section in [*loaded.config.env, *(env.algo for env in loaded.config.env)]:
        if (path := getattr(section, "import_path", "")).partition(":")[0].endswith(".py"):
            import_object(path)
        for dataset in (getattr(section, "dataset", None), getattr(section, "eval_dataset", None)):
            made = dataset is None or dataset.startswith("verifiers:") or name in ROWS_OF_THE_USER
            assert made or Path(dataset).is_file()
        if (path := getattr(section, "id", None) or "").endswith(".py"):
            assert Path(path).is_file()
    assert not re.search("examples/|PYTHONPATH", file.read_text())


# --- paths


PATHS = """
resume = "step-1"
[model]
name = "weights"
tokenizer = "owner/name"
chat_template = "chat.jinja"
[algo]
type = "custom"
import_path = "credit.py:f"
[trainer.loss]
type = "custom"
import_path = "package.module:f"
[filters.group]
import_path = "sub/../keep.py:f"
[engine]
backend = "vllm"
folder = "out"
launch = {python = "venv/bin/python"}
[[env]]
type = "module"
name = "module"
module = "reward.py"
dataset = ["a.jsonl", "train@openai/gsm8k", "reasoning-gym:gcd?size=3"]
eval_dataset = {"a.jsonl" = 1.0, "train@rows" = 2.0}
[[env]]
type = "token-in"
dataset = "a.jsonl"
scorer = {import_path = "reward.py:f"}
[[env]]
type = "textarena"
game = "Nim-v0"
opponent = "reward.py:f"
[env.algo]
type = "opd"
teacher = {name = "weights", base_url = "http://127.0.0.1:1/v1"}
[[env]]
type = "retrieval"
corpus = "corpus.jsonl"
"""


def test_paths_of_a_run_file_are_relative_to_it_and_those_typed_to_the_working_directory(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there / "weights", there / "rows", there / "sub", there / "venv" / "bin", here):
        folder.mkdir(parents=True)
    for file in ("a.jsonl", "venv/bin/python"):
        (there / file).touch()
    (there / "run.toml").write_text(PATHS)
    monkeypatch.chdir(here)
    config = load("../there/run.toml").config
    first, second, third, fourth = config.env
    assert config.resume == f"{there}/step-1"
    assert (config.model.name, config.model.tokenizer) == (f"{there}/weights", "owner/name")
    assert config.model.chat_template == f"{there}/chat.jinja"
    assert config.algo.import_path == f"{there}/credit.py:f"
    assert config.trainer.loss.import_path == "package.module:f"
    assert config.filters.group.import_path == f"{there}/keep.py:f"
    assert config.engine.launch.python == f"{there}/venv/bin/python"
    assert (config.engine.folder, config.runs) == ("out", "runs")  # written, not read: where the command is typed
    assert first.module == f"{there}/reward.py"
    assert first.dataset == [f"{there}/a.jsonl", "train@openai/gsm8k", "reasoning-gym:gcd?size=3"]
    assert first.eval_dataset == {f"{there}/a.jsonl": 1.0, f"train@{there}/rows": 2.0}
    assert (second.dataset, second.scorer.import_path) == (f"{there}/a.jsonl", f"{there}/reward.py:f")
    assert (third.opponent, third.algo.teacher.name) == (f"{there}/reward.py:f", f"{there}/weights")
    assert fourth.corpus == f"{there}/corpus.jsonl"
    typed = load("../there/run.toml", ["--env.1.dataset", "b.jsonl", "--model.name", "weights"]).config
    assert (typed.env[1].dataset, typed.model.name) == ("b.jsonl", "weights")


def test_a_path_that_only_the_working_directory_has_keeps_working(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.toml").write_text('[model]\nchat_template = "chat.jinja"\n')
    (tmp_path / "chat.jinja").touch()
    monkeypatch.chdir(tmp_path)
    assert load("there/run.toml").config.model.chat_template == str(tmp_path / "chat.jinja")
    (tmp_path / "there" / "chat.jinja").touch()
    assert load("there/run.toml").config.model.chat_template == str(tmp_path / "there" / "chat.jinja")


def test_an_included_file_has_its_own_folder(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.toml").write_text('[model]\nchat_template = "chat.jinja"\ntokenizer = "./mine"\n')
    (tmp_path / "run.toml").write_text('include = ["base/base.toml"]\n[model]\ntokenizer = "./mine"\n')
    model = load(tmp_path / "run.toml").config.model
    assert (model.chat_template, model.tokenizer) == (f"{tmp_path}/base/chat.jinja", f"{tmp_path}/mine")


def test_a_message_about_a_path_names_it_as_it_was_written(tmp_path):
    (tmp_path / "run.toml").write_text('[[env]]\ntype = "equality"\ndataset = {"a.jsonl" = -1.0}\n')
    with pytest.raises(ConfigError, match=r"the weight of `a\.jsonl` is -1"):
        load(tmp_path / "run.toml")


def test_texts_that_are_no_paths_are_left_alone(tmp_path):
    strange = {"model": {"name": "~no-such-user/x", "tokenizer": "x" * 5000}, "resume": "latest"}
    assert resolve_paths(strange, lambda _: tmp_path) == strange
    assert files_of({"model": {"name": "owner/name"}}, tmp_path) == {}


def test_a_config_in_a_run_directory_means_that_directory(tmp_path, monkeypatch):
    run = tmp_path / "elsewhere" / "b"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('name = "a"\nruns = "runs"\nresume = "latest"\n')
    config = load(run / "config.toml").config  # a run file of that name, and no run directory
    assert (config.name, config.resume) == ("a", "latest")
    (run / "run.lock").touch()
    for path in (run / "config.toml", run):
        config = load(path).config
        assert (config.runs, config.name) == (str(tmp_path / "elsewhere"), "b")
        assert config.resume is None, "that was said to the command that resumed the run"
        assert load(path, ["--resume", "latest"]).config.resume == "latest"
    monkeypatch.chdir(run)
    assert load("config.toml").config.name == "b"
    assert load("config.toml", ["--name", "c"]).config.name == "c"


# --- user code


def test_what_lies_beside_a_file_is_importable_for_it_alone(tmp_path):
    for folder, word in (("one", "1"), ("two", "2")):
        (tmp_path / folder / "parts").mkdir(parents=True)
        (tmp_path / folder / "plain").mkdir()
        (tmp_path / folder / "helper.py").write_text(f"WORD = {word}\n\ndef back():\n    import env\n    return env\n")
        (tmp_path / folder / "parts" / "__init__.py").write_text("")
        (tmp_path / folder / "parts" / "core.py").write_text("import parts.other\nfrom . import other\nX = other.X\n")
        (tmp_path / folder / "parts" / "other.py").write_text("from helper import WORD\nX = 10 * WORD\n")
        (tmp_path / folder / "plain" / "late.py").write_text("Y = 5\n")
        (tmp_path / folder / "colorsys.py").write_text("MINE = True\n")
        (tmp_path / folder / "env.py").write_text(
            "import sys\nimport colorsys\nimport helper\nimport parts.core as core\nfrom parts import other\n\n"
            "class Env: pass\n\n"
            "def f():\n    import plain.late\n    return helper.WORD, core.X, other.X, plain.late.Y, colorsys.MINE\n\n"
            "def same():\n    return helper.back() is sys.modules[__name__]\n"
        )
    before = list(sys.path)
    results = [import_object(f"{tmp_path}/{folder}/env.py:f")() for folder in ("one", "two")]
    assert results == [(1, 10, 10, 5, True), (2, 20, 20, 5, True)]
    assert import_object(f"{tmp_path}/one/env.py:same")()
    assert import_object(f"{tmp_path}/one/env.py:Env") is import_object(f"{tmp_path}/two/../one/env.py:Env")
    import colorsys

    assert not hasattr(colorsys, "MINE")
    assert sys.path == before
    assert not {"helper", "parts", "env"} & sys.modules.keys()


def test_a_worker_process_finds_them_too(tmp_path):
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tool.py").write_text("from helper import double\n\ndef f(x):\n    return double(x) + 1\n")

    async def call():
        workers = Workers(count=1)
        try:
            return await workers.call(f"{tmp_path}/tool.py:f", [3], timeout=60)
        finally:
            await workers.close()

    assert asyncio.run(call()) == 7


def test_a_module_that_is_nowhere_is_named(tmp_path):
    (tmp_path / "env.py").write_text("import no_such_module_here\n")
    with pytest.raises(HookError, match="No module named 'no_such_module_here'"):
        import_object(f"{tmp_path}/env.py:f")


LOADING = """
import os, signal, sys, time
from paceline.util.interrupts import interrupt_ends_process

class Lost:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

if len(sys.argv) > 1:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with interrupt_ends_process():
    exec("Lost()")
"""


def test_ctrl_c_while_modules_are_loaded_ends_the_process_even_where_an_exception_would_be_lost():
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "paceline: stopped\n")
    code = LOADING.replace("sleep(5)", "sleep(0)")
    ignored = subprocess.run([sys.executable, "-c", code, "nohup"], capture_output=True, text=True, timeout=240)
    assert (ignored.returncode, ignored.stderr) == (0, "")
