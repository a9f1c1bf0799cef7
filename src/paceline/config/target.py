"""Loads what a command names: a run file, an example, an environment's type; and copies files to begin with."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from paceline.config.document import files_of
from paceline.config.errors import ConfigError
from paceline.config.fields import ROOT, in_backticks, join_words
from paceline.config.load import LoadedConfig, example_names, examples_folder, find_run_file, load
from paceline.config.run import FOLDER_NAME, RunConfig

KINDS = {
    "quickstart": ("quickstart", "a tiny model learns to reverse words; nothing to write"),
    "reward": ("environments/reward", "rows of a file and a Python reward function"),
    "env": ("environments/echo", "an environment class: it makes the rows and scores the replies"),
    "multi-turn": ("environments/second_try", "a function that talks for several turns, with a checker"),
    "tools": ("environments/tools", "an environment class with tools that the model calls"),
    "self-play": ("arenas/kuhn_poker", "a game the model plays against itself"),
    "sft": ("algorithms/demonstrations", "supervised fine-tuning on rows that hold the right reply"),
    "distill": ("algorithms/opd", "on-policy distillation from a served teacher"),
    "algorithm": ("algorithms/custom", "a credit function of your own"),
}
"""Short names that `paceline init` takes: the example behind each, and what it is."""


def write_starter(kind: str, folder: Path, name: str | None = None, force: bool = False) -> list[Path]:
    """Copy an example, by its kind or its name, so that it stands on its own in `folder`. The files written, the run
    file first."""
    example = KINDS[kind][0] if kind in KINDS else kind
    if example not in example_names():
        raise ConfigError(
            [f"init knows no kind `{kind}`: choose {join_words(in_backticks(KINDS))}, or any example of the package"]
        )
    source = examples_folder() / f"{example}.toml"
    name = name or kind.rpartition("/")[2]
    if not re.fullmatch(FOLDER_NAME, name):
        raise ConfigError([f"--name {name}: it names the run directory: use letters, digits, `.`, `_` and `-`"])
    text = source.read_text(encoding="utf-8")
    named = files_of(tomllib.loads(text), source.parent)
    contents = {folder / f"{name}.toml": _rewrite_paths(text, source, name, named).encode()}
    contents |= {folder / file.name: file.read_bytes() for file in named.values()}
    existing = [path for path in contents if path.exists()]
    if existing and not force:
        files = join_words(map(str, existing), "and")
        raise ConfigError([f"{files} would be replaced: add --force, or write elsewhere with --to FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        path.write_bytes(content)
    return list(contents)


def _rewrite_paths(text: str, source: Path, name: str, named: dict[str, Path]) -> str:
    """The run file as it reads in the new place: its own name, its files beside it, commands that name it."""
    text = re.sub(r'^name = "[^"]*"', f'name = "{name}"', text, count=1, flags=re.MULTILINE)
    for words, file in named.items():
        text = text.replace(f'"{words}', f'"{file.name}')

    def command(match: re.Match[str]) -> str:
        found = find_run_file(match[2])
        return f"{match[1]}{name}.toml" if found == source else match[0]

    return re.sub(r"^(#.*?paceline \w+ )(\S+)", command, text, flags=re.MULTILINE)


def load_target(target: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The run file that `target` names; or, if it is an environment's type, every default with flags that set its keys.

    `retrieval --top-k 2 --sampling.temperature 0.7` means `--env.0.type retrieval --env.0.top-k 2 --sampling...`.
    """
    if find_run_file(target) is None and target in environment_types():
        return load(None, ["--name", target, "--env.0.type", target, *map(_as_env_flag, overrides)])
    if find_run_file(target) is None and not target.endswith(".toml") and not Path(target).exists():
        hint = nearest_target(target) or "`paceline init --list` lists the examples"
        raise ConfigError([f"there is no run file, example or environment type `{target}`; {hint}"])
    return load(target, overrides)


def names_run_file(target: str) -> bool:
    """Whether a command that takes models as well reads `target` as a run file: one that ends in `.toml`, or the name
    of an example. What else exists on disk is a model."""
    return target.endswith(".toml") or (not Path(target).exists() and find_run_file(target) is not None)


def names_environment(target: str) -> bool:
    return target in environment_types() and not Path(target).exists()


def environment_types() -> list[str]:
    env = ROOT.child("env", RunConfig)
    return list(env.element.sections) if env else []


def _as_env_flag(argument: str) -> str:
    """A flag that is no key of the run file is one of the environment."""
    start, root = split_flag(argument)
    known = not argument.startswith("--") or root in RunConfig.model_fields
    return argument if known else f"{start}env.0.{argument.removeprefix(start)}"


def split_flag(flag: str) -> tuple[str, str]:
    """The dashes of a flag, with `no-` where it is negated, and the top-level key it begins with."""
    start = "--no-" if flag.startswith("--no-") else "--"
    return start, flag.removeprefix(start).partition("=")[0].partition(".")[0].replace("-", "_")


def nearest_target(target: str) -> str:
    """`did you mean ...?` with the examples and environment types that look alike, or "" if none does."""
    names = {name.rpartition("/")[2]: name for name in example_names()}
    known = {**names, **{name: name for name in (*example_names(), *environment_types())}}
    near = list(dict.fromkeys(known[word] for word in get_close_matches(target, known, n=2)))
    return f"did you mean {join_words(in_backticks(near))}?" if near else ""


ARMS = ("a", "b")


def load_arms(path: str | Path, overrides: Sequence[str]) -> dict[str, LoadedConfig]:
    """The run file for each arm of an A/B run; flags behind `--a.` and `--b.` apply to one arm only."""
    shared, own = split_by_prefix(overrides, ARMS)
    arms = {arm: load_target(str(path), [*shared, *own[arm]]) for arm in ARMS}
    for arm, loaded in arms.items():
        loaded.config.name = f"{loaded.config.name}-{arm}"
    return arms


def split_by_prefix(overrides: Sequence[str], prefixes: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides without any of these prefixes, and those behind each one, without it: `--a.steps 3` is `--steps 3`
    of `a`."""
    shared: list[str] = []
    own: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    to = shared
    for word in overrides:
        if word.startswith("--"):
            prefix, dot, key = word[2:].partition(".")
            to = own[prefix] if dot and prefix in own else shared
            word = f"--{key}" if to is not shared else word
        to.append(word)
    return shared, own
