"""A run spread over machines by Ray: engines, trainer ranks and workers as actors, the orchestrator where you are."""
