"""Every causal language model of transformers: run exactly, refused by name, or (never) silently wrong.

python scripts/check_families.py            # all of them, some minutes
python scripts/check_families.py phi3 opt   # some
"""

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families import Verdict, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all when left out")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/models.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = {}
    for name in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[name] = verdict(name)
        if not arguments.markdown:
            kind, outcome, detail = found[name]
            print(f"{name:24} {kind:36} {outcome:10} {detail}", flush=True)
    if arguments.markdown:
        print_markdown(found)
    counts = {outcome: sum(v.outcome == outcome for v in found.values()) for outcome in ("exact", "refused", "WRONG")}
    seconds = time.perf_counter() - start
    print(f"transformers {transformers.__version__}: {counts} of {len(found)} in {seconds:.0f} s", file=sys.stderr)
    return 1 if counts["WRONG"] else 0


def print_markdown(found: dict[str, Verdict]) -> None:
    exact = [f"`{name}`" for name, v in found.items() if v.outcome == "exact"]
    print("| model type | why it is refused |\n|---|---|")
    reasons: dict[str, list[str]] = {}
    for name, v in found.items():
        if v.outcome != "exact":
            reasons.setdefault(v.detail if v.outcome == "refused" else "cannot be built small", []).append(f"`{name}`")
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"| {', '.join(names)} | {reason} |")
    print(f"\nExact: {', '.join(exact)}.")


if __name__ == "__main__":
    sys.exit(main())
