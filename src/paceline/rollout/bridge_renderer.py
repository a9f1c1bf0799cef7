"""Renders for models whose chat template the `renderers` package has written out as a program.

The template says how a whole conversation is written; how to go on after tokens that were sampled must be found out
from what it writes (`Renderer`). For the models it knows, `renderers` says it outright. That keeps two turns in one
sample which the template alone would set apart: a reply that was cut short, and on request one whose thoughts the
template drops once the next question is asked.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from paceline.clients.tools import template_message
from paceline.data.rollout import Message, Tools, Turn
from paceline.rollout.render import Prompt, Renderer, RenderError

RendererChoice = Literal["auto", "template", "renderers"]
"""`auto`: the package if it is installed and knows the model; `template`: never; `renderers`: always, or an error."""

RENDERERS_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors by which the package refuses a tokenizer that is not the model's, or a conversation it cannot express."""

_USER_MESSAGE: Message = {"role": "user", "content": "One more  thing:\n\nwhy?\n"}
_TOOL_MESSAGE: Message = {"role": "tool", "tool_call_id": "123456789", "name": "look", "content": '{"up": [1, "é"]}'}
_PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
_LOOK = {"name": "look", "description": "Look somewhere.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _LOOK}
_PROBE_CONVERSATIONS: list[tuple[list[Message], Tools | None]] = [
    ([_USER_MESSAGE], None),
    ([{"role": "system", "content": "Be brief."}, _USER_MESSAGE], None),
    ([{"role": "system", "content": "Be brief."}, _USER_MESSAGE], [_TOOL]),
    ([_USER_MESSAGE], [_TOOL]),
    ([_USER_MESSAGE, {"role": "assistant", "content": "Because."}, _USER_MESSAGE], None),
]

log = logging.getLogger(__name__)


class BridgeRenderer(Renderer):
    """Renders first prompts with the chat template and continuations with the model's program in `renderers`.

    Where the program cannot continue (a thought that must be dropped, say), the template decides.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], program: Any) -> None:
        super().__init__(tokenizer, end_tokens)
        self._program = program

    def render_continuation(self, turn: Turn, messages: Sequence[Message], opening: str | None = None) -> Prompt:
        ids = self._bridge(turn, messages)
        # Without its text: should the template be asked for the next turn, it writes this one again.
        return super().render_continuation(turn, messages, opening or None) if ids is None else Prompt(ids, "")

    def _bridge(self, turn: Turn, messages: Sequence[Message]) -> list[int] | None:
        """The turn's tokens and what follows them, if the program goes on from there."""
        if turn.messages is None:
            return None
        appended = [template_message(message) for message in messages[len(turn.messages) + 1 :]]
        tools = list(turn.tools) if turn.tools else None
        try:
            bridged = self._program.bridge_to_next_turn(turn.prompt_ids, turn.completion_ids, appended, tools=tools)
        except RENDERERS_ERRORS:
            return None
        recorded = [*turn.prompt_ids, *turn.completion_ids]
        if bridged is None or bridged.token_ids[: len(recorded)] != recorded:
            return None
        return list(bridged.token_ids)

    def disagreement(self) -> str | None:
        """How the program and the template differ, if they do: the tokenizer may come with a template of its own."""
        for messages, tools in _PROBE_CONVERSATIONS:
            theirs = self._program.render_ids(messages, tools=tools, add_generation_prompt=True)
            if theirs != self.prompt(messages, tools):
                return f"the prompt of {len(messages)} messages {'with' if tools else 'without'} tools"
        differs = filter(self._continues_differently, (_USER_MESSAGE, _TOOL_MESSAGE))
        return next((f"what follows a reply with {message['role']}" for message in differs), None)

    def _continues_differently(self, message: Message) -> bool:
        end = next((token for token in self._program.get_stop_token_ids() if token in self.end_tokens), None)
        if end is None:
            return True
        said = [*self.encode("Because."), end]
        messages: list[Message] = [_USER_MESSAGE]
        prompt = self.prompt(messages, [_TOOL])
        turn = Turn.unsampled(prompt, said, messages=messages, tools=[_TOOL], text="Because.")
        whole = [*messages, turn.message, message]
        ours, theirs = super().render_continuation(turn, whole).ids, self._bridge(turn, whole)
        recorded = [*turn.prompt_ids, *turn.completion_ids]
        return theirs is not None and ours[: len(recorded)] == recorded and ours != theirs


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
    choice: RendererChoice = "auto",
    model: str | None = None,
    keep_thoughts: bool = False,
) -> Renderer:
    """The renderer for a model: `renderers`' where it is installed, knows the model and agrees with the template.

    `model` is the hub name it is known by, or the name of a family there (`qwen3`) for a fine-tune or a local folder;
    the tokenizer's own when left out. `keep_thoughts` goes on from a reply with its thoughts where the template would
    drop them, which the template alone cannot do.
    """
    if choice == "template":
        if keep_thoughts:
            raise RenderError('model.keep_thoughts needs model.renderer = "auto" or "renderers"')
        return Renderer(tokenizer, end_tokens)
    name, reason = model or tokenizer.name_or_path, "it does not know the model: name its family with model.known_as"
    try:
        program = _program(tokenizer, name, keep_thoughts)
    except ImportError:
        program, reason = None, 'the package is not installed: pip install "paceline[renderers]"'
    except RENDERERS_ERRORS as error:
        program, reason = None, f"it refuses this tokenizer ({error})"
    if program is not None:
        renderer = BridgeRenderer(tokenizer, end_tokens, program)
        if (differs := renderer.disagreement()) is None:
            return renderer
        reason = f"it and the model's chat template differ in {differs}"
    if choice == "renderers" or keep_thoughts:
        raise RenderError(f"`renderers` cannot write for {name}: {reason}")
    log.info("the chat template alone writes for %s: %s", name, reason)
    return Renderer(tokenizer, end_tokens)


def _program(tokenizer: PreTrainedTokenizerBase, name: str, keep_thoughts: bool) -> Any:
    base, configs = import_module("renderers.base"), import_module("renderers.configs")
    family = base.MODEL_RENDERER_MAP.get(name, name)
    if family in ("auto", "default", "custom"):
        return None
    try:
        config = configs.config_from_name(family)
    except ValueError:
        return None
    if keep_thoughts:
        config = type(config).model_validate({"name": family, "thinking_retention": "all"})
    return base.create_renderer(tokenizer, config)
