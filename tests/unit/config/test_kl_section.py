"""References of `[trainer.kl]`: which a run can compute, and what to write where none can."""

import pytest

from paceline.config import load
from paceline.config.cluster import scored_models
from paceline.config.errors import ConfigError

THERE = '{ name = "m", base_url = "http://there/v1" }'


@pytest.fixture
def section(tmp_path):
    def read(text: str, *more: str):
        (tmp_path / "run.toml").write_text(f"[trainer.kl]\n{text}\n")
        return load(tmp_path / "run.toml", more).config

    return read


RAY = "--placement=ray"
LORA = "--model.lora.rank=4"


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        ("workers = 2", (), r'trainer.kl.workers = 2 are actors of Ray, and placement = "local" starts none'),
        (f"workers = 1\nreference = {THERE}", (RAY,), "reference is scored at its base_url: leave workers out"),
        ('workers = 1\nreference = { name = "m" }', (RAY,), "reference is scored by cluster.scorers"),
        ('workers = 1\nreference = "ema"', (RAY,), '"ema" moves with every batch, inside the trainer'),
        ('reference = { name = "m" }', (), "trainer.kl.reference: no server serves `m`: start `paceline serve m"),
        (
            'how = "reward"',
            (),
            r"start `paceline serve paceline:quickstart --scores-only` and write reference = \{ nam",
        ),
        ('how = "reward"\nreference = "snapshot"', (LORA,), 'reference = "snapshot" is in the trainer here'),
        ('how = "reward"\nreference = "ema"', (RAY,), 'or set placement = "ray" with trainer.kl.workers = 1'),
        ('how = "penalty"', (), "reward"),
        ('reference = { name = "m", base_url = "there:8000" }', (), "`there:8000` is no address"),
        ('reference = "start"', (), "trainer.kl.reference"),
        ("workers = -1", (), "trainer.kl.workers"),
    ],
)
def test_a_reference_that_no_part_can_compute_is_refused_with_what_to_write(section, text, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        section(text, *more)


@pytest.mark.parametrize(
    ("text", "more", "in_trainer"),
    [
        ("", (), True),
        ('reference = "ema"\nhow = "advantage"', (RAY,), True),
        (f"reference = {THERE}", (), False),
        (f'how = "reward"\nreference = {THERE}', (), False),
        ('reference = "snapshot"\nworkers = 1', (RAY,), False),
        ('how = "reward"', (LORA,), False),
    ],
)
def test_the_trainer_keeps_a_reference_only_where_no_other_part_computes_it(section, text, more, in_trainer):
    assert section(text, *more).trainer.kl.is_in_trainer == in_trainer


def test_a_model_without_an_endpoint_is_scored_by_the_runs_own_scorers(section):
    assert scored_models(section('reference = { name = "m" }', RAY)) == ["m"]
