"""Sort letters, then sort them again with more: an environment for `verifiers` that talks for several turns."""

import itertools
import random
from collections.abc import Iterator

import verifiers.v1 as vf


class Letters(vf.TaskData):
    questions: list[str]
    """The questions, turn by turn: each holds all letters so far."""


class SortTask(vf.Task[Letters]):
    @vf.reward
    async def sorted_turns(self, trace: vf.Trace) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        right = [reply == "".join(sorted(asked)) for reply, asked in zip(replies, self.data.questions, strict=False)]
        return sum(right) / len(self.data.questions)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SortEnv(vf.SingleAgentEnv):
    """Asks the next question once the last is answered."""

    async def run(self, task: SortTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            for letters in task.data.questions:
                if (await talk.turn(f"sort: {letters}")).terminated:
                    break


class SortOn(vf.Taskset[SortTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[SortTask]:
        for number in itertools.count():
            letters = random.Random(number).sample("abcdefgh", 4)
            questions = ["".join(letters[:3]), "".join(letters)]
            yield SortTask(Letters(prompt=None, questions=questions), self.config.task)


__all__ = ["SortEnv", "SortOn"]
