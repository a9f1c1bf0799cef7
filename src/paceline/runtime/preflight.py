"""Finds what would end a run at its start, from its files alone: no weights are loaded and nothing is downloaded.

`paceline check` and `train` ask the same questions, so a run file that `check` calls valid does not fail for these
reasons later. A run file from elsewhere is safe to check: user code that it names is parsed and never imported.
"""

import ast
import importlib.util
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel
from transformers import AutoConfig

from paceline.algorithms import credit_for
from paceline.config import RunConfig
from paceline.config.base import UserCode
from paceline.config.cluster import frozen_models, scored_models
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
from paceline.config.fields import join_words
from paceline.config.hardware import unsupported_settings, uses_mlx
from paceline.config.model import ModelConfig
from paceline.config.secret import read_key
from paceline.data import DataError, Row, clean_rows, parse_address, part_problem
from paceline.data.sources import hub_name
from paceline.envs import EnvError, build_environment
from paceline.envs.base import dataset_rows, limit_rows
from paceline.envs.custom import ASYNC_ONLY, NEEDS_ROWS, ModuleEnvironment
from paceline.envs.judges import read_prompt
from paceline.envs.questions import TokenIn
from paceline.envs.search.index import load_corpus
from paceline.envs.verdicts import missing_field, prompt_fields
from paceline.envs.verifiers import fill_in_variables
from paceline.errors import PacelineError
from paceline.model import source as model_files
from paceline.model.tokenizer import load_tokenizer
from paceline.observe.monitor import exporter
from paceline.runtime.local import renderer_of
from paceline.util.importing import check_import


