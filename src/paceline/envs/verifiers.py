"""Finds environments of the `verifiers` package by id or file, and which of its two interfaces each speaks.

Below 0.4 a module has `load_environment(**args)`, which answers with a `vf.Environment`; since 0.4 it exports a
`Taskset`. The module itself says which it is.
"""

import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from paceline.config.env import SPLIT_NAMES
from paceline.config.env import VerifiersConfig as Config
from paceline.data import DataError, DatasetUri, Row
from paceline.envs.base import EnvError
from paceline.envs.verifiers_classic import ClassicEnvironment
from paceline.envs.verifiers_tasksets import TasksetEnvironment

ID, ARGS = "VERIFIERS_ENV_ID", "VERIFIERS_ENV_ARGS"
"""Variables that name the environment where the run file does not."""


def verifiers_environment(config: Config) -> ClassicEnvironment | TasksetEnvironment:
    """The environment that a section of the run file names, or the variables in its place."""
    config = fill_in_variables(config)
    assert config.id is not None
    if importlib.util.find_spec("verifiers") is None:
        raise EnvError('verifiers 0.4 is not installed: pip install "paceline[verifiers]"')
    ident = _make_importable(Path(config.id)) if config.id.endswith(".py") else config.id
    return (ClassicEnvironment if _is_classic(ident) else TasksetEnvironment)(config, ident)


def fill_in_variables(config: Config) -> Config:
    """The section with what VERIFIERS_ENV_ID and VERIFIERS_ENV_ARGS say where it has no `id`."""
    if config.id is not None:
        return config
    return config.model_copy(update={"id": _variable_id(), "args": _variable_args() | config.args})


def verifiers_rows(address: DatasetUri) -> list[Row]:
    """The rows of `verifiers:train?limit=32`, for environments that judge answers themselves."""
    if (name := address.name or "train") not in SPLIT_NAMES:
        raise DataError(f"dataset {address.uri}: there is no split `{name}`; write one of {', '.join(SPLIT_NAMES)}")
    return verifiers_environment(Config()).rows(name, address.limit())


def _variable_id() -> str:
    if not (ident := os.environ.get(ID)):
        raise EnvError(f"name the verifiers environment with `id` in its [[env]], or with {ID}")
    return ident


def _variable_args() -> dict[str, object]:
    written = os.environ.get(ARGS) or "{}"
    try:
        args = json.loads(written)
    except json.JSONDecodeError:
        args = None
    if not isinstance(args, dict):
        raise EnvError(f"{ARGS} must be a JSON object, not {written:.80}")
    return args


def _is_classic(ident: str) -> bool:
    """Whether the module has `load_environment`, and not a taskset of the package's own that has its name."""
    name = ident.rpartition("/")[2].partition("@")[0].replace("-", "_")
    is_old = _find("verifiers.envs") is not None
    if _find(f"verifiers.v1.tasksets.{name}"):
        return False
    if not _find(name):
        if is_old:
            raise EnvError(
                f"verifiers environment `{ident}` is not installed: there is no module `{name}`. Install its package "
                "(prime env install OWNER/NAME), or name a file, id = 'path/to/file.py'"
            )
        return False  # the package says what it does not find
    try:
        module = importlib.import_module(name)
    except Exception as error:
        hint = "" if is_old else "; an environment with load_environment() needs pip install 'verifiers<0.4'"
        raise EnvError(
            f"verifiers environment `{ident}` cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    is_classic = callable(getattr(module, "load_environment", None))
    if is_classic and not is_old and not getattr(module, "__all__", ()):
        raise EnvError(
            f"verifiers environment `{ident}` has load_environment() and no Taskset, as verifiers below 0.4 wants it: "
            "pip install 'verifiers<0.4'"
        )
    return is_classic and is_old


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a package above it
        return None


def _make_importable(file: Path) -> str:
    """The name that `verifiers` imports a file by. Its folder is added to the import path, of this process and of those
    that serve the environment's tools, behind everything that is there."""
    if not file.is_file():
        raise EnvError(f"verifiers environment: no such file `{file}`")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    for name in (f"verifiers.v1.tasksets.{file.stem}", file.stem):  # in the order of the package
        spec = _find(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file.resolve():
            inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if folder not in inherited:
                os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, inherited), folder])
            return file.stem
        if spec is not None:
            break
    other = "no module can have that name" if spec is None else f"`{name}` is another module, {spec.origin}"
    raise EnvError(f"verifiers environment `{file}`: {other}: rename the file")
