"""Makes a run directory with many rollouts, through the writer that real runs use.

    python scripts/make_big_run.py runs/big

Four environments, one with tools and one played by two seats; conversations of twenty words and more; groups that
trained, groups that were dropped, episodes that failed, evaluations, tickets, metrics and lanes. Nothing was trained:
it is there to see how pages and queries fare with a million of them. What is said comes from a stock of conversations
and is said again and again; tickets, versions, rewards and credit are each rollout's own.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from paceline.config import CheckpointConfig, EvalConfig, RecordConfig, RunConfig, dump
from paceline.config.env import CustomEnvConfig
from paceline.data import Ledger, Sample, Ticket
from paceline.observe.monitor import RunDirectory, RunOutcome, RunPlan, RunRecorder
from paceline.observe.record import RolloutRecorder
from paceline.rollout import Rollout, Turn, assemble

ENVS = ("arithmetic", "code", "search", "duel")
GROUP = 8
STEP_SECONDS = 4.0
EVALUATIONS, HELD_OUT = 20, 25
TEXT = (
    "the answer follows from what we know about numbers that divide one another so first look at every case where two "
    "of them share a factor then count how often this happens and write down what is left over because nobody has to "
    "repeat the same work twice when a table of small results already says which path is short and which one is long "
    "river garden window letter market engine winter orange silver button yellow planet bridge castle forest needle"
)
WORDS = TEXT.split()
ERRORS = (
    "{env}: TimeoutError: the sandbox did not answer (failures.timeout = drop)",
    "{env}: ValueError: could not parse the reply (failures.episode = drop)",
    "{env}: the judge gave no number (failures.judge = retry 3)",
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


class Talk(NamedTuple):
    """One conversation of the stock, with the samples made of it."""

    turns: list[Turn]
    samples: list[Sample]


class Writer:
    """Makes groups that look like a run's."""

    def __init__(self, seed: int, questions: int = 250) -> None:
        self._dice = random.Random(seed)
        self._sentences = [" ".join(self._dice.choices(WORDS, k=self._dice.randint(12, 28))) for _ in range(4000)]
        ids = {word: number for number, word in enumerate(dict.fromkeys(WORDS), start=200)}
        self._tokens = [[ids[word] for word in sentence.split()] for sentence in self._sentences]
        self._stock = {env: [self._talks(env, question) for question in range(questions)] for env in ENVS}

    def group(self, ticket: Ticket, step: int, size: int, trains: bool = True) -> list[Rollout]:
        """All rollouts of a ticket, credited with what each earned beyond their mean."""
        talks = self._dice.choice(self._stock[ticket.env])
        skill = 1 / (1 + math.exp(1 - step / 1000 + self._dice.gauss(0, 1)))
        actors = ("first", "second") if ticket.env == "duel" else ("policy",)
        version = max(0, step - 1 - self._dice.randint(0, 1))
        said = [self._dice.choice(talks) for _ in range(size * len(actors))]
        rollouts = [
            self._rollout(ticket, place // len(actors), actors[place % len(actors)], talk, version, skill)
            for place, talk in enumerate(said)
        ]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        for rollout, talk in zip(rollouts, said, strict=True):
            if trains and rollout.reward is not None:
                gain = np.float32(rollout.reward - sum(rewards) / len(rewards))
                rollout.samples = [_credited(sample, gain, version) for sample in talk.samples]
        return rollouts

    def _rollout(self, ticket: Ticket, member: int, actor: str, talk: Talk, version: int, skill: float) -> Rollout:
        turns = [replace(turn, versions=[version] * len(turn.versions)) for turn in talk.turns]
        rollout = Rollout(ticket=ticket, member=member, actor=actor, turns=turns)
        if self._dice.random() < 0.01:
            rollout.error = self._dice.choice(ERRORS).format(env=ticket.env)
        else:
            right = self._dice.random() < skill
            rollout.reward = float(right) if ticket.env != "search" else round(0.5 * right + self._dice.random() / 2, 3)
            rollout.metrics = {"right": float(right), "format": float(self._dice.random() < 0.9)}
        return rollout

    def _talks(self, env: str, question: int) -> list[Talk]:
        """A question and sixteen ways to answer it."""
        asked = self._dice.randrange(len(self._sentences))
        talks = []
        for _ in range(16):
            turns = self._turns(env, f"Question {question} of {env}: {self._sentences[asked]}?", asked)
            rollout = Rollout(ticket=Ticket(question, env, 0, question, question), member=0, turns=turns)
            talks.append(Talk(turns, assemble(rollout)))
        return talks

    def _turns(self, env: str, question: str, asked: int) -> list[Turn]:
        tools = [TOOL] if env == "search" else None
        messages = [{"role": "user", "content": question}]
        prompt = [1, *self._tokens[asked], 2]
        turns: list[Turn] = []
        for left in range(self._dice.randint(0, 2) if tools else 0, -1, -1):
            one, other = self._dice.randrange(len(self._sentences)), self._dice.randrange(len(self._sentences))
            text = f"Since {self._sentences[one]}, I say that {self._sentences[other]}."
            ids = [3, *self._tokens[one], 4, *self._tokens[other], 5]
            call = {"function": {"name": "look_up", "arguments": f'{{"word": "{WORDS[one % len(WORDS)]}"}}'}}
            turns.append(
                Turn(
                    prompt_ids=prompt,
                    completion_ids=ids,
                    logprobs=[-self._dice.expovariate(3.0) for _ in ids],
                    versions=[0] * len(ids),
                    finish="length" if self._dice.random() < 0.03 else "stop",
                    temperature=1.0,
                    messages=messages,
                    tools=tools,
                    text=text,
                    said={"role": "assistant", "content": text, "tool_calls": [call]} if left else None,
                )
            )
            told = (one + other) % len(self._sentences)
            messages = [*messages, turns[-1].message, {"role": "tool", "content": self._sentences[told]}]
            prompt = [*prompt, *ids, 6, *self._tokens[told], 2]
        return turns


def _credited(sample: Sample, gain: np.float32, version: int) -> Sample:
    mask = sample.loss_mask
    return sample.with_streams(
        versions=np.where(mask, np.int32(version), np.int32(-1)), advantages=np.where(mask, gain, np.float32(0))
    )


def make(
    path: Path, rollouts: int, batch: int = 256, seed: int = 0, made: Callable[[int], object] = lambda count: None
) -> None:
    """Steps of one batch each until there are so many rollouts; `made` hears how many there are so far."""
    steps = max(1, (rollouts - EVALUATIONS * HELD_OUT) // batch)
    config = RunConfig(
        name=path.name,
        runs=str(path.parent),
        steps=steps,
        batch_size=batch - batch % GROUP,
        eval=EvalConfig(every=max(1, steps // EVALUATIONS)),
        checkpoint=CheckpointConfig(every=0),
        record=RecordConfig(rollouts=1),
        env=[CustomEnvConfig(name=name, import_path=f"examples.{name}:Environment") for name in ENVS],
    )
    writer, count, journal = Writer(seed), 0, []
    ledger = Ledger(journal.append)
    clock = [time.time() - STEP_SECONDS * steps]
    with RunDirectory.claim(path, overwrite=True) as directory:
        directory.begin(dump(config))
        recorder, keeper = RunRecorder(path, clock=lambda: clock[0]), RolloutRecorder(path, clock=lambda: clock[0])
        with recorder, keeper:
            plan = RunPlan(path.name, path, steps, 0, {}, ENVS, "cpu", 603_904)
            recorder.begin(plan)
            keeper.begin(plan)
            for step in range(1, steps + 1):
                last = step == steps
                count += one_step(writer, ledger, recorder, keeper, step, rollouts - count if last else batch)
                if step % max(2, steps // EVALUATIONS) == 0 and not last:
                    count += evaluation(writer, keeper, step)
                recorder.tickets(journal)
                journal.clear()
                keeper.spans(step, lanes(clock[0]))
                clock[0] += STEP_SECONDS
                made(count)
                while keeper.waiting_tokens > 2_000_000:
                    time.sleep(0.005)
            recorder.end(RunOutcome("finished", steps))
            keeper.end(RunOutcome("finished", steps))


def one_step(
    writer: Writer, ledger: Ledger, recorder: RunRecorder, keeper: RolloutRecorder, step: int, room: int
) -> int:
    """A batch and what was dropped on the way to it; answers with how many rollouts that were."""
    trained: list[Rollout] = []
    made = 0
    while made < room:
        number = ledger.drawn
        env = ENVS[number % len(ENVS)]
        seats = 2 if env == "duel" else 1
        ticket = Ticket(number, env, number // 40_000, number, number * 7919 % 40_000)
        ledger.draw(ticket)
        group = writer.group(ledger.start(), step, max(1, min(GROUP, (room - made) // seats)))[: room - made]
        made += len(group)
        if len({rollout.reward for rollout in group}) == 1:
            ledger.drop(ticket, "zero_advantage")
            keeper.finished_rollouts(step, "dropped:zero_advantage", group)
        elif number % 50 == 0:
            ledger.drop(ticket, "stale")
            keeper.finished_rollouts(step, "dropped:stale", group)
        else:
            ledger.buffer(ticket)
            ledger.train(ticket, step, GROUP)
            trained += group
    keeper.finished_rollouts(step, "trained", trained)
    recorder.rollouts(step, [rollout.record() for rollout in trained[:1]])
    rewards = [rollout.reward for rollout in trained if rollout.reward is not None] or [0.0]
    lengths = [rollout.completion_length for rollout in trained] or [0]
    recorder.step(
        step,
        {
            **{f"reward/{env}/mean": sum(rewards) / len(rewards) for env in ENVS},
            "length": sum(lengths) / len(lengths),
            "loss": math.exp(-step / 3000),
            "entropy": 1.5 * math.exp(-step / 5000),
            "time/step": STEP_SECONDS,
            "tokens/s": sum(lengths) / STEP_SECONDS,
        },
    )
    return made


def evaluation(writer: Writer, keeper: RolloutRecorder, step: int) -> int:
    tickets = [Ticket(row, ENVS[row % 3], 0, row, row) for row in range(HELD_OUT)]
    played = [rollout for ticket in tickets for rollout in writer.group(ticket, step, 1, trains=False)]
    keeper.finished_rollouts(step, "evaluated", played)
    return len(played)


def lanes(start: float) -> list[tuple[str, str, float, float]]:
    parts = (("sample", 0.0, 1.5), ("score", 1.5, 1.6), ("train", 1.6, 3.7), ("publish", 3.7, 4.0))
    return [("run", kind, start + begin, start + end) for kind, begin, end in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run directory to make; replaced if it is a run")
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256, help="rollouts a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    with Progress() as progress:
        task = progress.add_task("rollouts", total=options.rollouts)
        make(
            options.folder,
            options.rollouts,
            options.batch,
            options.seed,
            lambda count: progress.update(task, completed=count),
        )
    print(f"{options.rollouts} rollouts in {options.folder}, made in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
