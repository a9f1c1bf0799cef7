"""One module for each group of routes. A new group is a module with a `router`, named in GROUPS."""

from paceline.observe.web.routes import compare, replay, rollouts, runs, tickets

GROUPS = (runs, rollouts, tickets, replay, compare)
