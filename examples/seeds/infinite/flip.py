"""Reverse a word, with a second try: an environment module of two functions."""

Message = dict[str, str]


def interact(messages: list[Message]) -> list[Message]:
    """A reply of the wrong length gets the question again; `max_turns` keeps it from going on."""
    word, said = messages[0]["content"].removeprefix("reverse: "), messages[-1]["content"]
    return [] if len(said) == len(word) else [{"role": "user", "content": f"reverse: {word}"}]


def reward_fn(messages: list[Message], answer: str | list[str]) -> float:
    """The share of letters in place in the last reply, for the best of the accepted answers."""
    said = messages[-1]["content"]
    return max(_in_place(said, right) for right in ([answer] if isinstance(answer, str) else answer))


def _in_place(said: str, right: str) -> float:
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
