"""User code by import path: `package.module:name`, or `path/to/file.py:name`.

A file is loaded under a private name, and so is whatever it imports from its own folder: such files and packages are
importable for the modules of that folder alone. They hide nothing from the rest of the program, and two folders may
each have a `helper.py`. Needs nothing but the standard library: worker processes start with it.
"""

import ast
import builtins
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError
from paceline.util.user_code import describe_error, is_ctrl_c

PREFIX = "paceline_user_"
FROM_PYTHON = "python"
"""Stands before the `:` of an import path or a dataset that `paceline.train` was given as a Python object."""


class HookError(PacelineError):
    """User code that cannot be loaded, as a sentence for the user."""


def import_object(path: str) -> Any:
    place, name = split_import_path(path)
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise HookError(f"import path `{path}`: no such file `{file}`")
    try:
        module = _from_package(place) if file is None else importlib.import_module(_USER_MODULES.name_of(file))
    except BaseException as error:  # a script that ends in sys.exit() too
        if is_ctrl_c(error):
            raise
        found = file is not None or not isinstance(error, ImportError)
        cause = f"{file or place} raised {describe_error(error)}" if found else str(error)
        raise HookError(f"import path `{path}`: {cause}") from error
    if not hasattr(module, name):
        raise HookError(f"import path `{path}`: {place} has no `{name}`")
    return getattr(module, name)


def split_import_path(path: str) -> tuple[str, str]:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise HookError(f"import path `{path}`: write `package.module:name` or `path/to/file.py:name`")
    if place == FROM_PYTHON:
        raise HookError(
            f"import path `{path}` stands for an object that was given to paceline.train: call it again with the same "
            'arguments and resume="latest", or write the import path of a file that holds the object'
        )
    return place, name


def _from_package(name: str) -> ModuleType:
    top, dot, below = name.partition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The current folder is not on the path of Paceline's processes: a module that is named is looked up there.
        here = next((file for file in (Path(top), Path(f"{top}.py")) if file.exists()), None)
        if error.name != top or here is None:
            raise
        return importlib.import_module(f"{_USER_MODULES.name_of(here)}{dot}{below}")


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


def check_import(path: str) -> ast.stmt | None:
    """The definition an import path names; None where only running the code could tell. Raises a sentence where there
    is no such file or package, it cannot be parsed, it imports what is not installed, or it defines no such name."""
    place, name = split_import_path(path)
    file = Path(place) if place.endswith(".py") else _module_file(place, path)
    if file is None:
        return None
    if not file.is_file():
        raise HookError(f"import path `{path}`: no such file `{file}`")
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except SyntaxError as error:
        raise HookError(f"import path `{path}`: {file}, line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise HookError(f"import path `{path}`: {file} cannot be read: {error}") from error
    for line, package in _imports(body):
        beside = (file.with_name(f"{package}.py"), file.with_name(package))
        known = package in sys.stdlib_module_names or _spec(package) is not None
        if not known and not any(module.exists() for module in beside):
            raise HookError(f"import path `{path}`: {file}, line {line} imports `{package}`, which is not installed")
    bound = dict(_bindings(body))
    if name in bound or bound.keys() & {"*", "__getattr__"}:
        return bound.get(name)
    hint = "".join(f": did you mean `{near}`?" for near in get_close_matches(name, bound, n=1))
    raise HookError(f"import path `{path}`: {place} has no `{name}`{hint}")


def _module_file(module: str, path: str) -> Path | None:
    """The file of an installed module, found without importing the packages around it; None where it has none."""
    root, *parts = module.split(".")
    spec = _spec(root)
    if spec is None:
        raise HookError(f"import path `{path}`: there is no package `{root}` here")
    for folder in map(Path, spec.submodule_search_locations or ()):
        below = folder.joinpath(*parts)
        for file in (below / "__init__.py", below.with_suffix(".py")):
            if file.is_file():
                return file
    return Path(spec.origin) if not parts and spec.origin and spec.origin.endswith(".py") else None


def _spec(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # a module that was put into sys.modules by hand
        return sys.modules[package].__spec__


def _imports(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Packages that the file cannot do without: those it imports at its top level, outside any `try` or `if`."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name.partition(".")[0]) for alias in statement.names)
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.lineno, statement.module.partition(".")[0]


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names bound by statements, also inside `if`, `try`, `with` and loops; `*` where only running it can tell."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name.partition(".")[0], statement) for alias in aliases)
            case ast.Expr():
                called = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                if called & {"globals", "exec", "setattr", "vars"}:
                    yield "*", statement
            case _:
                nodes = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                yield from ((node.id, statement) for node in nodes if isinstance(node.ctx, ast.Store))
                for field in ("body", "orelse", "finalbody"):
                    yield from _bindings(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    yield from _bindings(handler.body)