class PreflightError(PacelineError):
    """A run that would fail at its start. The message has one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(slots=True)
class Preflight:
    """The findings, one sentence each."""

    problems: list[str] = field(default_factory=list)
    """Why `train` would refuse the run."""
    notes: list[str] = field(default_factory=list)
    """Things that cannot be checked from here."""

    def attempt(self, work: Callable[[], Any]) -> Any:
        """The result of `work`; None where it raised a `PacelineError`, which becomes a problem."""
        try:
            return work()
        except PacelineError as error:
            self.add(str(error).splitlines())
            return None

    def add(self, problems: Iterable[str]) -> None:
        self.problems += [problem for problem in problems if problem not in self.problems]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def check_policy(config: RunConfig, found: Preflight) -> None:
    """The model that is trained, its tokenizer, and how conversations become tokens."""
    model = config.model
    check_model(model, found, mlx=uses_mlx(config.backend))
    source = found.attempt(lambda: model_files.resolve(model.tokenizer or model.name))
    folder = None if source is None else _folder(source)
    if folder is None or (not Path(source).is_dir() and model_files.tokenizer_problem(folder)):
        return  # it will be fetched from the hub
    if model.trust_remote_code and found.attempt(lambda: model_files.has_code(folder)):
        return
    local = model.model_copy(update={"tokenizer": str(folder)})
    if (tokenizer := found.attempt(lambda: load_tokenizer(local))) is not None:
        # It must be able to write conversations: by a chat template, or known to `renderers`.
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        renderer = found.attempt(lambda: renderer_of(tokenizer, ends, model))
        if renderer is not None and (split := renderer.split_markers):
            found.note(
                f"the chat template writes {join_words([f'`{one}`' for one in split])}, which the tokenizer of "
                f"`{model.name}` spells in letters: the template may be another model's"
            )


def check_model(model: ModelConfig, found: Preflight, *, mlx: bool) -> None:
    if (source := found.attempt(lambda: model_files.resolve(model.name))) is None:
        return
    if (folder := _folder(source)) is None:
        found.note(
            f"model `{model.name}` is neither a folder here nor in the hub's local cache: its files are checked when "
            "the run downloads them"
        )
        return
    if problem := model_files.folder_problem(folder):
        found.add([problem])
        return
    known = False
    if (config := found.attempt(lambda: model_files.read_config(folder))) is not None:
        code = model.trust_remote_code
        problems = list(model_files.config_problems(config, model.name, trust_remote_code=code, mlx=mlx))
        found.add(problems)
        if model.trust_remote_code and found.attempt(lambda: model_files.has_code(folder)):
            found.note(
                f"model `{model.name}` has Python code of its own, which is not run here: `train` checks the rest"
            )
        elif not problems and not mlx:
            known = _check_family(folder, model, found)
    if Path(source).is_dir():  # of a hub's model, what is not in the cache will be fetched
        damaged = list(model_files.weight_problems(folder, mlx))
        found.add(damaged)
        if known and not damaged:
            from paceline.model.loading import header_problems

            found.add(header_problems(folder, model.name))


def _check_family(folder: Path, model: ModelConfig, found: Preflight) -> bool:
    """Whether transformers knows the family and Paceline trains it; if not, the reason is among the findings."""
    if importlib.util.find_spec("torch") is None:
        found.note(f"torch is not installed here: the layers of `{model.name}` are checked when the run loads it")
        return False
    from paceline.model.support import check_family, refusals_name

    def check() -> bool:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise model_files.ModelError(model_files.unloadable_message("model", model.name, error)) from error
        with refusals_name(model.name):
            check_family(config)
        return True

    return bool(found.attempt(check))


def _folder(source: str) -> Path | None:
    """Where a model's files are on this machine: its folder, or the hub's cache; None where they are in neither."""
    if Path(source).is_dir():
        return Path(source)
    try:
        cached = try_to_load_from_cache(source, "config.json")
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


ROWS = 32
"""Rows of each dataset whose fields are looked at."""
SIZES = ("size", "eval_size", "train_examples", "eval_examples")
"""Keys that say how many rows an environment makes itself."""


def hook_paths(*values: object) -> Iterator[str]:
    """Import paths of the user code that sections of a run file name."""
    for value in values:
        if isinstance(value, UserCode):
            yield value.import_path
        if isinstance(value, BaseModel):
            yield from hook_paths(*(part for _, part in value))
        elif isinstance(value, list):
            yield from hook_paths(*value)


def check_environment(env: BaseEnvConfig, found: Preflight, given: bool) -> None:
    """The user code an environment names, then its rows."""
    paths = list(hook_paths(env.algo, env.seats) if given else hook_paths(env))
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
        ident = str(fill_in_variables(env).id)
        if importlib.util.find_spec("verifiers") is None:
            build_environment(env)  # which says so
        if ident.endswith(".py") and not Path(ident).is_file():
            raise EnvError(f"environment `{env.name}`: no such file `{ident}`")
        return
    if isinstance(env, CustomEnvConfig):  # a function must be async and needs rows; a class has its own
        defined = check_import(env.import_path)
        if isinstance(defined, ast.FunctionDef):
            raise EnvError(ASYNC_ONLY.format(env.import_path))
        if isinstance(defined, ast.AsyncFunctionDef) and env.dataset is None:
            raise EnvError(NEEDS_ROWS.format(env.name))
    sizes = {key: min(ROWS, size) for key in SIZES if isinstance(size := getattr(env, key, None), int)}
    sources = {key: _local_part(getattr(env, key), found) for key in ("dataset", "eval_dataset") if hasattr(env, key)}
    away = any(value is None and getattr(env, key) is not None for key, value in sources.items())
    small = env.model_copy(update=sizes | sources)
    with limit_rows(ROWS):
        rows, held_out = _examples(small)
    # A user's class makes its own rows; those of all others are known.
    known = not isinstance(env, ArenaEnvConfig) and (not isinstance(env, CustomEnvConfig) or env.dataset is not None)
    if not rows and not away and known:
        raise EnvError(f"environment `{env.name}` has no training rows")
    if isinstance(env, CustomEnvConfig):
        return  # a user's function may read the rows' images itself
    for judge in env.judges:
        where = f"judge `{judge.name}` of environment `{env.name}`"
        named = prompt_fields(read_prompt(judge, where))
        if known and rows and (lacking := [name for name in named if name not in rows[0]]):
            raise EnvError(f"{where}: {missing_field(lacking[0], rows[0])}")
    for split, some in (("training", rows), ("held-out", held_out)):
        for number, row in enumerate(some[:ROWS]):
            for place, message in enumerate(row.get("messages") or ()):
                if problem := part_problem(message.get("content")):  # it shows the policy what is no text
                    raise EnvError(f"environment `{env.name}`, {split} row {number}: messages[{place}]: {problem}")


def check_contamination(config: RunConfig, found: Preflight) -> None:
    """Say how many training rows overlap held-out ones, of environments that leave such rows out. It reads all rows,
    which `train` does anyway: so only `paceline check` asks."""
    for env in config.env:
        if env.contamination is False:
            continue
        sources = {key: getattr(env, key) for key in ("dataset", "eval_dataset") if getattr(env, key, None)}
        elsewhere = any(_local_part(source, Preflight()) != source for source in sources.values())
        own = isinstance(env, CustomEnvConfig) and not sources  # made by user code, which is not run here
        if isinstance(env, ArenaEnvConfig | VerifiersConfig) or elsewhere or own:
            found.note(f"environment `{env.name}`: its rows are compared with held-out ones when the run loads them")
            continue
        try:
            rows, held_out = _examples(env)
            _, report = clean_rows(rows, held_out, env.contamination)
        except DataError as error:
            found.add([f"environment `{env.name}`: {error}"])
        except PacelineError as error:
            found.add(str(error).splitlines())
        else:
            found.note(f"environment `{env.name}`: {report}")


def _examples(env: BaseEnvConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first rows of both splits. Of an environment with user code they are read without it."""
    if isinstance(env, ArenaEnvConfig):
        return [], []
    if isinstance(env, CustomEnvConfig):
        return dataset_rows(env, "train", prompted=False), dataset_rows(env, "eval", prompted=False)
    if isinstance(env, ModuleEnvConfig) or (isinstance(env, TokenInConfig) and env.scorer is not None):
        require = (ModuleEnvironment if isinstance(env, ModuleEnvConfig) else TokenIn).require
        return dataset_rows(env, "train", require=require), dataset_rows(env, "eval", require=require)
    if isinstance(env, TextArenaConfig) and env.opponent != "self":
        env = env.model_copy(update={"opponent": "random"})
    if isinstance(env, RetrievalConfig) and env.corpus is not None:
        if not Path(env.corpus).is_file():
            load_corpus(env.corpus)
        env = env.model_copy(update={"corpus": None})  # an index of all documents takes long
    environment = build_environment(env)
    if not any(hook_paths(env.algo, env.seats)):
        environment = credit_for(env, environment.actors).stage(environment)
    return environment.examples("train"), environment.examples("eval")


