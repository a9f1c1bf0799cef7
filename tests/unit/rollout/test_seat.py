"""Laws of a seat: whatever a conversation does, its record is what the engine saw, and it trains exactly once."""

import asyncio
import contextlib
import copy
import json
import random
import string
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import ENDS
from paceline.clients import Pool
from paceline.config.inference import SamplingConfig
from paceline.data import Ticket
from paceline.engine import Completion, GenerateRequest
from paceline.rollout import Renderer, Rollout, SamplingClient, Seat, SeatClosed, SessionMap, Turn, assemble
from rollouts import continued_prompt

TICKET = Ticket(7, "talk", 0, 7, 2)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "look_up")
]


class ScriptedEngine:
    """Says what it is told to, some calls sooner than others, and remembers what it was asked."""

    busy_seconds = 0.0

    def __init__(self) -> None:
        self.lines: list[tuple[list[int], str]] = []
        self.calls: list[tuple[GenerateRequest, Completion]] = []

    async def generate(self, request: GenerateRequest, listener=None) -> Completion:
        ids, finish = self.lines.pop(0)
        at = len(self.calls)
        said = Completion(
            token_ids=ids,
            logprobs=[-(at + 1) - i / 4096 for i in range(len(ids))],
            versions=[at] * len(ids),
            finish=finish,
        )
        self.calls.append((request, said))
        for _ in range(len(ids) % 3):
            await asyncio.sleep(0)
        return said


class Family:
    """A real tokenizer with its template, and what a model of that family may say."""

    def __init__(self, name: str, tokenizer) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.end = tokenizer.convert_tokens_to_ids(ENDS[name])
        self.stop = self.encode("!")[-1]
        self.renderer = Renderer(tokenizer, [self.end])
        self.fresh = Renderer(tokenizer, [self.end])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def oddly(self, text: str, rng: random.Random) -> list[int]:
        """The text in tokens no tokenizer would choose."""
        pieces, at = [], 0
        while at < len(text):
            pieces.append(text[at : at + rng.choice([1, 1, 2, 5])])
            at += len(pieces[-1])
        return [token for piece in pieces for token in self.encode(piece) if token not in (self.end, self.stop)]

    def noise(self, rng: random.Random) -> list[int]:
        """Any tokens at all: halves of characters, other special tokens, words of other languages."""
        ids = [rng.randrange(len(self.tokenizer)) for _ in range(rng.randrange(1, 6))]
        return [token for token in ids if token not in (self.end, self.stop)]

    def text(self, messages, tools, reply=True) -> str:
        return self.fresh.text(messages, tools, reply=reply)

    def seat(self, engine: ScriptedEngine, **settings) -> Seat:
        client = SamplingClient(
            Pool([engine]), self.renderer, SamplingConfig(**settings), frozenset((self.end, self.stop))
        )
        return Seat(client, (0, 0, 7, 0), 7)


@pytest.fixture(scope="session", params=list(ENDS))
def family(request, load):
    return Family(request.param, load(request.param))


# -- what is said ------------------------------------------------------------------------------------------------------

WORDS = st.text(string.ascii_letters + " .,:'\n", max_size=8)
CALLS = st.sampled_from(
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"arguments":{"a":1,"b":"x y"},"name":"add"}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": "{}"}</tool_call>\n<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1',
        '{"name": "add", "parameters": {"a": 2}}',
        '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {"a": -0.5}}',
    ]
)
THOUGHTS = st.builds("<think>{}{}{}</think>{}".format, st.sampled_from(["\n", ""]), WORDS, st.just("\n"), WORDS)


@st.composite
def lines(draw, family: Family):
    """What the engine says: sampled ids, and how they ended."""
    rng = random.Random(draw(st.integers(0, 99)))
    spelled = st.tuples(st.sampled_from(["", "<think>\nhm\n</think>\n\n"]), WORDS, CALLS | st.just("")).map("".join)
    text = draw(WORDS | THOUGHTS | CALLS | spelled | st.just(ENDS[family.name] + "so"))
    said = draw(st.sampled_from([family.oddly, lambda t, r: family.encode(t), lambda t, r: family.noise(r)]))
    ids = [token for token in said(text, rng) if token not in (family.end, family.stop)]
    finish = draw(st.sampled_from(["stop"] * 5 + ["length"]))
    ended = [draw(st.sampled_from([family.end] * 5 + [family.stop]))] if finish == "stop" else []
    return [*ids, *ended] or [family.end], finish


@dataclass
class Talk:
    """A conversation under way."""

    messages: list[dict]
    tools: list[dict] | None = None
    said: list[int] = field(default_factory=list)
    """How long it was before each reply."""

    def until(self, length: int) -> "Talk":
        return Talk(copy.deepcopy(self.messages[:length]), self.tools, [n for n in self.said if n < length])


