"""Echo: GRPO on what the policy says, and next-token prediction of what it is told."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.base import AlgorithmContext, AlgorithmError
from paceline.algorithms.grpo import GRPO
from paceline.config.algorithm import EchoConfig as Config
from paceline.data.rollout import Tools
from paceline.rollout import Message, Rollout, Turn, threads
from paceline.rollout.assemble import PrefixHashes
from paceline.rollout.render import Renderer, RenderError
from paceline.server.tokenizer import TokenBytes
from paceline.util.importing import import_object
from paceline.util.user_code import user_code

MARK = "paceline-here-are-the-words"
"""Put in place of a message's own words, to see what the template writes around them."""


class MessageSpan(NamedTuple):
    """Tokens `start` to `end` of a prompt are words of message `message`."""

    message: int
    start: int
    end: int


class MessageLocator:
    """Tells messages from template, exactly or not at all.

    Where a message's words stand in the rendered text is seen by putting others in their place: what comes before and
    after must stay the same to the letter. Where the tokens of a prompt stand in that text is known from their
    spelling, byte by byte, and the bytes must be those the text ends in. A prompt that goes on from a recorded turn
    begins with tokens that are spelled as they were sampled; they are no message's body, and only the rest is looked
    at. A token that is partly template, and a special token written into a message, belong to no message.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._lexicon = TokenBytes(renderer.tokenizer)
        self._special = frozenset(renderer.tokenizer.all_special_ids)

    def find(self, turn: Turn, messages: Sequence[int], begin: int = 0) -> list[MessageSpan]:
        """The spans of some messages' words in a prompt, from token `begin` on; none where they cannot be found."""
        assert turn.messages is not None
        ids = turn.prompt_ids[begin:]
        try:
            whole = self._renderer.text(turn.messages, turn.tools)
        except RenderError:  # a hand-made turn, of messages this template cannot write
            return []
        spelled = [bytes(self._lexicon.decode_token(token)[1]) for token in ids]
        written, edges = whole.encode(), [0, *accumulate(map(len, spelled))]
        first = len(written) - edges[-1]
        if b"".join(spelled) != written[first:]:
            return []
        found = []
        for place in messages:
            if (span := self._span(turn.messages, turn.tools, place, whole)) is None:
                continue
            inside = [
                at
                for at, token in enumerate(ids)
                if span[0] <= first + edges[at] and first + edges[at + 1] <= span[1] and token not in self._special
            ]
            runs = np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1)
            found += [MessageSpan(place, begin + int(run[0]), begin + int(run[-1]) + 1) for run in runs if len(run)]
        return found

    def _span(self, messages: Sequence[Message], tools: Tools | None, place: int, whole: str) -> tuple[int, int] | None:
        """The bytes of the text that are a message's words."""
        if not messages[place].get("content"):
            return None
        marked = [*messages[:place], {**messages[place], "content": MARK}, *messages[place + 1 :]]
        try:
            before, mark, after = self._renderer.text(marked, tools).partition(MARK)
        except RenderError:
            return None
        fits = len(before) + len(after) <= len(whole) and whole.startswith(before) and whole.endswith(after)
        return (len(before.encode()), len(whole.encode()) - len(after.encode())) if mark and fits else None


OPENINGS: dict[str, list[Message]] = {
    "system": [],
    "user": [],
    "tool": [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I look."}],
}
"""Messages that may stand before one of each role, for a trial at the start."""


class Echo(GRPO):
    """GRPO on actions, and the next-token loss, alpha times, on the words of some roles' messages.

    An agent reads far more than it says, and plain policy gradients learn nothing from it: a failed group has zero
    advantages, though the tool's answers in it tell how the world works. Predicting them trains on every rollout. Only
    message bodies count, never what the chat template writes around them, which is the same each time and known. The
    trainer normalises each component by its own tokens, so the gradient of the actions is what it is under `grpo`.

    A message trains once per rollout, in the first sample that holds it. One whose words cannot be told from the
    template's trains not at all, and is counted as the metric `unattributed`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._alphas = {role: alpha for role, alpha in config.roles.items() if alpha}
        self._hook = config.filter
        self._filter: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None

    async def begin(self, context: AlgorithmContext) -> None:
        self._bodies = MessageLocator(context.client.renderer)
        for role in self._alphas:
            said: list[Message] = [*OPENINGS.get(role, []), {"role": role, "content": "The quick brown fox."}]
            try:
                probe = Turn.unsampled(context.client.renderer.prompt(said), [], messages=said)
                seen = self._bodies.find(probe, [len(said) - 1])
            except RenderError:
                seen = []
            if not seen:
                raise AlgorithmError(
                    f"environment `{context.env}`: echo cannot tell which tokens are the words of a `{role}` message, "
                    "as this model's chat template writes it: leave the role out of `roles`, or set model.chat_template"
                )

    def observe(self, rollout: Rollout) -> None:
        keep, seen = self._filter_masks(rollout), set[bytes]()
        lost, samples = 0, []
        for sample, thread in zip(rollout.samples, threads(rollout.turns), strict=True):
            weights, begin, known = np.zeros(len(sample), np.float32), 0, 0
            for turn, (_, end) in zip(thread.turns, thread.spans, strict=True):
                new = self._new_messages(turn, known, seen)
                found = self._bodies.find(turn, new, begin) if new else []
                lost += len(set(new) - {body.message for body in found})
                for place, first, last in found:
                    assert turn.messages is not None
                    weights[first:last] = self._alphas[turn.messages[place]["role"]]
                if keep is not None:
                    weights[begin:end] *= keep[id(turn)][begin:end]
                begin, known = end, len(turn.messages or ()) + 1
            weights[0] = 0  # nothing precedes it
            weights[sample.loss_mask] = 0
            samples.append(sample.with_streams(ce_weights=weights) if weights.any() else sample)
        rollout.samples = samples
        if lost:
            rollout.metrics["unattributed"] = float(lost)

    def _new_messages(self, turn: Turn, known: int, seen: set[bytes]) -> list[int]:
        """Messages of the roles that train, which no earlier sample has held."""
        if turn.messages is None:
            return []
        new = []
        digests = PrefixHashes(turn.messages, turn.tools).digests
        for place, (digest, message) in enumerate(zip(digests, turn.messages, strict=True)):
            if place >= known and message.get("role") in self._alphas and message.get("content") and digest not in seen:
                new.append(place)
            seen.add(digest)
        return new

    def _filter_masks(self, rollout: Rollout) -> dict[int, NDArray] | None:
        """The user's choice among a turn's tokens, by turn; None if there is none to make."""
        if self._filter is None or self._hook is None:
            return None
        who = f"env `{rollout.env}`, ticket {rollout.ticket.number}, rollout {rollout.member}"
        with user_code(f"the filter `{self._hook.import_path}` (algo.filter)", who):
            masks = self._filter(rollout, **self._hook.kwargs)
        where = f"{who}: {self._hook.import_path}"
        if not isinstance(masks, Sequence) or len(masks) != len(rollout.turns):
            given = len(masks) if isinstance(masks, Sequence) else repr(masks)
            raise AlgorithmError(f"{where} gave {given} masks for {len(rollout.turns)} turns; they must align")
        kept = {}
        for number, (turn, mask) in enumerate(zip(rollout.turns, masks, strict=True), start=1):
            length, flags = len(turn.prompt_ids) + len(turn.completion_ids), np.asarray(mask)
            if flags.shape != (length,):
                raise AlgorithmError(
                    f"{where} gave a mask of {flags.size} for turn {number}, which has {length} tokens; they must align"
                )
            kept[id(turn)] = flags.astype(bool)
        return kept
