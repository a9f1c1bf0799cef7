"""Text on its way out of the server: stop strings, half letters, tool calls, spellings. However it is cut."""

import json
import tarfile
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.clients.tools import ToolParser, template_message
from paceline.config.model import ModelConfig
from paceline.engine import Completion, GenerateRequest, Piece
from paceline.model import load_tokenizer
from paceline.server.output_processor import OutputProcessor, StopMatcher
from paceline.server.tokenizer import Detokenizer, ServerTokenizer, TokenBytes

TOKENIZERS = Path(__file__).parents[4] / "shared" / "tokenizers.tar.xz"


def cut(text, places):
    """The text in pieces, cut at these places."""
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of two that end together, the longer."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


places = st.lists(st.integers(0, 1000), max_size=12)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), places)
def test_what_is_said_ends_before_the_first_stop_string_however_the_text_is_cut(text, stops, at):
    matcher = StopMatcher(stops)
    said = "".join(matcher.feed(piece) for piece in cut(text, at))
    expected = first_stop(text, stops)
    assert expected.startswith(said)
    assert said + matcher.flush() == expected
    assert matcher.found == (expected != text or any(stop in text for stop in stops))


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    matcher = StopMatcher(["END"])
    assert [matcher.feed(text) for text in ("one E", "NT", " EN", "D", "more")] == ["one ", "ENT", " ", "", ""]


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: every letter beyond ASCII is cut into halves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.fixture(scope="module")
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's way: spaces as ▁, dropped at the start of a text, and unknown letters as bytes."""
    words = ["▁", "▁a", "▁b", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("kind", ["byte_tokenizer", "metaspace_tokenizer"])
@given(data=st.data(), at=places)
def test_text_only_grows_and_is_that_of_all_tokens_however_they_come(request, kind, data, at):
    """Valid letters, and between them any garbage where the decoder's text can be known before the end of it."""
    tokenizer = request.getfixturevalue(kind)
    text = data.draw(st.text(st.sampled_from("ab é€😀\n"), max_size=12))
    if kind == "byte_tokenizer":
        ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 255), max_size=6)) + tokenizer.encode(text)
    else:
        ids = data.draw(st.lists(st.integers(0, 4), max_size=8)) + [5 + byte for byte in text.encode()]
        ids += data.draw(st.lists(st.integers(0, 4), max_size=4))

    def decode(some):
        return tokenizer.decode(list(some), skip_special_tokens=True)

    stream = Detokenizer(decode)
    pieces = [stream.feed(piece) for piece in cut(ids, at) if piece]
    assert "".join(pieces) + stream.flush() == decode(ids)


def test_a_letter_is_not_shown_before_it_is_whole(byte_tokenizer):
    stream = Detokenizer(byte_tokenizer.decode)
    assert [stream.feed((token,)) for token in byte_tokenizer.encode("a€b")] == ["a", "", "", "€", "b"]


def test_a_spelling_has_the_tokens_own_bytes(byte_tokenizer, metaspace_tokenizer):
    for tokenizer in (byte_tokenizer, metaspace_tokenizer):
        lexicon = TokenBytes(tokenizer)
        ids = byte_tokenizer.encode(" é😀") if tokenizer is byte_tokenizer else [5 + byte for byte in " é😀".encode()]
        assert bytes(chain.from_iterable(lexicon.decode_token(token)[1] for token in ids)).decode() == " é😀"
    assert TokenBytes(metaspace_tokenizer).decode_token(1) == (" a", [32, 97])


# -- one choice -------------------------------------------------------------------------------------------------------


@given(st.text("abc", min_size=1, max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2), places)
def test_a_choice_says_the_same_streamed_and_whole(text, stops, at):
    """And the tokens it reports are those sampled up to the one that completed the stop string."""
    tokenizer = load_tokenizer(ModelConfig())
    scribe = ServerTokenizer(tokenizer, [6], 512)
    ids = [*tokenizer.encode(text), 6]
    request = GenerateRequest(prompt_ids=(1,), max_tokens=99, stop_token_ids=frozenset((6,)))
    done = Completion(token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), finish="stop")
    whole = OutputProcessor(scribe, request, stops, offsets=False).end(done, listened=False)
    streamed = OutputProcessor(scribe, request, stops, offsets=True)
    deltas = [streamed.process(Piece(part, [-1.0] * len(part), [0] * len(part))) for part in cut(ids, at) if part]
    deltas += [streamed.end(done, listened=True)] if streamed.finish is None else []
    assert "".join(delta.text for delta in deltas) == whole.text == first_stop(text, stops)
    assert (
        list(chain.from_iterable(delta.token_ids for delta in deltas)) == whole.token_ids == ids[: len(whole.token_ids)]
    )
    assert streamed.sampled == len(whole.token_ids)
    offsets = list(chain.from_iterable(delta.offsets for delta in deltas))
    assert offsets == list(range(len(offsets)))


# -- tool calls -------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": "é"}
REPLIES = [
    ("just text", "just text", []),
    (CALL, "", [ARGUMENTS]),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [ARGUMENTS, ARGUMENTS]),
    (f"{CALL} and so on", "and so on", [ARGUMENTS]),
    (CALL.removesuffix("\n</tool_call>"), "", [ARGUMENTS]),
    ('{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ARGUMENTS]),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}', "", [ARGUMENTS]),
    (' {"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}', "", [{}, {"a": 2}]),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "add", "arguments": 5}</tool_call>', None, []),
    ('{"name": "rm", "parameters": {}}', None, []),
    ('{"answer": 5}', None, []),
    ('{"name": "add"', None, []),
    ('so: {"name": "add", "parameters": {}}', None, []),
    ("a < b <tool", None, []),
    ("<tool_call>", None, []),
    ("", "", []),
]


@pytest.mark.parametrize(("reply", "text", "arguments"), REPLIES)
@given(at=places)
def test_calls_are_read_out_of_the_text_however_it_is_cut(reply, text, arguments, at):
    reader = ToolParser(["add"])
    heard = [reader.feed(piece) for piece in cut(reply, at)] + [reader.flush()]
    calls = [call for _, some in heard for call in some]
    assert [json.loads(call.arguments) for call in calls] == arguments
    assert "".join(said for said, _ in heard) == (reply if text is None else text)
    assert all(call.name == "add" for call in calls)
    assert len({call.id for call in calls}) == len(calls)


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    if not TOKENIZERS.is_file():
        pytest.skip("the shared tokenizers are not on this machine")
    folder = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(TOKENIZERS) as archive:
        archive.extractall(folder, filter="data")
    return folder / "tokenizers"


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3"])
def test_a_call_written_by_a_real_template_is_read_back(families, family):
    """What a model's own template writes for a call is what the model was trained to write."""
    tokenizer = AutoTokenizer.from_pretrained(families / family)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
    if family == "llama3" and "tool_calls" not in (tokenizer.chat_template or ""):
        pytest.skip("this Llama 3 template knows no tools")
    opening = tokenizer.apply_chat_template(messages[:1], tools=[tool], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([template_message(m) for m in messages], tools=[tool], tokenize=False)
    assert "Adds" in opening
    ids = tokenizer.encode(whole.removeprefix(opening), add_special_tokens=False)
    stream = ServerTokenizer(tokenizer, [], 4096).detokenizer()
    reader = ToolParser(["add"])
    heard = [reader.feed(stream.feed((token,))) for token in ids] + [reader.feed(stream.flush()), reader.flush()]
    calls = [call for _, some in heard for call in some]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS]
