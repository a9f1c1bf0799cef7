"""Files of the trainer's part of a checkpoint. Whichever library wrote one, the other can go on from it.

trainer.json                    counters, and how many ranks wrote
trainer.safetensors             one process alone: all tensors
trainer/shard-*.safetensors     several ranks: a file each, of its own parts
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import TrainerError
from paceline.weights.manifest import find_problems, join_first
from paceline.weights.update import Array

STATE, FILE, FOLDER = "trainer.json", "trainer.safetensors", "trainer"


def is_checkpoint(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / FOLDER).is_dir()


def write_state(folder: Path, state: Mapping, ranks: int = 1) -> None:
    (folder / STATE).write_text(json.dumps(dict(state) | {"ranks": ranks}), encoding="utf-8")


def read_state(folder: Path) -> dict:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def check_files(folder: Path) -> None:
    """Compare a checkpoint's files with their digests, for readers that are no run: `export`, `eval`, `replay`. A run
    does so once for all its ranks before any of them reads."""
    if found := find_problems(folder):
        raise TrainerError(
            f"checkpoint {folder} is damaged: {join_first(found)}; name another one as RUN@STEP, or bring the files "
            "back from a copy"
        )


def strip_prefix(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of one part of a checkpoint, by their names in it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def mismatch_message(folder: Path) -> str:
    """The sentence for tensors of other names or shapes than the model's."""
    return (
        f"checkpoint {folder} belongs to another model, or to another LoRA setting: set [model] as the run had it (its "
        "config.toml says how), or begin a new run from its export (model.name)"
    )


@contextmanager
def wrap_checkpoint_errors(folder: Path) -> Generator[None]:
    """Report in a sentence what is missing or cut off in a checkpoint that has no digests."""
    try:
        yield
    except FileNotFoundError as error:
        lost = Path(error.filename).name if error.filename else "a file"
        raise TrainerError(f"checkpoint {folder} is damaged: {lost} is missing") from error
    except json.JSONDecodeError as error:
        raise TrainerError(f"checkpoint {folder} is damaged: {STATE} cannot be read") from error
    except SafetensorError as error:
        raise TrainerError(f"checkpoint {folder} is damaged: its tensors cannot be read ({error})") from error
