"""The strict base every section of a run file derives from."""

import tomllib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator


@dataclass(frozen=True, slots=True)
class PathKey:
    """Marks a key whose value names a file or folder to read. In a run file it is relative to that file; `document.py`
    resolves it when the file is loaded. Keys that say where to write (`runs`, `engine.folder`) have no such mark."""

    kind: Literal["file", "import", "module", "dataset", "model", "checkpoint", "program"]
    """`file`: always a path. The others may also hold a name: of an installed module, of the hub, of a scheme."""


ImportPath = Annotated[str, PathKey("import")]
"""`package.module:name`, or `path/to/file.py:name`."""
ModelName = Annotated[str, PathKey("model")]
"""A folder, or a name of the hub."""
FilePath = Annotated[str, PathKey("file")]


class _ExplainsErrors(type(BaseModel)):
    """Makes `Trainer(**values)` raise the sentences of the command line in place of pydantic's report."""

    if not TYPE_CHECKING:  # type checkers read the fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                from paceline.config.errors import ConfigError, explain_values  # which imports this module

                raise ConfigError(explain_values(error, values, cls)) from None


class Section(BaseModel, metaclass=_ExplainsErrors):
    """A section of the run file. Unknown keys are errors; the docstring under a field is its help text.

    Strict: `--group-size` without a value is true, which must not pass for 1. Sections given as objects are
    copied, because a run fills in its own and two runs must not share them.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        revalidate_instances="always",
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def check_keys(self) -> None:
        """Raise a ValueError, one sentence for the user, where keys do not go together; fill in what follows."""

    @model_validator(mode="after")
    def _run_check_keys(self) -> Self:
        self.check_keys()
        return self


def check_toml_values(values: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    """Refuse values that would not survive being written into a run directory and read again."""
    try:
        written = tomli_w.dumps(values or {}).encode().decode()
    except (TypeError, ValueError):
        written = ""
    if tomllib.loads(written) != (values or {}):
        raise ValueError(f"{key} are kept in the run file: use only what TOML can hold (no None, NaN or tuples)")
    return values


class UserCode(Section):
    """User code, named by import path."""

    import_path: ImportPath
    """`package.module:name`, or `path/to/file.py:name` relative to the run file."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on to the user's code."""

    _check_toml = field_validator("kwargs")(partial(check_toml_values, key="kwargs"))
