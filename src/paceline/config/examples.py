"""Finds run files by name: the examples that ship with the package, and run directories."""

import importlib.resources
from functools import cache
from pathlib import Path


@cache
def examples_folder() -> Path:
    """Where the examples are: inside an installed package, beside `src` in a checkout of the repository."""
    package = Path(str(importlib.resources.files("paceline")))
    return next((f for f in (package / "examples", package.parents[1] / "examples") if f.is_dir()), package)


@cache
def example_names() -> tuple[str, ...]:
    """`quickstart`, `algorithms/gae`, ...: every example's path without its ending."""
    folder = examples_folder()
    return tuple(sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.toml")))


def find_run_file(target: str | Path) -> Path | None:
    """The run file that `target` names, None if it names none. A file that exists comes first, then a run directory,
    then an example: `quickstart`, `algorithms/gae`, or as in the repository `examples/quickstart.toml`."""
    path = Path(target)
    if path.is_file():
        return path
    if (path / "config.toml").is_file():
        return path / "config.toml"
    name = path.as_posix().removeprefix("examples/").removesuffix(".toml")
    return examples_folder() / f"{name}.toml" if name in example_names() else None
