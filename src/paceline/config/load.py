"""Reading and writing the run file."""

import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from paceline.config import edit
from paceline.config.base import Section
from paceline.config.document import PYTHON, Document, Origin, plain_value
from paceline.config.errors import ConfigError, explain
from paceline.config.examples import find_run_file
from paceline.config.files import layers
from paceline.config.paths import resolve_paths
from paceline.config.run import ConfigWarning, RunConfig


@dataclass(frozen=True)
class Loaded:
    """A valid config, and what is legal in it but probably not meant."""

    config: RunConfig
    warnings: list[str]


def load(
    path: str | Path | RunConfig | None, overrides: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Loaded:
    """Read a run file, all it includes, and overrides: as the command line passes them, or `settings` from Python,
    nested (`{"sampling": {"max_tokens": 16}}`) or dotted (`{"sampling.max_tokens": 16}`).

    `path` may also be a run directory, or the name of an example of the package, such as `quickstart`; `path=None`
    stands for an empty file, and a config for the file that says what its maker said. Every problem is reported at
    once, in one `ConfigError`.
    """
    document = Document()
    if isinstance(path, RunConfig):
        document.merge(plain_value(path), Origin(PYTHON))
    elif path is not None:
        stack = layers(find_run_file(path) or Path(path))
        # Rules that span several keys are reported under the file the user named.
        document.origins[()] = Origin(stack[-1].name)
        for layer in stack:
            document.merge(layer.table, Origin(layer.name, folder=layer.folder))
    problems = edit.apply(overrides, document) + edit.apply_settings(settings or {}, document)
    try:
        loaded = _validate_document(document)
    except ValidationError as error:
        problems += explain(error, document)
    if problems:
        raise ConfigError(problems)
    return loaded


def _validate_document(document: Document) -> Loaded:
    try:
        return _validate(document.resolved())
    except ValidationError:
        _validate(document.with_types())  # where it fails too, the message names paths as they were written
        raise


def _validate(table: dict[str, Any]) -> Loaded:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = RunConfig.model_validate(table)
    ours = [str(one.message) for one in caught if issubclass(one.category, ConfigWarning)]
    for other in caught:
        if not issubclass(other.category, ConfigWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return Loaded(config, ours)


def dump(config: RunConfig, *, unset: bool = False) -> str:
    """The resolved run file. Loading it gives an equal config. With `unset`, comments name the keys without a value."""
    text = tomli_w.dumps(config.model_dump(exclude_none=True))
    return _with_unset(text, config) if unset else text


def _with_unset(text: str, config: RunConfig) -> str:
    """Each table of a dump, followed by the keys that it leaves out."""
    blocks = re.split(r"(?m)^(?=\[)", text)  # a line within an array is indented
    counted: Counter[str] = Counter()
    out = []
    for block in blocks:
        section: Any = config
        if block.startswith("["):
            header = block.splitlines()[0]
            section = _at_header(header, config, counted)
            if header.startswith("[["):
                counted[header] += 1
                for below in [known for known in counted if known.startswith(f"{header[:-2]}.")]:
                    del counted[below]  # lists within an element begin anew
        missing = [name for name, value in section if value is None] if isinstance(section, Section) else []
        out.append(block.rstrip("\n") + "".join(f"\n# {name} = (unset)" for name in missing) + "\n")
    return "\n".join(out)


def _at_header(header: str, config: RunConfig, counted: Counter[str]) -> Any:
    """The section under a header such as `[env.algo]`, which is about the newest `[[env]]`."""
    node: Any = config
    table: Any = tomllib.loads(header)
    trail = ""
    while table:
        table = table[0] if isinstance(table, list) else table
        if not table:
            break
        ((key, table),) = table.items()
        trail = f"{trail}.{key}" if trail else key
        node = node.get(key) if isinstance(node, dict) else getattr(node, key, None)
        if isinstance(node, list):
            seen = counted[f"[[{trail}]]"]
            node = node[seen if header == f"[[{trail}]]" else seen - 1]
    return node


def dump_with_absolute_paths(config: RunConfig) -> str:
    """The resolved run file for a run directory: whatever exists in the working directory is named by its full path,
    so that the file means the same from everywhere. It describes the run and not the command that resumed it, so
    `resume` and what allows it are left out."""
    exclude = {"resume": True, "checkpoint": {"allow_changed_rows"}}
    here, table = Path.cwd(), config.model_dump(exclude_none=True, exclude=exclude)
    return tomli_w.dumps(resolve_paths(table, lambda _: here, only_existing=True))


def schema() -> dict[str, Any]:
    """The run file's JSON schema, for editors."""
    described = RunConfig.model_json_schema()
    include = {
        "description": "Files to build upon, relative to this one; later ones win, this file wins over all.",
        "type": "array",
        "items": {"type": "string"},
    }
    described["properties"] = {"include": include, **described["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
