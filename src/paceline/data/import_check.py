"""Checks import paths by reading the files they name: nothing of the user's code runs."""

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from paceline.util.importing import HookError, split_import_path


def check_import(path: str) -> ast.stmt | None:
    """The definition an import path names; None where only running the code could tell. Raises a sentence where there
    is no such file or package, it cannot be parsed, it imports what is not installed, or it defines no such name."""
    place, name = split_import_path(path)
    file = Path(place) if place.endswith(".py") else _module_file(place, path)
    if file is None:
        return None
    if not file.is_file():
        raise HookError(f"import path `{path}`: no such file `{file}`")
    module = _parsed(file, path)
    for line, package in _imports(module.body):
        if not _installed(package, file.parent):
            raise HookError(f"import path `{path}`: {file}, line {line} imports `{package}`, which is not installed")
    return _definition(module, name, f"import path `{path}`: {place}")


def _definition(module: ast.Module, name: str, where: str) -> ast.stmt | None:
    bound = dict(_bindings(module.body))
    if name in bound or bound.keys() & {"*", "__getattr__"}:
        return bound.get(name)
    near = get_close_matches(name, bound, n=1)
    hint = f": did you mean `{near[0]}`?" if near else ""
    raise HookError(f"{where} has no `{name}`{hint}")


def _parsed(file: Path, path: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise HookError(f"import path `{path}`: {file}, line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise HookError(f"import path `{path}`: {file} cannot be read: {error}") from error


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


def _installed(package: str, folder: Path) -> bool:
    beside = (folder / f"{package}.py", folder / package)
    return package in sys.stdlib_module_names or _spec(package) is not None or any(file.exists() for file in beside)


def _spec(package: str) -> importlib.machinery.ModuleSpec | None:
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
