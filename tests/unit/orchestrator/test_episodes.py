"""The record of a rollout names the answer that its row expects, whatever the row holds."""

import pytest

from paceline.orchestrator.episodes import MOST_TARGET, target_text


class Mute:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"answer": "42"}, "42"),
        ({"answer": ["3", "5"]}, "3 | 5"),
        ({"answer": 0.5}, "0.5"),
        ({"answer": {"x": [1]}}, "{'x': [1]}"),
        ({"answer": "a\ud800"}, "a?"),
        ({"answer": None}, ""),
        ({"messages": []}, ""),
        ([], ""),
    ],
)
def test_the_record_keeps_the_answer_that_a_row_expects(row, text):
    assert target_text(row) == text


def test_the_answer_in_the_record_is_short_and_never_an_error():
    assert len(target_text({"answer": "9" * 10_000})) == MOST_TARGET
    assert "Mute" in target_text({"answer": Mute()})
