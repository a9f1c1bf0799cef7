"""Imports names of a package when they are first used, and tells the new names of those that were renamed."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


def lazy_getattr(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__`: names by the submodule they live in. So only code that needs torch loads it."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return __getattr__


RENAMED_MODULES = {
    "paceline.waits": "paceline.util.deadlines",
    "paceline.inference": "paceline.engine (its contract and the embedded engine) or paceline.clients",
    "paceline.cluster": "paceline.runtime",
    "paceline.arena": "paceline.selfplay",
    "paceline.cli": "paceline.commands",
    "paceline.monitor": "paceline.observe.monitor",
    "paceline.record": "paceline.observe.record",
    "paceline.top": "paceline.observe.terminal",
    "paceline.ui": "paceline.observe.web",
    "paceline.report": "paceline.observe.report",
    "paceline.data.balance": "paceline.data.packing",
    "paceline.data.mixture": "paceline.data.sampler",
    "paceline.orchestrator.failures": "paceline.orchestrator.episodes",
    "paceline.orchestrator.train_env": "paceline.orchestrator.episodes",
    "paceline.rollout.history": "paceline.rollout.assemble",
    "paceline.selfplay.state": "paceline.selfplay.episode",
    "paceline.trainer.batch": "paceline.trainer.backend",
}


class RenamedModules:
    """Finds no module, and says so with the new name. Asked last, after all real finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if new := RENAMED_MODULES.get(name):
            raise ModuleNotFoundError(f"`{name}` is called `{new}` now", name=name)


def install_renamed_modules() -> None:
    if RenamedModules not in sys.meta_path:
        sys.meta_path.append(RenamedModules)


def renamed_getattr(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that knows what its names are called now."""

    def missing(name: str) -> NoReturn:
        if new := names.get(name):
            raise ImportError(f"`{name}` of {module} is called `{new}` now", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def renamed_attributes(names: Mapping[str, str]) -> Callable[[object, str], NoReturn]:
    """A class's `__getattr__` that knows what its attributes are called now. Hide it from type checkers, which would
    take every name for known."""

    def missing(self: object, name: str) -> NoReturn:
        new, kind = names.get(name), type(self).__name__
        raise AttributeError(
            f"`{name}` of {kind} is called `{new}` now" if new else f"{kind} has no `{name}`", name=name
        )

    return missing