def handed_on(message: dict, how: str) -> dict:
    """The same message, as one client or another hands it back."""
    if how == "plain" or "tool_calls" not in message:
        return message if how == "plain" else {**message, "refusal": None, "tool_calls": None, "annotations": None}
    calls = [
        {"id": "c1", "type": "function", "function": call["function"] | {"arguments": respaced}}
        for call in message["tool_calls"]
        for respaced in [json.dumps(json.loads(call["function"]["arguments"]), indent=1)]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


# -- the laws ----------------------------------------------------------------------------------------------------------


def plainly(message: dict) -> tuple:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    role = message["role"].replace("developer", "system")
    return role, message["content"] or "", [(c["name"], json.loads(c["arguments"])) for c in calls]


def goes_on_from(turns: list[Turn], messages: list[dict], tools) -> Turn | None:
    """The last turn that said the longest beginning of this conversation."""
    found = None
    for turn in turns:
        said = [*turn.messages, turn.message]
        begins = list(map(plainly, messages[: len(said)])) == list(map(plainly, said))
        if begins and turn.tools == tools and (found is None or len(said) > len(found.messages)):
            found = turn
    return found


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_any(family: Family, known: list[Turn | None], prompt: list[int], messages: list[dict], tools) -> None:
    """The law holds for one of the turns the conversation may go on from."""
    *others, last = known
    for before in others:
        with contextlib.suppress(AssertionError):
            return check_prompt(family, before, prompt, messages, tools)
    return check_prompt(family, last, prompt, messages, tools)


def check_prompt(family: Family, before: Turn | None, prompt: list[int], messages: list[dict], tools) -> None:
    """A prompt goes on from recorded ids, or is the template's own rendering; which one is not a matter of taste."""
    anew = family.encode(family.text(messages, tools))
    if before is None or before.finish != "stop":
        assert prompt == anew
        return
    ids, whole = before.prompt_ids + before.completion_ids, family.text(messages, tools)
    end = ENDS[family.name] if before.completion_ids[-1] == family.end else ""
    if whole.startswith(family.text(before.messages, tools) + before.text + end):
        assert prompt[: len(ids)] == ids, "the template repeats the turn letter by letter, so its tokens are kept"
    if prompt[: len(ids)] == ids:
        appended = prompt[len(ids) :]
        assert anew[len(anew) - len(appended) :] == appended, "what was appended is rendered as ever"
        assert squeezed(before.message["content"]) in squeezed(whole), "what the template drops is not kept"
    else:
        assert prompt == anew


def check_record(seat: Seat, engine: ScriptedEngine) -> None:
    """Call by call, the record is what the engine saw and said."""
    assert len(seat.turns) == len(engine.calls)
    for turn in seat.turns:
        request, said = engine.calls[turn.versions[0]]
        assert tuple(turn.prompt_ids) == request.prompt_ids
        assert (turn.completion_ids, turn.logprobs, turn.versions) == (said.token_ids, said.logprobs, said.versions)
        assert turn.finish == said.finish
    assert len({request.noise for request, _ in engine.calls}) == len(engine.calls)


def check_samples(seat: Seat) -> None:
    """Every sampled token trains exactly once, where the engine drew it; nothing else trains."""
    turns = {turn.versions[0]: turn for turn in seat.turns}
    samples = assemble(Rollout(ticket=TICKET, member=1, turns=seat.turns))
    for sample in samples:
        trained = sample.loss_mask.copy()
        for start, end in sample.spans:
            turn = turns.pop(int(sample.versions[start]))
            assert sample.token_ids[:end].tolist() == turn.prompt_ids + turn.completion_ids
            assert sample.token_ids[start:end].tolist() == turn.completion_ids
            assert sample.logprobs[start:end].tolist() == pytest.approx(turn.logprobs)
            assert sample.versions[start:end].tolist() == turn.versions
            assert trained[start:end].all()
            trained[start:end] = False
        assert not trained.any()
        assert set(sample.versions[~sample.loss_mask]) <= {-1}
    assert not turns


# -- random conversations ----------------------------------------------------------------------------------------------

MOVES = ["go on"] * 8 + ["speak", "add", "together", "take back", "branch", "edit", "tools", "another", "tokens"]


class Play:
    """Random moves in several conversations at one seat, each call checked as it is made."""

    def __init__(self, family: Family, data) -> None:
        self.family, self.data = family, data
        self.engine = ScriptedEngine()
        self.seat = family.seat(self.engine, temperature=0.75)
        self.talks = [self.opening()]

    def draw(self, strategy):
        return self.data.draw(strategy)

    def opening(self) -> Talk:
        system = [{"role": self.draw(st.sampled_from(["system", "developer"])), "content": "be brief"}]
        asked = {"role": "user", "content": self.draw(WORDS)}
        tools = self.draw(st.sampled_from([None, TOOLS]))
        return Talk([*(system if self.draw(st.booleans()) else []), asked], tools)

    async def go(self, count: int) -> None:
        for _ in range(count):
            talk = self.draw(st.sampled_from(self.talks))
            await self.move(self.draw(st.sampled_from(MOVES)), talk)
        check_record(self.seat, self.engine)
        check_samples(self.seat)

    async def move(self, move: str, talk: Talk) -> None:
        if move == "speak":
            await self.speak(talk)
        elif move == "together":
            await self.speak(*self.draw(st.lists(st.sampled_from(self.talks), min_size=2, max_size=3)))
        elif move == "go on":
            await self.move("add", talk)
            await self.speak(talk)
        elif move == "add":
            role = self.draw(st.sampled_from(["user", "tool"] if talk.said else ["user"]))
            more = {"tool_call_id": "c1"} if role == "tool" else {}
            talk.messages.append({"role": role, "content": self.draw(WORDS), **more})
        elif move == "take back" and talk.said:
            talk.messages, talk.said = talk.messages[: talk.said[-1]], talk.said[:-1]
        elif move == "branch" and talk.said:
            self.talks.append(talk.until(self.draw(st.sampled_from(talk.said)) + self.draw(st.integers(0, 1))))
        elif move == "edit":
            self.draw(st.sampled_from(talk.messages))["content"] = self.draw(WORDS)
        elif move == "tools":
            talk.tools = None if talk.tools else TOOLS
        elif move == "another":
            self.talks.append(self.opening())
        elif move == "tokens":
            self.engine.lines.append(self.draw(lines(self.family)))
            await self.seat.complete(self.family.encode("so"))

    async def speak(self, *talks: Talk) -> None:
        """One call, or several at once; those that share a conversation leave it with one of their replies."""
        first = len(self.engine.calls)
        turns = [turn for turn in self.seat.turns if turn.messages is not None]
        asked = [copy.deepcopy(talk.messages) for talk in talks]
        self.engine.lines += [self.draw(lines(self.family)) for _ in talks]
        replies = await asyncio.gather(*(self.seat.chat(talk.messages, talk.tools) for talk in talks))
        new = [turn for turn in self.seat.turns if turn.messages is not None][len(turns) :]
        for place, talk in enumerate(talks):
            prompt = list(self.engine.calls[first + place][0].prompt_ids)
            # Calls at once may or may not have heard one another, and what two of them said alike is the same to both.
            known = [goes_on_from([*turns, *new[:heard]], asked[place], talk.tools) for heard in range(place + 1)]
            check_any(self.family, known, prompt, asked[place], talk.tools)
        for talk, reply, messages in zip(talks, replies, asked, strict=True):
            if len(talk.messages) == len(messages):
                talk.said.append(len(messages))
                how = self.draw(st.sampled_from(["plain", "as clients do"]))
                talk.messages.append(handed_on(reply.message, how))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_what_trains_is_what_the_engine_sampled_whatever_a_conversation_does(family, data):
    asyncio.run(Play(family, data).go(data.draw(st.integers(4, 14))))


# -- one by one --------------------------------------------------------------------------------------------------------

ASK = [{"role": "user", "content": "1 + 2?"}]
AGAIN = {"role": "user", "content": "again"}


def talk_of(family: Family, *texts: str, tools=None, ends=None):
    """A conversation of these replies, each followed by `AGAIN`; answers with seat, engine and messages."""
    engine = ScriptedEngine()
    seat, messages = family.seat(engine), list(ASK)
    for text in texts:
        engine.lines.append(([*family.encode(text), family.end if ends is None else ends], "stop"))
        reply = asyncio.run(seat.chat(messages, tools))
        messages += [reply.message, AGAIN]
    return seat, engine, messages


def test_recorded_messages_cannot_be_changed(family):
    """Neither through the messages that were handed in nor through those handed out."""
    part = {"type": "text", "text": "1 + 2?"}
    seat, engine, _ = talk_of(family)
    engine.lines += [([*family.encode('<tool_call>{"name": "add"}</tool_call>'), family.end], "stop")]
    asked = [{"role": "user", "content": [part]}]
    reply = asyncio.run(seat.chat(asked, TOOLS))
    part["text"] = "3 + 4?"
    reply.message["content"] = "I said nothing"
    reply.tool_calls[0]["function"]["name"] = "look_up"
    (turn,) = seat.turns
    assert turn.messages == [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}]
    assert turn.message["content"] == ""
    assert turn.message["tool_calls"][0]["function"]["name"] == "add"


