"""`paceline export`: write the policy of a checkpoint as a model folder."""

import argparse
from pathlib import Path

from paceline.cli.commands import Commands
from paceline.errors import PacelineError

EXPORTING = """
Writes the policy of a run's newest checkpoint, or of a step's, as a Hugging Face folder that transformers, peft, vLLM
and `paceline serve` load. The run may be finished, killed or still training; its checkpoint may be one file or the
shards of many ranks. Weights keep the type of the model the run began from.

examples:
  paceline export runs/quickstart                          runs/quickstart/export, as the end of the run writes it
  paceline export runs/quickstart@30 -o best-model         the checkpoint of step 30
  paceline export runs/my-lora --adapter -o my-adapter     the LoRA adapter alone, in peft's form
  paceline export runs/my-lora --merged --dtype bfloat16 -o merged
"""


def add_export(commands: Commands) -> None:
    export = commands.add("export", _export, "Write the policy of a run's checkpoint as a model folder.", EXPORTING)
    export.add_argument("directory", metavar="RUN[@STEP]", help="run directory, perhaps with the step of a checkpoint")
    export.add_argument("-o", "--output", metavar="FOLDER", help="where to (RUN/export, or RUN/export-STEP)")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--merged", action="store_true", help="merged weights alone, no adapter beside them")
    form.add_argument("--adapter", action="store_true", help="the LoRA adapter alone")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (the source's)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace a folder that holds files")


def _export(known: argparse.Namespace, rest: list[str]) -> int:
    from paceline.cluster.exporting import ExportOptions, export_run
    from paceline.cluster.targets import find_run

    target = find_run(known.directory)
    if target is None:
        raise PacelineError(
            f"{known.directory} is no run directory: name one, such as runs/quickstart or runs/quickstart@20"
        )
    options = ExportOptions(
        folder=Path(known.output) if known.output else None,
        form="merged" if known.merged else "adapter" if known.adapter else "all",
        dtype=known.dtype,
        overwrite=known.overwrite,
    )
    print(f"{export_run(target, options)}: step {target.step} of {target.root}")
    return 0
