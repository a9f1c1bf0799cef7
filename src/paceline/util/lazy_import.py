"""Imports names of a package when they are first used, so that only code that needs torch loads it."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__`: names by the submodule they live in."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module `{package}` has no attribute `{name}`")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return __getattr__
