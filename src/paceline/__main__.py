"""`python -m paceline` is the `paceline` command."""

from paceline.commands import command

command()
