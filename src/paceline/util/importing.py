"""User code by import path: `package.module:name`, or `path/to/file.py:name`.

A file is loaded under a private name, and so is whatever it imports from its own folder: such files and packages are
importable for the modules of that folder alone. They hide nothing from the rest of the program, and two folders may
each have a `helper.py`. Needs nothing but the standard library: worker processes start with it.
"""

import builtins
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError
from paceline.util.user_code import described, is_ctrl_c

PREFIX = "paceline_user_"
FROM_PYTHON = "python"
"""Stands before the `:` of an import path or a dataset that `paceline.train` was given as a Python object."""


class HookError(PacelineError):
    """User code that cannot be loaded, as a sentence for the user."""


def import_object(path: str) -> Any:
    """The object a path names."""
    place, name = split_import_path(path)
    module = _from_file(Path(place), path) if place.endswith(".py") else _from_package(place, path)
    if not hasattr(module, name):
        raise HookError(f"import path `{path}`: {place} has no `{name}`")
    return getattr(module, name)


def split_import_path(path: str) -> tuple[str, str]:
    """The file or module, and the name in it."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise HookError(f"import path `{path}`: write `package.module:name` or `path/to/file.py:name`")
    if place == FROM_PYTHON:
        raise HookError(
            f"import path `{path}` stands for an object that was given to paceline.train: call it again with the same "
            'arguments and resume="latest", or write the import path of a file that holds the object'
        )
    return place, name


def _from_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise HookError(f"import path `{path}`: no such file `{file}`")
    try:
        return importlib.import_module(_USER_MODULES.name_of(file))
    except BaseException as error:  # a script that ends in sys.exit() too
        if is_ctrl_c(error):
            raise
        raise HookError(f"import path `{path}`: {file} raised {described(error)}") from error


def _from_package(name: str, path: str) -> Any:
    top, dot, below = name.partition(".")
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The current folder is not on the path of Paceline's processes: a module that is named is looked up there.
            here = next((file for file in (Path(top), Path(f"{top}.py")) if file.exists()), None)
            if error.name != top or here is None:
                raise
            return importlib.import_module(f"{_USER_MODULES.name_of(here)}{dot}{below}")
    except ImportError as error:
        raise HookError(f"import path `{path}`: {error}") from error
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise HookError(f"import path `{path}`: {name} raised {described(error)}") from error


class _UserModules(MetaPathFinder):
    """Finds the modules that were given a private name, and the submodules of packages among them."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}

    def name_of(self, file: Path) -> str:
        """The private name of a file or package. The same file is one module however often it is named, so that its
        classes stay the same classes."""
        file = file.resolve()
        name = f"{PREFIX}{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
        self._files[name] = file
        return name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root, dot, _ = name.partition(".")
        if root not in self._files:
            return None
        file = self._files[root]
        if dot:
            spec = PathFinder.find_spec(name, path)
        elif file.is_dir():
            init = file / "__init__.py"
            spec = importlib.util.spec_from_file_location(name, init) if init.is_file() else ModuleSpec(name, None)
            assert spec is not None
            spec.submodule_search_locations = [str(file)]
        else:
            spec = importlib.util.spec_from_file_location(name, file)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _UserLoader(name, spec.loader.path, file.parent)
        return spec


_USER_MODULES = _UserModules()
sys.meta_path.insert(0, _USER_MODULES)


class _UserLoader(SourceFileLoader):
    """Runs a module with an `import` statement that looks into its folder first."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": self._import}
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top, dot, below = name.partition(".")

        def beside(file: Path) -> ModuleType:
            private = f"{_USER_MODULES.name_of(file)}{dot}{below}"
            return builtins.__import__(private, globals, locals, fromlist or (), 0)

        package = self._folder / top
        if level == 0 and (package / "__init__.py").is_file():
            return beside(package)
        if level == 0 and (file := package.with_name(f"{top}.py")).is_file():
            return beside(file)
        try:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        except ModuleNotFoundError as error:
            # A folder without `__init__.py` holds data as often as code: it counts where no other module has its name.
            if level == 0 and error.name == top and package.is_dir():
                return beside(package)
            raise
