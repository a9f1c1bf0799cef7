"""A small real run whose steps can be replayed exactly: every step has its weights, and the last two their batches."""

from pathlib import Path

import pytest

from run_once import once


def replayable(factory: pytest.TempPathFactory) -> Path:
    """The run's directory; trained once for all that ask."""
    return once(factory, "replayable", _train) / "kept"


def _train(runs: Path) -> None:
    from paceline import RunConfig, train

    settings = {
        "name": "kept",
        "runs": str(runs),
        "steps": 3,
        "batch_size": 16,
        "group_size": 4,
        "trainer": {"minibatches": 2, "kl": {"kind": "k3"}, "optimizer": {"lr": 1e-3}},
        "eval": {"every": 0},
        "checkpoint": {"every": 1, "keep": 2},
        "record": {"batches": 2},
    }
    assert train(RunConfig.model_validate(settings), quiet=True).outcome.status == "finished"
