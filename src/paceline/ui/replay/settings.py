"""The settings of the loss that a page may try, and their flags of `paceline replay`.

Names come from the config's models and values are checked against them: nothing a page sends becomes a command line as
it stands. A loss of the user's own is not among them, for it would name code to run.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from paceline.config import ConfigError, load
from paceline.config.fields import Spot
from paceline.config.trainer import KLConfig, ProximalConfig, TrainerConfig
from paceline.ui.answers import refuse

PLAIN = ("normalise", "fixed_length", "entropy_coef", "clip_skip_threshold")
OWN_CODE = "custom"

Value = str | int | float | bool | None
Kind = Literal["choice", "number", "integer", "flag"]
KINDS: dict[Any, Kind] = {bool: "flag", int: "integer"}


class FormField(BaseModel):
    """One field of the form."""

    key: str
    kind: Kind
    options: list[str] = []
    optional: bool = False
    value: Value = None
    """The run's value; where it had another loss, the default."""
    help: str = ""
    of: str = ""
    """The loss it belongs to; empty for all."""


def own_code(config: Mapping[str, Any]) -> str:
    """Why a run may not be replayed from a page: a folder from elsewhere could name code of its own. Empty: it may."""
    model, trainer = _table(config, "model"), _table(config, "trainer")
    named = "model.trust_remote_code" if model.get("trust_remote_code") else ""
    if _table(trainer, "loss").get("type") == OWN_CODE:
        named = "trainer.loss.import_path"
    if not named:
        return ""
    return (
        f"`{named}` lets this run's file name code to run, so it is replayed only where you type the command yourself"
    )


def settings(config: Mapping[str, Any]) -> list[FormField]:
    """The settings that may be changed, with the run's values."""
    trainer = _table(config, "trainer")
    loss = _table(trainer, "loss")
    sections = Spot.of_field(TrainerConfig.model_fields["loss"]).sections
    types = [name for name in sections if name != OWN_CODE]
    told = [FormField(key="trainer.loss.type", kind="choice", options=types, value=loss.get("type", types[0]))]
    for name in types:
        told += _fields("trainer.loss", sections[name], loss if loss.get("type", types[0]) == name else {}, of=name)
    told += _fields("trainer", TrainerConfig, trainer, only=PLAIN)
    if trainer.get("proximal"):
        told += _fields("trainer.proximal", ProximalConfig, trainer["proximal"])
    if _table(trainer, "kl").get("how") == "loss":
        told += _fields("trainer.kl", KLConfig, trainer["kl"], only=("coef", "kind"))
    return told


def flags(file: Path, config: Mapping[str, Any], changes: Mapping[str, Value]) -> list[str]:
    """Changes as flags; refused with a sentence where a name or a value does not fit."""
    known = settings(config)
    loss = changes.get("trainer.loss.type", known[0].value)
    allowed = {setting.key: setting for setting in known if setting.of in ("", loss)}
    written = []
    for key, value in changes.items():
        if key not in allowed:
            raise refuse(400, f"`{key}` cannot be changed here: choose among {', '.join(allowed)}")
        written.append(_flag(allowed[key], value))
    try:
        load(file, written)
    except ConfigError as error:
        raise refuse(400, "; ".join(error.problems).replace("command line: --", "")) from None
    return written


def _flag(setting: FormField, value: Value) -> str:
    fits = {
        "choice": lambda: value in setting.options,
        "flag": lambda: isinstance(value, bool),
        "integer": lambda: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    }
    if value is None and setting.optional:
        return f"--no-{setting.key}"
    if not fits[setting.kind]():
        wanted = f"one of {', '.join(setting.options)}" if setting.options else f"a {setting.kind}"
        raise refuse(400, f"`{setting.key}` must be {wanted}")
    return f"--{setting.key}={str(value).lower() if isinstance(value, bool) else value}"


def _fields(
    above: str, section: type[BaseModel], given: Mapping[str, Any], only: tuple[str, ...] = (), of: str = ""
) -> Iterator[FormField]:
    for name, field in section.model_fields.items():
        if name == "type" or (only and name not in only):
            continue
        spot = Spot.of_field(field)
        options = list(get_args(spot.annotation)) if get_origin(spot.annotation) is Literal else []
        kind = "choice" if options else KINDS.get(spot.annotation, "number")
        value = given.get(name) if name in given or spot.optional else spot.default
        yield FormField(
            key=f"{above}.{name}",
            kind=kind,
            options=options,
            optional=spot.optional,
            value=value,
            help=spot.help,
            of=of,
        )


def _table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key)
    return found if isinstance(found, Mapping) else {}
