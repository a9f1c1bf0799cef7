"""Checks environments by their user code, which is parsed, and by their first rows."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.algorithms import credit_for
from paceline.cluster.preflight.found import Preflight
from paceline.config.base import Hook
from paceline.config.env import (
    ArenaEnvConfig,
    BaseEnvConfig,
    CustomEnvConfig,
    ModuleEnvConfig,
    RetrievalConfig,
    TextArenaConfig,
    TokenInConfig,
    VerifiersConfig,
)
from paceline.data import Row, parse_address, part_problem
from paceline.data.import_check import check_import
from paceline.data.sources import hub_name
from paceline.envs import EnvError, build_environment, module, token_in
from paceline.envs.custom import ASYNC_ONLY, NEEDS_ROWS
from paceline.envs.dataset import dataset_rows, first_rows
from paceline.envs.search.corpus import load_corpus

ROWS = 32
"""Rows of each dataset whose fields are looked at."""
SIZES = ("size", "eval_size", "train_examples", "eval_examples")
"""Keys that say how many rows an environment makes itself."""


def hooks(*values: object) -> Iterator[str]:
    """Import paths of the user code that sections of a run file name."""
    for value in values:
        if isinstance(value, Hook):
            yield value.import_path
        if isinstance(value, BaseModel):
            yield from hooks(*(part for _, part in value))
        elif isinstance(value, list):
            yield from hooks(*value)


def check_environment(env: BaseEnvConfig, found: Preflight, given: bool) -> None:
    """The user code an environment names, then its rows."""
    paths = list(hooks(env.algo, env.seats) if given else hooks(env))
    if isinstance(env, ModuleEnvConfig) and not given:
        paths.append(f"{env.module}:reward_fn")
    if isinstance(env, TextArenaConfig) and not given and env.opponent not in ("self", "random"):
        paths.append(env.opponent)
    before = len(found.problems)
    for path in paths:
        found.attempt(lambda path=path: check_import(path))
    if not given and len(found.problems) == before:
        found.attempt(lambda: _try_environment(env, found))


def _try_environment(env: BaseEnvConfig, found: Preflight) -> None:
    """Raise a sentence where the environment cannot be made, or its first rows are none that it can play."""
    if isinstance(env, VerifiersConfig):
        if importlib.util.find_spec("verifiers") is None:
            build_environment(env)  # which says so
        if env.id.endswith(".py") and not Path(env.id).is_file():
            raise EnvError(f"environment `{env.name}`: no such file `{env.id}`")
        return
    if isinstance(env, CustomEnvConfig):
        _check_function(env)
    sizes = {key: min(ROWS, size) for key in SIZES if isinstance(size := getattr(env, key, None), int)}
    sources = {key: _here(getattr(env, key), found) for key in ("dataset", "eval_dataset") if hasattr(env, key)}
    away = any(value is None and getattr(env, key) is not None for key, value in sources.items())
    small = env.model_copy(update=sizes | sources)
    with first_rows(ROWS):
        rows, held_out = _examples(small)
    if not rows and not away and _rows_are_known(env):
        raise EnvError(f"environment `{env.name}` has no training rows")
    if not isinstance(env, CustomEnvConfig):  # a user's function may read the rows' images itself
        _check_messages(env, "training", rows)
        _check_messages(env, "held-out", held_out)


def _rows_are_known(env: BaseEnvConfig) -> bool:
    """Whether the rows are the run file's; a user's class makes its own."""
    return not isinstance(env, ArenaEnvConfig) and (not isinstance(env, CustomEnvConfig) or env.dataset is not None)


def _examples(env: BaseEnvConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first rows of both splits. Of an environment with user code they are read without it."""
    if isinstance(env, ArenaEnvConfig):
        return [], []
    if isinstance(env, CustomEnvConfig):
        return dataset_rows(env, "train", prompted=False), dataset_rows(env, "eval", prompted=False)
    if isinstance(env, ModuleEnvConfig) or (isinstance(env, TokenInConfig) and env.scorer is not None):
        require = module.REQUIRED if isinstance(env, ModuleEnvConfig) else token_in.REQUIRED
        return dataset_rows(env, "train", require=require), dataset_rows(env, "eval", require=require)
    if isinstance(env, TextArenaConfig) and env.opponent != "self":
        env = env.model_copy(update={"opponent": "random"})
    if isinstance(env, RetrievalConfig) and env.corpus is not None:
        if not Path(env.corpus).is_file():
            load_corpus(env.corpus)
        env = env.model_copy(update={"corpus": None})  # an index of all documents takes long
    environment = build_environment(env)
    if not any(hooks(env.algo, env.seats)):
        environment = credit_for(env, environment.actors).stage(environment)
    return environment.examples("train"), environment.examples("eval")


def _check_function(env: CustomEnvConfig) -> None:
    """A function must be async and needs rows, which its definition tells; a class has its own."""
    defined = check_import(env.import_path)
    if isinstance(defined, ast.FunctionDef):
        raise EnvError(ASYNC_ONLY.format(env.import_path))
    if isinstance(defined, ast.AsyncFunctionDef) and env.dataset is None:
        raise EnvError(NEEDS_ROWS.format(env.name))


def _check_messages(env: BaseEnvConfig, split: str, rows: Sequence[Row]) -> None:
    """Raise a sentence if rows show the policy something that is no text."""
    for number, row in enumerate(rows[:ROWS]):
        for place, message in enumerate(row.get("messages") or ()):
            if problem := part_problem(message.get("content")):
                raise EnvError(f"environment `{env.name}`, {split} row {number}: messages[{place}]: {problem}")


def _here(source: Any, found: Preflight) -> Any:
    """The part of a dataset that is on this machine; None where nothing is left."""
    names = [source] if isinstance(source, str) else list(source or ())
    for name in names:
        address = parse_address(name)
        if address is not None and address.scheme == "verifiers":  # whose tasksets are code
            where = "of a verifiers environment"
        elif (hub := hub_name(name)) and not Path(hub).is_dir():
            where = "on the hub"
        else:
            continue
        found.note(f"dataset {name} is {where}: its rows are checked when the run loads them")
        names = [other for other in names if other != name]
    if isinstance(source, dict):
        return {name: source[name] for name in names} or None
    return source if isinstance(source, str) and names else names or None
