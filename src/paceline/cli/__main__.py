"""Runs the `paceline` command by `python -m paceline.cli`."""

from paceline.cli import command

command()