def test_a_call_stays_in_the_conversation_even_if_the_template_knows_none(family):
    spelled = '<tool_call>{"name": "add", "arguments": {"a": 1234}}</tool_call>'
    several = f"{spelled}\n{spelled.replace('1234', '5678')}"
    for text in (spelled, several):
        seat, _, messages = talk_of(family, text, tools=TOOLS)
        assert len(messages[1]["tool_calls"]) == text.count("<tool_call>")
        anew = family.tokenizer.decode(family.fresh.prompt(messages, TOOLS))
        assert all(number in anew for number in ("1234", "5678") if number in text)
        (turn,) = seat.turns
        ids = turn.prompt_ids + turn.completion_ids
        assert continued_prompt(family.renderer, turn, messages)[: len(ids)] == ids


def test_a_token_that_stops_a_turn_within_its_text_stays_there_once(family):
    """A stop token of the run's own is part of what was said; the template's end comes after it."""
    seat, engine, messages = talk_of(family, "so! be it", ends=family.stop)
    engine.lines.append(([family.end], "stop"))
    asyncio.run(seat.chat(messages))
    first, second = seat.turns
    assert first.text.endswith("be it!")
    ids = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(ids)] == ids
    assert second.prompt_ids[len(ids)] == family.end
    assert family.tokenizer.decode(second.prompt_ids).count("be it") == 1


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": {"a": "\\ud83d"}}',
        '{"name": "add", "arguments": "\\ud83d"}',
    ],
)
def test_an_unreadable_call_is_text(load, call):
    """Python reads no number of that length, and half a character is none."""
    family = Family("qwen2_5", load("qwen2_5"))
    text = f"<tool_call>{call}</tool_call>"
    seat, engine, messages = talk_of(family, text, tools=TOOLS)
    assert messages[1] == {"role": "assistant", "content": text}
    engine.lines.append(([family.end], "stop"))
    asyncio.run(seat.chat(messages, TOOLS))
    check_record(seat, engine)
    assert len(assemble(Rollout(ticket=TICKET, member=0, turns=seat.turns))) == 1


