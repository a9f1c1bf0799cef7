"""What docstrings show is what happens."""

import doctest
import importlib
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
SHOWN = sorted(path for path in ROOT.rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("name", [module_of(path) for path in SHOWN])
def test_examples_are_true(name) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
