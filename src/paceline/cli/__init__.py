"""The commands, thin: each reads its arguments and calls one function."""

from paceline.cli.entry import command, main

__all__ = ["command", "main"]
