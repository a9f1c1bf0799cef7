"""Echo: GRPO on what the policy says, and next-token prediction of what it is told."""

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
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

log = logging.getLogger("paceline.echo")
MARK = "paceline-here-are-the-words"
"""Put in place of a message's own words, to see what the template writes around them."""


def where_of(rollout: Rollout) -> str:
    return f"env `{rollout.env}`, ticket {rollout.ticket.number}, rollout {rollout.member}"


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


def answered_tools(messages: Sequence[Message]) -> dict[int, str]:
    """The tool that each `tool` message answers, by its place; "" where nothing tells.

    The call of its `tool_call_id` in the assistant's message before it, else its own `name`. Messages with neither
    answer the calls in order, if there are as many of them as calls.
    """
    found: dict[int, str] = {}
    calls: Sequence[Any] = ()
    answers: list[int] = []

    def settle() -> None:
        names = [(call.get("id"), (call.get("function") or {}).get("name") or "") for call in calls]
        by_id = {id: name for id, name in names if id is not None}
        for at, place in enumerate(answers):
            message = messages[place]
            id = message.get("tool_call_id")
            in_order = names[at][1] if id is None and len(names) == len(answers) else ""
            found[place] = by_id.get(id) or message.get("name") or in_order

    for place, message in enumerate(messages):
        if message.get("role") == "tool":
            answers.append(place)
        else:
            settle()
            calls, answers = message.get("tool_calls") or (), []
    settle()
    return found


class Echo(GRPO):
    """GRPO on actions, and the next-token loss, alpha times, on the words of some roles' messages.

    An agent reads far more than it says, and plain policy gradients learn nothing from it: a failed group has zero
    advantages, though the tool's answers in it tell how the world works. Predicting them trains on every rollout. Only
    message bodies count, never what the chat template writes around them, which is the same each time and known. The
    trainer normalises each component by its own tokens, so the gradient of the actions is what it is under `grpo`.

    Where tools are named, only messages that answer them train, each with its tool's weight.

    A message trains once per rollout, in the first sample that holds it. One whose words cannot be told from the
    template's trains not at all, and is counted as the metric `unattributed`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tools = self._tool_alphas(config)
        roles = config.roles | ({"tool": max(self._tools.values())} if self._tools else {})
        self._alphas = {role: alpha for role, alpha in roles.items() if alpha}
        self._unchecked_tools = frozenset(self._tools or ())
        self._hook = config.filter
        self._filter: Callable[..., Any] | None = import_object(self._hook.import_path) if self._hook else None

    @staticmethod
    def _tool_alphas(config: Config) -> dict[str, float] | None:
        """The weight of each tool's answers; None where all have that of their role."""
        if config.tools is None or isinstance(config.tools, dict):
            return config.tools
        return dict.fromkeys(config.tools, config.roles["tool"])

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
        self._note_unknown_tools(rollout)
        keep, seen = self._filter_masks(rollout), set[bytes]()
        lost, samples = 0, []
        for sample, thread in zip(rollout.samples, threads(rollout.turns), strict=True):
            weights, begin, known = np.zeros(len(sample), np.float32), 0, 0
            for turn, (_, end) in zip(thread.turns, thread.spans, strict=True):
                alphas = self._message_alphas(rollout, turn)
                new = self._new_messages(turn, known, seen, alphas)
                found = self._bodies.find(turn, new, begin) if new else []
                lost += len(set(new) - {body.message for body in found})
                for place, first, last in found:
                    weights[first:last] = alphas[place]
                if keep is not None:
                    weights[begin:end] *= keep[id(turn)][begin:end]
                begin, known = end, len(turn.messages or ()) + 1
            weights[0] = 0  # nothing precedes it
            weights[sample.loss_mask] = 0
            samples.append(sample.with_streams(ce_weights=weights) if weights.any() else sample)
        rollout.samples = samples
        if lost:
            rollout.metrics["unattributed"] = float(lost)

    def _message_alphas(self, rollout: Rollout, turn: Turn) -> dict[int, float]:
        """The weight of each message that trains, by its place."""
        messages = turn.messages or ()
        tools = {} if self._tools is None else answered_tools(messages)
        alphas = {}
        for place, message in enumerate(messages):
            if place not in tools:
                alphas[place] = self._alphas.get(message.get("role", ""), 0.0)
            elif name := tools[place]:
                alphas[place] = (self._tools or {}).get(name, 0.0)
            elif message.get("content"):
                raise AlgorithmError(
                    f"{where_of(rollout)}: echo chooses tools by name (algo.tools), and message {place} of role `tool` "
                    "names none: give it the `tool_call_id` of a call before it, or the tool's `name`; or leave "
                    "`tools` out"
                )
        return {place: alpha for place, alpha in alphas.items() if alpha}

    def _note_unknown_tools(self, rollout: Rollout) -> None:
        """Warn, once, of each named tool that the first episode with tools does not offer."""
        offered = {tool.get("function", tool).get("name") for turn in rollout.turns for tool in turn.tools or ()}
        if not self._unchecked_tools or not offered:
            return
        for name in sorted(self._unchecked_tools - offered):
            near = get_close_matches(name, map(str, offered), n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            there = " and ".join(f"`{tool}`" for tool in sorted(map(str, offered)))
            text = (
                "environment `%s`: echo trains what tools answer (algo.tools), and no tool there is called `%s`; %s%s"
            )
            log.warning(text, rollout.env, name, hint, f"its tools are {there}")
        self._unchecked_tools = frozenset()

    @staticmethod
    def _new_messages(turn: Turn, known: int, seen: set[bytes], alphas: Mapping[int, float]) -> list[int]:
        """Messages that train, which no earlier sample has held."""
        if turn.messages is None:
            return []
        new = []
        digests = PrefixHashes(turn.messages, turn.tools).digests
        for place, (digest, message) in enumerate(zip(digests, turn.messages, strict=True)):
            if place >= known and place in alphas and message.get("content") and digest not in seen:
                new.append(place)
            seen.add(digest)
        return new

    def _filter_masks(self, rollout: Rollout) -> dict[int, NDArray] | None:
        """The user's choice among a turn's tokens, by turn; None if there is none to make."""
        if self._filter is None or self._hook is None:
            return None
        who = where_of(rollout)
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
