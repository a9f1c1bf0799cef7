"""Questions from a dataset whose answers are compared as text."""

from collections.abc import Sequence

from paceline.config.env.tasks import EqualityConfig as Config
from paceline.data import Row
from paceline.envs.answers import normalised, question_and_answers, tagged
from paceline.envs.base import Outcome, SingleTurn, Split, dataset_rows
from paceline.rollout import Reply


class Equality(SingleTurn):
    """The last `<answer>...</answer>` of a reply must equal one of the row's answers."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def examples(self, split: Split) -> Sequence[Row]:
        return dataset_rows(self._config, split, self._row, require=("messages", "answer"))

    def score(self, example: Row, reply: Reply) -> Outcome:
        given = tagged(reply.text)
        if given is None:
            return Outcome.solo(0.0, correct=0.0, format=0.0)
        correct = self._plain(given) in map(self._plain, example["answer"])
        return Outcome.solo(1.0 if correct else self._config.format_reward, correct=float(correct), format=1.0)

    def _row(self, row: Row) -> Row:
        return question_and_answers(row, self._config.system)

    def _plain(self, text: str) -> str:
        return normalised(text, self._config.ignore_case)
