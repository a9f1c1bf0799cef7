"""User code by import path: `package.module:name`, or `path/to/file.py:name`."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError


class HookError(PacelineError):
    """User code that cannot be loaded, as a sentence for the user."""


def import_object(path: str) -> Any:
    """The object a path names."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise HookError(f"import path `{path}`: write `package.module:name` or `path/to/file.py:name`")
    module = _from_file(Path(place), path) if place.endswith(".py") else _from_package(place, path)
    if not hasattr(module, name):
        raise HookError(f"import path `{path}`: {place} has no `{name}`")
    return getattr(module, name)


def _from_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise HookError(f"import path `{path}`: no such file `{file}`")
    # The same file is one module however often it is named, so that its classes stay the same classes.
    key = f"paceline_user_{file.stem}_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[key]
            raise HookError(f"import path `{path}`: {file} raised {type(error).__name__}: {error}") from error
    return sys.modules[key]


def _from_package(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HookError(f"import path `{path}`: {error}") from error
    except Exception as error:
        raise HookError(f"import path `{path}`: {name} raised {type(error).__name__}: {error}") from error
