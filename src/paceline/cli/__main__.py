"""`python -m paceline.cli`, too."""

from paceline.cli import command

command()
