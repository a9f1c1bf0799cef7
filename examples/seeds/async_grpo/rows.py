"""Writes rows.jsonl: sums as `input_token_ids` of the quickstart tokenizer with `gt_answer`.

python rows.py
"""

import json
import random
from pathlib import Path

from paceline.config.model import ModelConfig
from paceline.model import load_tokenizer


def write_rows(file: Path, count: int) -> None:
    tokenizer, dice = load_tokenizer(ModelConfig()), random.Random(0)
    with file.open("w") as lines:
        for _ in range(count):
            left, right = dice.randrange(10), dice.randrange(10)
            question = [{"role": "user", "content": f"add: {left}+{right}"}]
            text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
            row = {"input_token_ids": tokenizer.encode(text), "gt_answer": str(left + right)}
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_rows(Path(__file__).with_name("rows.jsonl"), 128)
