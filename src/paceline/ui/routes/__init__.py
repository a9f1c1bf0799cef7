"""One module for each group of routes. A new group is a module with a `router`, named in GROUPS."""

from paceline.ui.routes import ab, advice, config, diff, lanes, live, metrics, replay, rollouts, runs, tickets, tokens

GROUPS = (runs, metrics, lanes, config, live, rollouts, tokens, tickets, replay, diff, advice, ab)
