"""Does it learn? Run files on this CPU, three seeds each, one row per finished run.

  tasks        calculator, alphabet-sort, tic-tac-toe, proposer-solver: tools, turns and self-play
  algorithms   every algorithm and loss on the quickstart model, with a curve of each in docs/curves

Progress is kept under `runs/learn`: a run that was stopped goes on from its checkpoint, and what is finished is not run
again.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bars import arguments, machine
from learn_algorithms import RECIPES, pictures
from learn_tasks import TASKS
from rows import Row, TrialLog, show
from trials import ROOT

Learn = Callable[[int, Path], Row]
TABLES: dict[str, dict[str, Learn]] = {"tasks": {task.name: task for task in TASKS}, "algorithms": dict(RECIPES)}


def main() -> int:
    names = [name for table in TABLES.values() for name in table]
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learn", help="where runs and the tables are kept")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of each")
    parser.add_argument("--table", choices=TABLES, help="only this table")
    parser.add_argument("--only", action="append", choices=names, help="only this task or algorithm")
    known = parser.parse_args()
    if known.json is not None and known.table is None:
        parser.error("a result file holds one table: say which with --table")
    log = TrialLog(known.runs / "rows.jsonl")
    cleared = [
        learn(table, known.only or names, known.seeds, known.runs, log, known.json)
        for table in TABLES
        if known.table in (None, table) and set(known.only or names) & set(TABLES[table])
    ]
    return 0 if all(cleared) else 1


def learn(table: str, names: list[str], seeds: int, runs: Path, log: TrialLog, path: Path | None) -> bool:
    """One table: train what is missing, show all of it, keep it where it was asked for."""
    chosen = {name: each for name, each in TABLES[table].items() if name in names}
    for seed in range(seeds):
        for name, each in chosen.items():
            if (name, seed) in log.rows:
                continue
            print(f"--- {name}, seed {seed} ({time.strftime('%H:%M:%S')})", flush=True)
            log.enter(each(seed, runs))
            show([log.rows[name, seed]])
    wanted = [log.rows[name, seed] for name in chosen for seed in range(seeds)]
    show(wanted)
    if table == "algorithms":
        pictures(list(chosen), runs, seeds)
    cleared = all(row.cleared for row in wanted)
    result = {"title": f"learning: {table}", "cleared": cleared, "rows": [asdict(row) for row in wanted], **machine()}
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return cleared


if __name__ == "__main__":
    sys.exit(main())
