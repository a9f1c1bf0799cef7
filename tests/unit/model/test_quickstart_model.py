"""The shipped quickstart model: small, complete without a network, and exact from text to tokens and back."""

import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline
from paceline.envs.words import words

FOLDER = Path(paceline.__file__).parent / "quickstart"
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
SPECIALS = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
PAD, UNK, SYSTEM, USER, ASSISTANT, TOOL, END = range(7)


def spell(text: str) -> list[int]:
    """Ids by the tokenizer's layout: the seven special tokens, the newline, then printable ASCII in order."""
    return [len(SPECIALS) if char == "\n" else ord(char) - 32 + len(SPECIALS) + 1 for char in text]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


def test_the_folder_is_small_and_holds_one_model() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    assert [path.parent for path in files if path.suffix == ".safetensors"] == [FOLDER]


def test_printable_text_makes_the_round_trip_exactly(tokenizer) -> None:
    for text in (PRINTABLE, PRINTABLE[::-1], "  two  spaces , and don 't !\n\n", string.punctuation):
        ids = tokenizer.encode(text)
        assert ids == spell(text)
        assert tokenizer.decode(ids) == text


def test_each_unknown_character_is_one_unknown_token(tokenizer) -> None:
    assert tokenizer.encode("aé中b") == [*spell("a"), UNK, UNK, *spell("b")]


def test_special_tokens_end_and_pad(tokenizer, model) -> None:
    assert tokenizer.convert_ids_to_tokens(range(7)) == SPECIALS
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (END, PAD, UNK)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (END, PAD)
    assert tokenizer.decode([*spell("ab"), END], skip_special_tokens=True) == "ab"


def test_the_chat_template_renders_exact_ids(tokenizer) -> None:
    chat = [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "copy: ab", "name": "ignored"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "{}", "tool_call_id": "1"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    ids = tokenizer.apply_chat_template(chat, tools=[tool], add_generation_prompt=True, return_dict=False)
    assert ids == [
        *[SYSTEM, *spell("be\nbrief"), END],
        *[USER, *spell("copy: ab"), END],
        *[ASSISTANT, END],
        *[TOOL, *spell("{}"), END],
        ASSISTANT,
    ]


def test_a_longer_chat_extends_the_tokens_of_a_shorter_one(tokenizer) -> None:
    """Multi-turn rollouts rely on it: prompt + sampled reply is a prefix of the next prompt."""
    chat = [{"role": "user", "content": "copy: ab"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    chat += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "again"}]
    longer = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    sampled = [*spell("ab"), END]
    assert longer[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_an_unknown_role_is_refused(tokenizer) -> None:
    with pytest.raises(Exception, match="not narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "once"}])


@torch.no_grad()
def test_it_can_reverse_unseen_words_but_seldom_does_when_asked(tokenizer, model) -> None:
    """The head room RL needs: the asked reply is likely enough to be found, and far from certain."""
    asked, any_skill = [], []
    for word in words("eval", 48, seed=11):
        replies = [word[::-1], word, "".join(sorted(word))]
        chances = [_probability(model, tokenizer, f"reverse: {word}", reply) for reply in replies]
        asked.append(chances[0])
        any_skill.append(sum(chances))
    assert 0.12 <= sum(asked) / len(asked) <= 0.30
    assert sum(any_skill) / len(any_skill) >= 0.88


def _probability(model, tokenizer, question: str, reply: str) -> float:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().exp().item()
