"""A run whose tokens are worth a look: real keeper, ledger and credit, made-up words.

ticket 0   trained in step 1; new weights came while its first member spoke
ticket 1   dropped: all rewards are equal
ticket 2   trained in step 2; two turns with a tool's words between them, and one member that failed
ticket 3   the group of ticket 2 once more, in step 3
ticket 4   trained in step 3; long
ticket 5   in flight when the run stopped
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.algorithms import GRPO
from paceline.config import algorithm
from paceline.data import Ledger, Sample, Ticket
from paceline.data.sample import TokenScores
from paceline.observe.monitor import RunPlan
from paceline.observe.monitor.directory import append_jsonl
from paceline.observe.record import RolloutRecorder
from paceline.rollout import Group, Rollout, Turn, assemble
from recorded_runs import Told

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></span>"
WORDS = ["<|user|>", "<|tool|>", "<|reply|>", HOSTILE, "Ċ", "Ġthe", "âĤ¬", "ðŁĺ", "Ģ", "Ġ", "\u202e", *"abcdefghij"]
USER, TOOL, REPLY, EVIL, BREAK, THE, EURO, FACE, REST, SPACE, TURNED = range(11)
ADDED = (USER, TOOL, REPLY, EVIL)
PROMPT = [USER, 11, 12, THE, BREAK, REPLY]
GROUP = 4


def vocabulary(folder: Path) -> Path:
    """A folder with a tokenizer.json as byte-level models have it."""
    folder.mkdir()
    spec = {
        "added_tokens": [{"id": number, "content": WORDS[number], "special": True} for number in ADDED],
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(WORDS) if number not in ADDED}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def turn(said: list[int], prompt: list[int] = PROMPT, versions: list[int] | None = None, seed: int = 0) -> Turn:
    dice = np.random.default_rng(seed)
    return Turn(
        prompt_ids=prompt,
        completion_ids=said,
        logprobs=(-dice.exponential(0.7, len(said))).astype(np.float32).tolist(),
        versions=versions or [0] * len(said),
        finish="stop",
        temperature=1.0,
        messages=[{"role": "user", "content": "ab the"}],
        text="…",
        weights={0: "aa" * 8, 1: "bb" * 8},
        top=[[(token, -0.25), (FACE, -1.75)] for token in said],
    )


def rollout(ticket: Ticket, member: int, turns: list[Turn], reward: float, **more) -> Rollout:
    made = Rollout(ticket=ticket, member=member, turns=turns, reward=reward, **more)
    made.samples = [] if made.error else assemble(made)
    return made


def credited(ticket: Ticket, rollouts: list[Rollout], algo: algorithm.GRPOConfig | None = None) -> Group:
    fine = [one for one in rollouts if one.error is None]
    group = Group(ticket=ticket, rollouts=fine, size=len(rollouts), failed=[r for r in rollouts if r.error])
    GRPO(algo or algorithm.GRPOConfig()).assign(group)
    return group


def everybody(group: Group) -> list[Rollout]:
    return sorted([*group.rollouts, *group.failed], key=lambda one: one.member)


def _first(ticket: Ticket) -> Group:
    said = [THE, EVIL, EURO, FACE, REST, BREAK, 13, SPACE, TURNED, 14]
    versions = [0] * 6 + [1] * 4
    rewards = (1.0, 0.0, 0.75, 0.25)
    return credited(
        ticket,
        [rollout(ticket, m, [turn(said, versions=versions, seed=m)], reward) for m, reward in enumerate(rewards)],
    )


def _tooled(ticket: Ticket) -> Group:
    """Two turns; the tool's two words in between train by ce, as under echo."""
    rollouts = []
    for member in range(GROUP - 1):
        opening = turn([11, 12, BREAK], versions=[1] * 3, seed=10 + member)
        later = [*PROMPT, *opening.completion_ids, TOOL, 15, 16, REPLY]
        closing = turn([13, 14], prompt=later, versions=[1] * 2, seed=20 + member)
        rollouts.append(rollout(ticket, member, [opening, closing], float(member == 1)))
    for one in rollouts:
        weights = np.zeros(len(one.samples[0]), np.float32)
        weights[len(PROMPT) + 4 : len(PROMPT) + 6] = 0.1
        one.samples = [one.samples[0].with_streams(ce_weights=weights)]
    broken = rollout(ticket, GROUP - 1, [turn([11])], 0.0, error="the tool is gone (failures.episode = drop)")
    return credited(ticket, [*rollouts, broken])


def _long(ticket: Ticket, length: int) -> Group:
    dice = np.random.default_rng(4)
    said = [[int(n) for n in dice.integers(BREAK, len(WORDS), length)] for _ in range(2)]
    versions = [2] * length
    return credited(
        ticket, [rollout(ticket, m, [turn(ids, versions=versions, seed=m)], m) for m, ids in enumerate(said)]
    )


def tokened(
    runs: Path,
    name: str = "tokens",
    length: int = 300,
    scores: Callable[[list[Sample]], TokenScores] | None = None,
    **changes,
) -> Told:
    """The whole run; the vocabulary lies beside it. `scores`: what the trainer computed for a batch, where the record
    has that."""
    folder = runs / "vocabulary"
    if not folder.exists():
        vocabulary(folder)
    told = Told(runs, name, **({"model.name": folder} | changes))
    env = told.envs[0]
    records: list[dict] = []
    ledger = Ledger(records.append)
    keeper = RolloutRecorder(told.path, clock=lambda: told.now)
    keeper.begin(RunPlan(name, told.path, 3, 0, {}, told.envs, "cpu", 0))

    def drawn(number: int) -> Ticket:
        ledger.draw(Ticket(number, env, 0, number, 100 + number))
        return ledger.start()

    def trained(group: Group, step: int, state: str = "trained") -> None:
        ledger.train(group.ticket, step, group.size)
        keeper.spans(step, [("run", kind, told.now - 0.5, told.now - 0.1) for kind in ("train", "publish")])
        if scores is not None and state == "trained":
            keeper.token_scores(step, scores([sample for one in everybody(group) for sample in one.samples]))
        keeper.finished_rollouts(step, state, everybody(group))

    evaluated = rollout(Ticket(0, env, 0, 0, 7), 0, [turn([11, 12])], 1.0)
    evaluated.samples = []
    keeper.finished_rollouts(0, "evaluated", [evaluated])
    first, equal = _first(drawn(0)), drawn(1)
    ledger.buffer(first.ticket)
    told.step()
    same = credited(equal, [rollout(equal, m, [turn([11, 12], seed=m)], 0.5) for m in range(GROUP)])
    ledger.drop(equal, "zero_advantage")
    keeper.finished_rollouts(1, "dropped:zero_advantage", everybody(same))
    trained(first, 1)
    tooled = _tooled(drawn(2))
    ledger.buffer(tooled.ticket)
    told.step()
    trained(tooled, 2)
    again = tooled.ticket._replace(number=3)
    ledger.replay(again, first=2)
    copies = [replace(r, ticket=again, samples=[replace(s, ticket=again) for s in r.samples]) for r in tooled.rollouts]
    long = _long(drawn(4), length)
    ledger.buffer(long.ticket)
    told.step()
    trained(long, 3)
    trained(Group(ticket=again, rollouts=copies, size=GROUP), 3, "replayed")
    drawn(5)
    append_jsonl(told.path / "tickets.jsonl", records)
    keeper.close()
    return told
