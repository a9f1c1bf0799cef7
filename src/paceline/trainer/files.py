"""The trainer's part of a checkpoint, by name. Whichever library wrote one, the other can go on from it.

trainer.json                    counters, and how many ranks wrote
trainer.safetensors             one process alone: all tensors
trainer/shard-*.safetensors     several ranks: a file each, of its own parts
"""

import json
from collections.abc import Mapping
from pathlib import Path

STATE, FILE, FOLDER = "trainer.json", "trainer.safetensors", "trainer"


def is_checkpoint(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / FOLDER).is_dir()


def write_state(folder: Path, state: Mapping, ranks: int = 1) -> None:
    (folder / STATE).write_text(json.dumps(dict(state) | {"ranks": ranks}), encoding="utf-8")


def read_state(folder: Path) -> dict:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))
