"""Copy a word: an environment for `verifiers` with one question, two rewards and a metric."""

import difflib
import random

import verifiers.v1 as vf


class Word(vf.TaskData):
    answer: str


class CopyTask(vf.Task[Word]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def alike(self, trace: vf.Trace) -> float:
        return difflib.SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class CopyConfig(vf.TasksetConfig):
    count: int = 64
    first: int = 0
    """Place in the list of words to begin at: held-out tasks begin after the others."""


class CopyWords(vf.Taskset[CopyTask, CopyConfig]):
    def load(self) -> list[CopyTask]:
        words = [_word(number) for number in range(self.config.first, self.config.first + self.config.count)]
        return [CopyTask(Word(prompt=f"copy: {word}", answer=word), self.config.task) for word in words]


def _word(number: int) -> str:
    luck = random.Random(number)
    return "".join(luck.choice("abcdefgh") for _ in range(luck.randint(3, 5)))


__all__ = ["CopyWords"]
