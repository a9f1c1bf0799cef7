"""Loads what a command names: a run file, an example of the package, or an environment's type with every default."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from paceline.config.errors import ConfigError
from paceline.config.examples import example_names, find_run_file
from paceline.config.fields import ROOT
from paceline.config.load import Loaded, load
from paceline.config.run import RunConfig
from paceline.config.wording import code, either


def load_target(target: str, overrides: Sequence[str] = ()) -> Loaded:
    """The run file that `target` names; or, if it is an environment's type, every default with flags that set its keys.

    `retrieval --top-k 2 --sampling.temperature 0.7` means `--env.0.type retrieval --env.0.top-k 2 --sampling...`.
    """
    if find_run_file(target) is None and target in environment_types():
        return load(None, ["--name", target, "--env.0.type", target, *map(_of_environment, overrides)])
    if find_run_file(target) is None and not target.endswith(".toml") and not Path(target).exists():
        raise ConfigError([_unknown(target)])
    return load(target, overrides)


def names_run_file(target: str) -> bool:
    """Whether a command that takes models as well reads `target` as a run file: one that ends in `.toml`, or the name
    of an example. What else exists on disk is a model."""
    return target.endswith(".toml") or (not Path(target).exists() and find_run_file(target) is not None)


def names_environment(target: str) -> bool:
    """Whether such a command reads `target` as an environment's type."""
    return target in environment_types() and not Path(target).exists()


def environment_types() -> list[str]:
    section = ROOT.child("env", RunConfig)
    element = section and section.child(0, None)
    return list(element.sections) if element else []


def _of_environment(argument: str) -> str:
    """A flag that is no key of the run file is one of the environment."""
    if not argument.startswith("--"):
        return argument
    start = "--no-" if argument.startswith("--no-") else "--"
    key = argument.removeprefix(start)
    root = key.partition("=")[0].partition(".")[0].replace("-", "_")
    return argument if root in RunConfig.model_fields else f"{start}env.0.{key}"


def nearest_target(target: str) -> str:
    """`did you mean ...?` with the examples and environment types that look alike, or "" if none does."""
    names = {name.rpartition("/")[2]: name for name in example_names()}
    known = {**names, **{name: name for name in (*example_names(), *environment_types())}}
    near = list(dict.fromkeys(known[word] for word in get_close_matches(target, known, n=2)))
    return f"did you mean {either(code(near))}?" if near else ""


def _unknown(target: str) -> str:
    hint = nearest_target(target) or "`paceline init --list` lists the examples"
    return f"there is no run file, example or environment type `{target}`; {hint}"
