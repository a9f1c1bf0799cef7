"""Questions whose answers must be looked up, over several turns."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config.env import RetrievalConfig as Config
from paceline.data import BadRow, Row, open_rows
from paceline.envs.base import POLICY, DatasetEnvironment, Outcome, Split
from paceline.envs.search.client import LocalSearch, ResultDict, SearchClient
from paceline.envs.search.index import QUESTIONS, open_index
from paceline.rollout import Message, Seat

INSTRUCTIONS = """\
Answer the question. What you do not know you can look up: write <search>some words</search> and stop, and you will be \
shown what was found between <information> and </information>. You may look up several things, one after another. When \
you know the answer, write only it between <answer> and </answer>.

Question: {question}"""
HINT = "Write <search>some words</search> to look something up, or <answer>your answer</answer>."
NO_RESULTS = "Nothing was found."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Move:
    """A reply's search or answer. `formed`: the only one, at its end, and without results the model made up itself."""

    kind: Literal["search", "answer"]
    text: str
    formed: bool


class Retrieval(DatasetEnvironment[Config]):
    """The reward is the answer's score. Metrics: `correct`, `searches` (that were run) and `format` (whether every
    reply was well formed). What was found is context; only what the model said is trained."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        advice = config.raise_hint("search_timeout")
        self._searcher = (
            LocalSearch(open_index(config.corpus), config.top_k)
            if config.url is None
            else SearchClient(config.url, config.top_k, config.search_timeout, config.api_key_variable, advice)
        )

    def examples(self, split: Split) -> Sequence[Row]:
        if self._config.dataset is None and self._config.eval_dataset is None:
            return [row for row in open_rows(str(QUESTIONS), refine=self._row) if row["split"] == split]
        return super().examples(split)

    async def play(self, example: Row, seats: Mapping[str, Seat]) -> Outcome | None:
        seat, messages = seats[POLICY], list(example["messages"])
        searches, formed, answer = 0, True, ""
        for turn in range(1, self._config.max_turns + 1):
            reply = await seat.chat(messages)
            move = read_move(reply.text)
            formed = formed and move is not None and move.formed
            if move is not None and move.kind == "answer":
                answer = move.text
                break
            # A reply that ran into the token limit was no turn to go on from.
            if turn == self._config.max_turns or reply.truncated:
                break
            if move is not None and move.text:
                searches += 1
                found = format_results(await self._searcher.search(move.text), self._config.max_result_chars)
                messages += [reply.message, {"role": self._config.results_role, "content": found}]
            else:
                messages += [reply.message, {"role": "user", "content": HINT}]
        return self._outcome(answer, example["answer"], searches, formed)

    def _row(self, row: Row) -> Row:
        """A row with the conversation it begins with and an answer that can be compared."""
        answer = row["answer"]
        accepted = [answer] if isinstance(answer, str | int | float) else answer
        plain = isinstance(accepted, list) and all(isinstance(one, str | int | float) for one in accepted)
        if not plain or not accepted:
            raise BadRow("a question needs an `answer`, a string or a list of those that are accepted")
        return row | {"messages": _opening(row), "answer": [str(one) for one in accepted]}

    def _outcome(self, answer: str, accepted: list[str], searches: int, formed: bool) -> Outcome:
        correct = max(float(normalise_answer(answer) == normalise_answer(one)) for one in accepted)
        metrics = {"correct": correct, "searches": float(searches), "format": float(formed)}
        if self._config.score == "exact":
            return Outcome.solo(correct, **metrics)
        shared = max(f1(answer, one) for one in accepted)
        return Outcome.solo(shared, **metrics, f1=shared)


def read_move(text: str) -> Move | None:
    """The first thing a reply does, thoughts aside: what follows a search was written without its results.

    >>> read_move("I wonder. <search>the oldest bridge</search>")
    Move(kind='search', text='the oldest bridge', formed=True)
    """
    spoken = text.rpartition("</think>")[2]
    found = _ACTION.search(spoken)
    if found is None:
        return None
    formed = not spoken[found.end() :].strip() and "<information>" not in spoken
    kind: Literal["search", "answer"] = "search" if found[1] == "search" else "answer"
    return Move(kind, found[2].strip(), formed)


def format_results(found: Sequence[ResultDict], most: int) -> str:
    """Results as the model reads them."""
    lines = [f"[{number}] {_entry(result, most)}" for number, result in enumerate(found, start=1)]
    return "\n".join(["<information>", *(lines or [NO_RESULTS]), "</information>"])


def _entry(result: ResultDict, most: int) -> str:
    text = " ".join(result["text"].split())
    text = text if len(text) <= most else f"{text[:most].rstrip()} ..."
    return f"{result['title']}: {text}" if result.get("title") else text


def normalise_answer(answer: str) -> str:
    """Without case, punctuation, articles and spare white space, as SQuAD compares answers.

    >>> normalise_answer(" The Sea of  Brand. ")
    'sea of brand'
    """
    plain = " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
    return plain or answer.strip().lower()  # "A" and "?" are answers too


def f1(given: str, wanted: str) -> float:
    """Harmonic mean of precision and recall over words."""
    ours, theirs = normalise_answer(given).split(), normalise_answer(wanted).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _opening(row: Row) -> list[Message]:
    """A row's bare question gets the instructions; `messages` of its own are taken to have theirs."""
    first, *more = row["messages"]
    asked = first.get("content")
    if more or not isinstance(asked, str) or asked not in (row.get("prompt"), row.get("question")):
        return row["messages"]
    if not asked.strip():
        raise BadRow("a row needs a `question`, or `messages` that ask one")
    return [{"role": "user", "content": INSTRUCTIONS.format(question=asked)}]
