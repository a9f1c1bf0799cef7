"""The commands, thin: each reads its arguments and calls one function."""

from paceline.commands.entry import command, main

__all__ = ["command", "main"]
