"""One module for each group of routes. A new group is a module with a `router`, named in GROUPS."""

from paceline.observe.web.routes import ab, advice, live, replay, rollouts, tickets

GROUPS = (live, rollouts, tickets, replay, advice, ab)
