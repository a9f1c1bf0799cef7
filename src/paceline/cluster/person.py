"""A person in a seat: hears what the policy would hear, and types what it would say."""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.config.inference import Sampling
from paceline.errors import PacelineError
from paceline.inference.tools import ToolReader
from paceline.rollout import Message, Reply
from paceline.rollout.endpoint import WordSeat
from paceline.rollout.history import same
from paceline.rollout.seat import Lodge, SeatLeft
from paceline.rollout.show import show_messages

Tools = Sequence[dict[str, Any]]
CALLING = 'to call one, say <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


class PersonLeft(PacelineError):
    """Nobody sits there any more."""


def typed(prompt: str) -> str:
    """A line from the keyboard, or from whatever is piped in; then it is shown too, as a terminal would."""
    if sys.stdin is None:  # closed before we began
        raise EOFError
    if sys.stdin.isatty():
        return input(prompt)
    print(prompt, end="", flush=True)  # not by `input`, which sees no signal between the prompt and the line
    if not (line := sys.stdin.readline()):
        raise EOFError
    print(line.removesuffix("\n"), flush=True)
    return line.removesuffix("\n")


class Person:
    """Somebody at the keyboard."""

    def __init__(self, console: Console, read: Callable[[str], str] = typed) -> None:
        self._console, self._read = console, read
        self.turns = 0
        """How often they spoke."""
        self.left, self.broken = False, ""
        if read is typed and sys.stdin is not None and sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited from now on

    def say(self, who: str, news: Sequence[Message], tools: Tools | None) -> str:
        """What they answer to the news.

        The event loop stands still meanwhile, on purpose: the keyboard is one, so seats that want to speak wait for
        one another, and a thread that waits for a line could not be called back from a terminal it has taken over.
        """
        if self.left:
            raise PersonLeft("the person has left")
        show_messages(news, self._console)
        if tools:
            named = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)
            self._console.print(Text(f"tools: {named}; {CALLING}", "dim"))
        try:
            with _interruptible():
                words = self._listen(who)
        except (EOFError, KeyboardInterrupt):
            self.left = True
            self._console.print()
            raise PersonLeft("the person has left") from None
        except UnicodeDecodeError as error:
            self.left, self.broken = True, f"what was typed is no text: {error}"
            raise PersonLeft(self.broken) from error
        self.turns += 1
        return words

    def _listen(self, who: str) -> str:
        lines = [self._read(f"{who}> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("... "))
        return "\n".join(lines)


class PersonSeat(WordSeat):
    """A person's seat in one episode."""

    def __init__(
        self,
        person: Person,
        name: str,
        actor: str,
        sampling: Sampling,
        lodge: Lodge,
        spell: Callable[[Sequence[int]], str],
    ) -> None:
        super().__init__(sampling, lodge, actor)
        self._person, self._name, self._spell = person, name, spell

    async def answer(self, messages: Sequence[Message], tools: Tools | None) -> dict[str, Any]:
        known = self._known(messages)
        text = self._person.say(self._name, messages[known:], None if known else tools)
        return _choice(_read_calls(text, tools))

    async def complete(self, token_ids: Sequence[int]) -> Reply:
        if self._left:
            raise SeatLeft("the episode is over: this seat takes no more calls")
        prompt: Message = {"role": "tokens", "content": self._spell(token_ids)}
        text = self._person.say(self._name, [prompt], None)
        return self.note(_choice({"role": "assistant", "content": text}), [prompt])

    def _known(self, messages: Sequence[Message]) -> int:
        """How much of a conversation they have heard or said: it may go on from anything, not just from the end."""
        whole = ([*(turn.messages or []), turn.message] for turn in self.turns)
        return max((len(said) for said in whole if same(messages[: len(said)], said)), default=0)


def _choice(message: Message) -> dict[str, Any]:
    return {"message": message, "finish": "stop", "usage": None}


def _read_calls(text: str, tools: Tools | None) -> Message:
    """Tool calls are written as most open models write them."""
    reader = ToolReader([tool.get("function", tool).get("name", "") for tool in tools or ()])
    said, calls = reader.feed(text)
    rest, more = reader.flush()
    if not (calls := [*calls, *more]):
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": said + rest, "tool_calls": [call.as_dict() for call in calls]}


@contextmanager
def _interruptible() -> Generator[None]:
    """Ctrl-C reaches whoever waits for a line: an event loop would only note it and let them wait on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
