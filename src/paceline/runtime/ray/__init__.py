"""The `ray` placement: engines, trainer ranks and workers as Ray actors, the orchestrator in this process."""
