"""One module for each group of routes. A new group is a module with a `router`, named in GROUPS."""

from paceline.ui.routes import config, lanes, live, metrics, runs

GROUPS = (runs, metrics, lanes, config, live)
