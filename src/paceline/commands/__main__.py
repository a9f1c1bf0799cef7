"""Runs the `paceline` command by `python -m paceline.commands`."""

from paceline.commands import command

command()
