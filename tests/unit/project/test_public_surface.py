"""The public surface: commands with their options, keys of the run file, HTTP paths and the Python API.

`public_surface.txt` lists it, one line each. A change of it shows up in review. To accept one:

    python tests/unit/project/test_public_surface.py > tests/unit/project/public_surface.txt
"""

import argparse
import enum
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.commands import command_parsers
from paceline.config.keys import tables
from paceline.data import Sample, Ticket
from paceline.data.rollout import Group
from paceline.runtime import selfplay
from paceline.server.app import ROUTES
from paceline.trainer.terms import Streams

LISTED = Path(__file__).with_name("public_surface.txt")
INHERITED = (BaseException, enum.Enum)


def surface() -> Iterator[str]:
    yield from commands()
    yield from (
        f"key {table.header}: {key.name} = {key.default} ({key.kind})" for table in tables() for key in table.keys
    )
    yield from (f"http {route.method} {route.path}" for route in ROUTES)
    for name in sorted(paceline.__all__):
        yield from members(f"paceline.{name}", getattr(paceline, name))


def commands() -> Iterator[str]:
    for name, parser in command_parsers().parsers.items():
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                spelled = ", ".join(action.option_strings) or action.dest.upper()
                choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
                yield f"command {name} {spelled}{choices}: {' '.join((action.help or '').split())}"


def members(name: str, thing: object) -> Iterator[str]:
    """A function with its arguments; a class with its own too, and with its public members."""
    if not callable(thing):
        yield f"python {name}: {type(thing).__name__}"
        return
    if isinstance(thing, type) and issubclass(thing, INHERITED):
        yield f"python {name}: an error"
        return
    yield f"python {name}{arguments(thing)}"
    if isinstance(thing, type) and not hasattr(thing, "model_fields"):  # keys of the run file are listed above
        for member, value in inspect.getmembers_static(thing):
            if not member.startswith("_"):
                called = inspect.unwrap(getattr(value, "__func__", value))
                yield f"python {name}.{member}{arguments(called) if inspect.isfunction(called) else ''}"


def arguments(called: object) -> str:
    """Names and kinds without their types, which may be spelled in many ways."""
    if hasattr(called, "model_fields"):
        return "(keys of the run file)"
    try:
        given = inspect.signature(called).parameters.values()
    except ValueError:  # a class of C, such as a kind of text
        return ""
    return str(inspect.Signature([one.replace(annotation=one.empty) for one in given]))


def test_the_public_surface_is_the_listed_one():
    assert [*surface()] == LISTED.read_text(encoding="utf-8").splitlines()


def test_what_was_renamed_fails_with_its_new_name():
    with pytest.raises(ModuleNotFoundError, match=r"`paceline\.waits` is called `paceline\.util\.deadlines` now"):
        importlib.import_module("paceline.waits")
    with pytest.raises(ModuleNotFoundError, match=r"`paceline\.arena` is called `paceline\.selfplay` now"):
        importlib.import_module("paceline.arena.league")
    with pytest.raises(ImportError, match=r"`Stage` of paceline\.runtime\.selfplay is called `ArenaRunner` now"):
        selfplay.Stage  # noqa: B018
    with pytest.raises(ImportError, match=r"`Eval` of paceline\.config is called `EvalConfig` now"):
        from paceline.config import Eval  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'Coach'"):
        selfplay.Coach  # noqa: B018


if __name__ == "__main__":
    print(*surface(), sep="\n")


@pytest.mark.parametrize(
    ("holder", "name", "why"),
    [
        (Sample.as_sampled([1, 2]), "ref_logprobs", "`ref_logprobs` of Sample is called `teacher_logprobs` now"),
        (Sample.as_sampled([1, 2]), "colour", "Sample has no `colour`"),
        (Group(ticket=Ticket(0, "env", 0, 0, 0), rollouts=[], size=1), "places", "of Group is called `size` now"),
        (Streams(*np.zeros((7, 2))), "behaviour_logprobs", "of Streams is called `rollout_logprobs` now"),
    ],
)
def test_attributes_that_were_renamed_fail_with_their_new_name(holder, name, why):
    with pytest.raises(AttributeError, match=why):
        getattr(holder, name)


@pytest.mark.parametrize(
    ("name", "why"), [("base_logprobs", "called `kl_ref_logprobs` now"), ("env", "Sample has no `env`")]
)
def test_streams_that_do_not_exist_are_refused(name, why):
    with pytest.raises(AttributeError, match=why):
        Sample.as_sampled([1, 2]).with_streams(**{name: np.zeros(2)})
