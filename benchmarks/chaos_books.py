"""What a run directory must prove after chaos: every ticket accounted for once, every token sampled by who it says."""

import json
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.data import decode
from paceline.data.cursor import Cursor
from paceline.model.loading import QUICKSTART, resolve

CLOSE = 2e-4
"""Two kernels of one model differ by less than this in a log probability; two versions, for most tokens, by more."""


def lines(path: Path) -> list[dict]:
    """Whole lines of a file that may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class Archive:
    """Keeps the weights that were published last under each version: those of the surviving lineage."""

    def __init__(self, live: Path, folder: Path) -> None:
        self._live, self._folder = live, folder
        self._seen: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="archive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(10)

    def file(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"

    def _watch(self) -> None:
        while not self._ending.wait(0.02):
            found = [file for file in self._live.glob("*.safetensors") if file.name not in self._seen]
            for file in sorted(found, key=_age):
                try:
                    shutil.copyfile(file, self._folder / "copy")
                except OSError:
                    continue
                (self._folder / "copy").rename(self.file(int(file.name.partition("-")[0])))
                self._seen.add(file.name)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()


def wrong_tickets(root: Path, steps: int, rows: int, seed: int, env: str) -> list[str]:
    """Tickets lost, doubled, or drawn otherwise than an unbroken run draws them."""
    found = []
    records = lines(root / "tickets.jsonl")
    ends = Counter(record["number"] for record in records if record["state"] in ("trained", "dropped"))
    found += [f"ticket {number} ended {times} times" for number, times in ends.items() if times > 1]
    state = json.loads((root / "checkpoints" / "latest" / "state.json").read_text())
    waiting = {fields[0] for fields in state["ledger"]["open"]}
    drawn = set(range(state["ledger"]["drawn"]))
    found += [f"ticket {number} is nowhere" for number in sorted(drawn - set(ends) - waiting)]
    found += [f"ticket {number} was never drawn" for number in sorted(set(ends) - drawn)]
    cursor = Cursor(rows, seed, env)
    order = [cursor.draw() for _ in range(state["cursors"][env])]
    tickets = {record["number"]: record for record in records}
    found += [
        f"ticket {number} is row {record['row']}, not {order[record['draw']][2]}"
        for number, record in tickets.items()
        if order[record["draw"]][2] != record["row"]
    ]
    if len({record["draw"] for record in tickets.values()}) != len(tickets):
        found.append("one draw has two tickets")
    trained = Counter(record["step"] for record in records if record["state"] == "trained")
    groups = Counter(sample.ticket.number for step in _batches(root, steps) for sample in step)
    found += [f"step {step} trained nothing" for step in range(1, steps + 1) if not trained[step]]
    found += [
        f"ticket {number} is in a batch and not in the books as trained"
        for number in groups
        if tickets.get(number, {}).get("state") != "trained"
    ]
    return found


def false_tokens(root: Path, steps: int, archive: Archive) -> dict[str, float]:
    """Each trained token's log probability once more, under the weights its version names; and under those one version
    before, to see that a false version would be seen."""
    by_version: dict[int, list] = {}
    for samples in _batches(root, steps):
        for sample in samples:
            for version in set(sample.versions[sample.loss_mask].tolist()):
                by_version.setdefault(version, []).append(sample)
    counts = Counter({"tokens": 0, "false": 0, "seen if false": 0, "compared with the version before": 0})
    worst = 0.0
    model = AutoModelForCausalLM.from_pretrained(resolve(QUICKSTART), dtype=torch.float32)
    for version, samples in sorted(by_version.items()):
        apart = _apart(model, archive.file(version), samples, version)
        counts["tokens"] += len(apart)
        counts["false"] += int((apart > CLOSE).sum())
        worst = max(worst, float(apart.max()))
        if version and archive.file(version - 1).exists():
            control = _apart(model, archive.file(version - 1), samples, version)
            counts["compared with the version before"] += len(control)
            counts["seen if false"] += int((control > CLOSE).sum())
    return {**counts, "largest difference": worst, "versions": len(by_version)}


def _apart(model, weights: Path, samples: list, version: int) -> torch.Tensor:
    if not weights.exists():
        return torch.full((sum(int((s.versions == version).sum()) for s in samples),), float("inf"))
    model.load_state_dict(load_file(weights), strict=False)
    differences = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.as_tensor(sample.token_ids.copy())[None]
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            mask = torch.as_tensor(sample.loss_mask & (sample.versions == version))[1:]
            temperature = torch.as_tensor(sample.temperatures.copy())[1:]
            temperature = torch.where(mask, temperature, 1.0)
            ours = (logits[:-1] / temperature[:, None]).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            theirs = torch.as_tensor(sample.logprobs.copy())[1:]
            differences.append((ours - theirs).abs()[mask])
    return torch.cat(differences)


def _batches(root: Path, steps: int):
    for step in range(1, steps + 1):
        yield decode((root / "batches" / f"step-{step:06d}.msgpack").read_bytes())
