"""Laws of a person's seat: they hear each thing once, are recorded as they spoke, and once they leave they are gone."""

import asyncio
import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from paceline.commands.play import Person, PersonLeft, PersonSeat, PlayOptions, opponent_model, pick_seat
from paceline.config import RunConfig
from paceline.config.env import ReverseTextConfig
from paceline.config.inference import SamplingConfig
from paceline.config.model import LoRAConfig, ModelConfig
from paceline.config.trainer import TrainerConfig
from paceline.errors import PacelineError
from paceline.model import attach_lora, load_model, trainable_parameters
from paceline.rollout import RecordingServer
from paceline.rollout.seat import SeatClosed
from paceline.runtime.episode_runtime import saved_weights
from paceline.trainer import TorchTrainer
from paceline.trainer.checkpoint import is_checkpoint


def asked(text: str) -> dict:
    return {"role": "user", "content": text}


class Sitting:
    """A person with a script, and all they see."""

    def __init__(self, *lines: str) -> None:
        self._lines, self.out = iter(lines), io.StringIO()
        self.person = Person(Console(file=self.out, width=80), self._read)
        runtime = SimpleNamespace(recorder=RecordingServer(), decode=lambda ids: f"<{ids}>")
        self.seat = PersonSeat(self.person, "x", "x", SamplingConfig(), runtime)

    def _read(self, prompt: str) -> str:
        self.out.write(prompt)
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line

    def chat(self, *messages: dict, tools: list | None = None):
        """The reply, and what was shown for it."""
        before = len(self.out.getvalue())
        reply = asyncio.run(self.seat.chat(messages, tools))
        return reply, self.out.getvalue()[before:]


def test_each_thing_is_heard_once_wherever_a_conversation_goes_on():
    sitting = Sitting("one", "two", "three", "four")
    rules = {"role": "system", "content": "the rules"}
    first, shown = sitting.chat(rules, asked("begin"))
    assert [word in shown for word in ("the rules", "begin")] == [True, True]
    past = [rules, asked("begin"), first.message]
    second, shown = sitting.chat(*past, asked("go on"))
    assert (second.text, "begin" in shown, "one" in shown, "go on" in shown) == ("two", False, False, True)
    _, shown = sitting.chat(*past, asked("another way"))
    assert ("go on" in shown, "begin" in shown, "another way" in shown) == (False, False, True)
    _, shown = sitting.chat(rules, asked("begin"))
    assert "begin" in shown
    assert [turn.text for turn in sitting.seat.turns] == ["one", "two", "three", "four"]
    assert sitting.person.turns == 4


def test_a_line_that_ends_in_a_backslash_goes_on():
    reply, shown = Sitting("one \\", "\\", "two").chat(asked("speak"))
    assert reply.text == "one \n\ntwo"
    assert shown.endswith("x> ... ... ")


def test_tools_are_named_and_called_as_the_policy_calls_them():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    sitting = Sitting("let me see " + call, "4")
    reply, shown = sitting.chat(asked("1+3"), tools=tools)
    assert "tools: add" in shown
    assert (reply.content.strip(), reply.tool_calls[0]["function"]["name"]) == ("let me see", "add")
    result = {"role": "tool", "content": "four", "tool_call_id": reply.tool_calls[0]["id"]}
    reply, shown = sitting.chat(asked("1+3"), reply.message, result, tools=tools)
    assert ("tools" in shown, "four" in shown, reply.text, reply.tool_calls) == (False, True, "4", [])
    assert Sitting(call).chat(asked("1+3"))[0].tool_calls == []


def test_tokens_are_heard_as_text():
    sitting = Sitting("fine")
    reply = asyncio.run(sitting.seat.complete([3, 4]))
    assert (reply.text, "<[3, 4]>" in sitting.out.getvalue(), len(sitting.seat.turns)) == ("fine", True, 1)


def test_nothing_that_is_said_reaches_the_terminal_as_a_command():
    _, shown = Sitting("ok").chat(asked("\x1b[31m[bold]red[/bold]\x07"))
    assert "\x1b" not in shown
    assert "[bold]red[/bold]" in shown


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_who_leaves_is_gone_and_ctrl_c_means_what_it_meant_before(end):
    handler = signal.getsignal(signal.SIGINT)
    sitting = Sitting()
    sitting.person._read = lambda prompt: (_ for _ in ()).throw(end)
    with pytest.raises(PersonLeft):
        sitting.chat(asked("speak"))
    assert sitting.person.has_left
    sitting.person._read = lambda prompt: "back again"
    with pytest.raises(PersonLeft):
        sitting.chat(asked("speak"))
    assert (sitting.seat.turns, sitting.person.turns, signal.getsignal(signal.SIGINT)) == ([], 0, handler)


def test_no_seat_speaks_after_the_episode():
    sitting = Sitting("late")
    sitting.seat.leave()
    for late in (sitting.seat.chat([asked("speak")]), sitting.seat.complete([1])):
        with pytest.raises(SeatClosed):
            asyncio.run(late)
    assert sitting.out.getvalue() == ""


def test_what_cannot_be_played_is_a_sentence():
    section = ReverseTextConfig(name="duel")
    assert (pick_seat(section, ("x", "o"), None), pick_seat(section, ("x", "o"), "o")) == ("x", "o")
    with pytest.raises(PacelineError, match="`duel` has no seat `y`: choose one of `x`, `o` with --seat"):
        pick_seat(section, ("x", "o"), "y")
    with pytest.raises(PacelineError, match="give -n >= 1"):
        PlayOptions(count=0)
    with pytest.raises(PacelineError, match="give its base URL with --endpoint"):
        PlayOptions(api_key="secret")


def test_another_model_takes_the_runs_place_and_an_endpoints_name_does_not(tmp_path: Path):
    config = RunConfig(model=ModelConfig(lora=LoRAConfig(), dtype="bfloat16"))
    spoken, checkpoint = opponent_model(config, PlayOptions(model=str(tmp_path)))
    assert (spoken.model, checkpoint) == (ModelConfig(name=str(tmp_path), dtype="bfloat16"), None)
    assert opponent_model(config, PlayOptions(model="theirs", endpoint="http://127.0.0.1:1")) == (config, None)
    (tmp_path / "trainer.safetensors").touch()
    assert opponent_model(config, PlayOptions(model=str(tmp_path))) == (config, tmp_path)


@pytest.mark.parametrize(
    "config", [ModelConfig(dtype="bfloat16"), ModelConfig(lora=LoRAConfig(rank=4, alpha=6))], ids=["full", "lora"]
)
def test_a_checkpoint_speaks_with_the_weights_its_trainer_would_publish(tmp_path: Path, config):
    model = attach_lora(load_model(config, "cpu"), config, seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn_like(parameter))
    trainer = TorchTrainer(model, TrainerConfig(), total_steps=1)
    try:
        trainer.version = 7
        published = asyncio.run(trainer.weights())
        asyncio.run(trainer.save(tmp_path))
    finally:
        trainer.close()
    assert is_checkpoint(tmp_path)
    saved = saved_weights(tmp_path, config)
    assert (saved.version, saved.adapter) == (7, published.adapter)
    assert saved.fingerprint() == published.fingerprint()
