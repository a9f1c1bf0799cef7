import paceline


def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


if __name__ == "__main__":
    settings = {"sampling.max_tokens": 6, "trainer.optimizer.lr": 2e-4, "batch_size": 64}
    paceline.train(model="paceline:quickstart", dataset="sums.jsonl", reward=score, steps=30, name="sums", **settings)