def test_messages_need_not_come_in_openais_exact_form(load):
    """Arguments as objects, calls without their wrapping, an empty list of calls: all say what they say."""
    family = Family("qwen3", load("qwen3"))
    spelled = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    seat, engine, _ = talk_of(family, spelled, tools=TOOLS)
    (turn,) = seat.turns
    ids = turn.prompt_ids + turn.completion_ids
    for call in ({"function": {"name": "add", "arguments": {"a": 1}}}, {"name": "add", "arguments": {"a": 1}}):
        given = [*ASK, {"role": "assistant", "tool_calls": [call]}, {**AGAIN, "tool_calls": []}]
        engine.lines.append(([family.end], "stop"))
        asyncio.run(seat.chat(given, TOOLS))
        assert seat.turns[-1].prompt_ids[: len(ids)] == ids


def test_nothing_is_said_once_the_episode_is_over(load):
    family = Family("quickstart", load("quickstart"))
    engine = ScriptedEngine()
    seat = family.seat(engine)

    async def leave_while_speaking() -> None:
        engine.lines += [([1, 2, 3, 4, family.end], "stop")] * 2
        speaking = asyncio.ensure_future(seat.chat(ASK))
        await asyncio.sleep(0)
        seat.leave()
        with pytest.raises(SeatClosed, match="while the policy was speaking"):
            await speaking
        with pytest.raises(SeatClosed, match="takes no more calls"):
            await seat.chat(ASK)

    asyncio.run(leave_while_speaking())
    assert len(engine.calls) == 1
    assert seat.turns == []


def test_a_table_keeps_every_seat_it_was_asked_for(load):
    family = Family("quickstart", load("quickstart"))
    client = SamplingClient(Pool([ScriptedEngine()]), family.renderer, SamplingConfig(), frozenset({family.end}))
    table = SessionMap(client, (0, 0, 7, 0), 7, ["solver", "solver#2"])
    names = [table.open("solver", parent="solver", kind="child") for _ in range(3)]
    assert len({*names, "solver", "solver#2"}) == len(table) == 5
    assert {seat.actor for seat in table.values()} == {"solver", "solver#2"}
    assert table["solver"].parent == ""
    assert all(table[name].parent == "solver" for name in names)
    table.leave()
    with pytest.raises(SeatClosed):
        table.open("solver")
