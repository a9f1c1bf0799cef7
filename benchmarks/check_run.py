"""Checks a run directory: every ticket ended once, every token was sampled by the version it names."""

import json
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.config.model import QUICKSTART
from paceline.data import Cursor, decode
from paceline.model import resolve

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


def wrong_tickets(root: Path, steps: int, groups: int, rows: int, seed: int, env: str) -> list[str]:
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
    said = {record["number"]: {record["step"]} for record in records if record["state"] == "trained"}
    seen: dict[int, set[int]] = {}
    for step, samples in enumerate(_batches(root, steps), 1):
        for sample in samples:
            seen.setdefault(sample.ticket.number, set()).add(step)
    found += [
        f"ticket {number} is in the batches {seen.get(number)}, and in the books at {said.get(number)}"
        for number in sorted(said.keys() | seen.keys())
        if said.get(number) != seen.get(number)
    ]
    sizes = Counter(step for its in said.values() for step in its)
    found += [f"step {step} trained {sizes[step]} groups" for step in range(1, steps + 1) if sizes[step] != groups]
    return found


def dropped(root: Path) -> dict[str, int]:
    """Tickets that did not train, by reason."""
    return Counter(record["reason"] for record in lines(root / "tickets.jsonl") if record["state"] == "dropped")


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
    strange: list[dict] = []
    model = AutoModelForCausalLM.from_pretrained(resolve(QUICKSTART), dtype=torch.float32)
    for version, samples in sorted(by_version.items()):
        apart = _apart(model, archive.file(version), samples, version, strange)
        counts["tokens"] += len(apart)
        counts["false"] += int((apart > CLOSE).sum())
        worst = max(worst, float(apart.max()))
        if version and archive.file(version - 1).exists():
            control = _apart(model, archive.file(version - 1), samples, version)
            counts["compared with the version before"] += len(control)
            counts["seen if false"] += int((control > CLOSE).sum())
    return {**counts, "largest difference": worst, "versions": len(by_version), "strange": strange[:12]}


def _apart(model, weights: Path, samples: list, version: int, strange: list | None = None) -> torch.Tensor:
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
            if strange is not None and bool((differences[-1] > CLOSE).any()):
                strange.append(
                    {
                        "ticket": sample.ticket.number,
                        "rollout": sample.rollout,
                        "version": version,
                        "versions": sample.versions.tolist(),
                        "ids": sample.token_ids.tolist(),
                        "ours": [round(value, 4) for value in ours[mask].tolist()],
                        "theirs": [round(value, 4) for value in theirs[mask].tolist()],
                        "weights": weights.name,
                    }
                )
    return torch.cat(differences)


def _batches(root: Path, steps: int):
    for step in range(1, steps + 1):
        yield decode((root / "batches" / f"step-{step:06d}.msgpack").read_bytes())
