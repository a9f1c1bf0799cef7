"""The commands, thin: each reads its arguments and calls one function."""

from paceline.cli.entry import main

__all__ = ["main"]