def _local_part(source: Any, found: Preflight) -> Any:
    """The part of a dataset that is on this machine; None where nothing is left."""
    names: list[str] = []
    for name in [source] if isinstance(source, str) else source or ():
        address, where = parse_address(name), ""
        if address is not None and address.scheme == "verifiers":  # whose tasksets are code
            where = "of a verifiers environment"
        elif (hub := hub_name(name)) and not Path(hub).is_dir():
            where = "on the hub"
        if where:
            found.note(f"dataset {name} is {where}: its rows are checked when the run loads them")
        else:
            names.append(name)
    if isinstance(source, dict):
        return {name: source[name] for name in names} or None
    return source if isinstance(source, str) and names else names or None


def refuse_unready(config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise all problems at once; `given` names the environments that come as objects instead of from the run file."""
    if problems := preflight(config, given).problems:
        raise PreflightError(problems)


def preflight(config: RunConfig, given: Collection[str] = (), *, elsewhere: bool = False) -> Preflight:
    """All checks before weights are loaded. For a run `elsewhere`, what this machine lacks is only noted."""
    found, machine = Preflight(), Preflight()
    _check_machine(config, machine)
    if elsewhere:
        found.notes += [f"on this machine: {problem}" for problem in machine.problems]
    else:
        found.add(machine.problems)
    check_policy(config, found)
    for name in scored_models(config):
        check_model(config.model.model_copy(update={"name": name}), found, mlx=False)
    for path in hook_paths(config.model_copy(update={"env": []})):
        found.attempt(lambda path=path: check_import(path))
    for env in config.env:
        check_environment(env, found, env.name in given)
    return found


def _check_machine(config: RunConfig, found: Preflight) -> None:
    """Packages, devices and keys that the run file asks for."""
    if uses_mlx(config.backend):
        from paceline.runtime.local import require_mlx

        found.add(unsupported_settings(config))
        found.attempt(require_mlx)
    elif config.placement != "ray" and config.device == "cuda":
        from paceline.runtime.torch_parts import pick_device

        found.attempt(lambda: pick_device(config.device))
    if config.placement == "ray" and importlib.util.find_spec("ray") is None:
        found.add(['placement = "ray" needs Ray: pip install "paceline[ray]"'])
    for kind in config.record.exporters:
        found.attempt(lambda kind=kind: exporter(kind, config.record.project))
    launch = config.engine.launch
    if launch is not None and shutil.which(launch.python) is None:
        found.add([f"engine.launch.python: there is no interpreter `{launch.python}`: name the one that vLLM is in"])
    keys = [("engine.api_key_env", config.engine.api_key_env)]
    keys += [(f"{where}.api_key_env", ref.api_key_env) for where, _, ref in frozen_models(config)]
    judges = [(env.name, judge) for env in config.env for judge in env.judges]
    keys += [
        (f"environment `{env}`, judge `{one.name}`: model.api_key_env", one.model.api_key_env) for env, one in judges
    ]
    for where, variable in keys:
        found.attempt(lambda variable=variable, where=where: read_key(variable, where))
