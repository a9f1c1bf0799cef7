"""A proposer writes additions, several solvers try each: the policy teaches itself where it is unsure.

    paceline train examples/arenas/proposer_solver.toml

Shown `ask: 17+25`, the proposer says another number to add to 17, which makes the question. A solver is paid for the
right sum. The proposer is paid most for a question that half of the solvers get right: one that all or none solve
teaches nothing. Good questions are stored, and later proposals start from them.
"""

import re
from collections.abc import Sequence
from typing import Any

from paceline.envs import Split
from paceline.envs.words import additions
from paceline.selfplay import (
    Actor,
    Arena,
    Artifact,
    ArtifactStore,
    EpisodeRequest,
    EpisodeState,
    Rubric,
    SingleTurnEpisode,
)


def operand(said: str, limit: int) -> int | None:
    """The number that was said, if it is one and within bounds."""
    return int(said) if re.fullmatch(r"[0-9]{1,9}", said) and int(said) <= limit else None


def right(state: EpisodeState, arena: Arena) -> dict[str, float]:
    a, b = state.request.artifact.data["operands"]
    return {"solver": float(state.last_text == str(a + b))}


class Solve(SingleTurnEpisode):
    """One try of one question."""

    episode_type = "solve"
    actors = ("solver",)
    rubric = Rubric([right])

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        a, b = artifact.data["operands"]
        return f"add: {a}+{b}"


def unsure(state: EpisodeState, arena: Arena) -> dict[str, float]:
    """4 p (1 - p) for a question that a share p solves; nothing for what is no question."""
    solved = [child.rewards["solver"] for child in state.children]
    share = sum(solved) / len(solved) if solved else 0.0
    return {"proposer": 4 * share * (1 - share)}


class Propose(SingleTurnEpisode):
    """Turn a question into another one, and let solvers try it."""

    episode_type = "propose"
    actors = ("proposer",)
    rubric = Rubric([unsure])

    def get_initial_prompt(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> str:
        a, b = artifact.data["operands"]
        return f"ask: {a}+{b}"

    async def rollout(self, arena: Arena, artifact: Artifact, state: EpisodeState) -> None:
        await super().rollout(arena, artifact, state)
        number = operand(state.last_text, arena.limit)
        state.data["valid"] = number is not None
        if number is None:
            return
        question = Artifact({"operands": [artifact.data["operands"][0], number]})
        tries = await self.spawn_all(state, [EpisodeRequest("solve", question)] * arena.solvers)
        if 0 < sum(played.rewards["solver"] for played in tries) < len(tries):
            arena.store("questions").add(question)

    def get_metrics(self, state: EpisodeState) -> dict[str, float]:
        return {"valid": float(state.data["valid"])}


class ProposerSolver(Arena):
    def __init__(
        self,
        client: Any = None,
        credit_assigner: Any = None,
        *,
        solvers: int = 4,
        limit: int = 99,
        remember: int = 256,
    ) -> None:
        super().__init__(client, credit_assigner)
        self.solvers, self.limit = solvers, limit
        self.add_actor(Actor("proposer"))
        self.add_actor(Actor("solver"))
        self.add_episode(Propose())
        self.add_episode(Solve())
        self.add_store("questions", ArtifactStore(remember))
        for a, b in additions("train", remember, seed=0):
            self.store("questions").add(Artifact({"operands": [a, b]}))

    def get_batch(self) -> Sequence[EpisodeRequest]:
        """Proposals that start from questions which were solved sometimes, the latest of them."""
        drawn = self.store("questions").sample(8, self.rng)
        return [EpisodeRequest("propose", artifact) for artifact in drawn for _ in range(4)]

    def requests(self, split: Split) -> Sequence[EpisodeRequest]:
        """Held-out sums for the solver alone."""
        if split == "train":
            return []
        return [EpisodeRequest("solve", Artifact({"operands": [a, b]})) for a, b in additions("eval", 128, seed=0)]
