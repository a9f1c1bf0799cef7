"""Single turns in exact tokens: makes the rows of token_in.toml from questions, and scores what the policy adds.

python examples/seeds/async_rl_loop/token_in.py data/train.jsonl rows.jsonl --model Qwen/Qwen2.5-1.5B-Instruct
"""

import argparse
import json
import re
from pathlib import Path

FINAL = re.compile(r"(?:\\boxed\{|####)\s*\$?(-?[\d,]*\.?\d+)")


def final_number(text: str) -> str | None:
    """The last number in `\\boxed{}` or after `####`, without commas."""
    found = FINAL.findall(text)
    return found[-1].replace(",", "") if found else None


def score(row: dict, text: str) -> float:
    """Called by Paceline with a row and the policy's continuation."""
    number = final_number(text)
    return float(number is not None and float(number) == float(row["answer"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Render question and answer rows to token ids.")
    parser.add_argument("questions", type=Path, help="a .jsonl file of `question`, and `answer` ending in #### 18")
    parser.add_argument("rows", type=Path, help="the .jsonl file to write")
    parser.add_argument("--model", required=True, help="the model that is to be trained: its tokenizer makes the ids")
    options = parser.parse_args()

    from paceline.config.model import ModelConfig
    from paceline.model import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(name=options.model))
    with options.questions.open(encoding="utf-8") as questions, options.rows.open("w", encoding="utf-8") as rows:
        for line in questions:
            row = json.loads(line)
            message = {"role": "user", "content": row["question"] + " End with \\boxed{number}."}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)  # the template writes them itself
            rows.write(json.dumps({"input_token_ids": ids, "answer": final_number(row["answer"])}) + "\n")


if __name__ == "__main__":
    main()
