"""Computes what `paceline ui`, `paceline top` and `paceline report` show of a run. Imports no torch and no fastapi."""
