"""The token inspector and the tickets page: what they say is what the algorithms and the trainer's loss compute."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_web import Client
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.algorithms import build_algorithm
from paceline.config import algorithm, load
from paceline.config import trainer as config
from paceline.data import Ticket, token_scales
from paceline.data.sample import TOKEN_SCORE, TokenScores, trained_mask
from paceline.observe.record import Query, open_run
from paceline.observe.record.layout import RecordFiles
from paceline.observe.web import build_app
from paceline.observe.web.card import TokenValues, explain_advantage, kl_line, rl_line, teacher_kl_line
from paceline.observe.web.tokens import VocabularyIndex
from paceline.rollout import Group
from paceline.trainer.loss import Loss
from paceline.trainer.terms import KL_TERMS, TrainedTokens
from recorded_runs import Told
from token_run import FACE, HOSTILE, PROMPT, REST, rollout, tokened, turn


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tokened(folder).end()
    Told(folder, "plain").step(2).end()
    return folder


@pytest.fixture
def client(runs: Path) -> Client:
    return Client(build_app(runs))


def _index(runs: Path, ticket: int, member: int, run: str = "tokens") -> int:
    found = open_run(runs / run).rollouts.find(Query(ticket=ticket, domain="training", sort="step", limit=None))
    return next(row.index for row in found.rows if row.member == member)


def _lines(client: Client, index: int, at: int, run: str = "tokens", **more) -> dict[str, dict]:
    card = client.get("/api/tokens/card", params={"run": run, "id": index, "at": at, **more}).json()
    return {line["name"]: line for line in card["lines"]}


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the cat sat\n", "über 😀😁 €"] * 4, trainer)
    made.add_special_tokens(["<|end|>"])
    return made


@settings(deadline=None, max_examples=30)
@given(text=st.text(max_size=40))
def test_bytes_of_tokens_are_the_bytes_of_the_text(bytewise, text):
    lexicon = VocabularyIndex(json.loads(bytewise.to_str()))
    ids = bytewise.encode(text).ids
    texts, parts = lexicon.decode(ids)
    assert b"".join(lexicon.bytes_of(number) for number in ids) == text.encode()
    whole = [one.encode() if one is not None else bytes.fromhex(parts[at]["bytes"]) for at, one in enumerate(texts)]
    assert b"".join(whole) == text.encode()


def test_bytes_that_are_no_character_alone_say_which_one_they_are_part_of(client, runs):
    told = client.get("/api/tokens", params={"run": "tokens", "id": _index(runs, 0, 0)}).json()
    at = told["ids"].index(FACE)
    assert told["ids"][at + 1] == REST
    assert told["texts"][at : at + 2] == [None, None]
    assert told["parts"] == {
        str(at): {"bytes": "F0 9F 98", "of": "😀"},
        str(at + 1): {"bytes": "80", "of": "😀"},
    }
    assert told["texts"][: len(PROMPT)] == ["<|user|>", "a", "b", " the", "\n", "<|reply|>"]
    assert HOSTILE in told["texts"]


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        ({"decoder": {"type": "Metaspace"}, "model": {"vocab": [["▁a", 0.0], ["<0x0A>", 0.0]]}}, [" a", "\n", None]),
        ({"decoder": None, "model": {"vocab": {"▁a": 0, "b": 1}}}, ["▁a", "b", None]),
    ],
)
def test_other_vocabularies_are_read_as_they_write_spaces_and_bytes(spec, texts):
    assert VocabularyIndex(spec).decode([0, 1, 2])[0] == texts


def test_without_a_tokenizer_ids_are_shown_and_the_page_says_where_it_looked(client, runs, tmp_path):
    tokened(tmp_path, "away", **{"model.name": tmp_path / "nowhere"}).end()
    here = Client(build_app(tmp_path))
    told = here.get("/api/tokens?run=away&id=1").json()
    assert told["texts"] is None
    assert str(tmp_path / "nowhere" / "tokenizer.json") in told["tokenizer"]
    (tmp_path / "away" / "export").mkdir()
    (tmp_path / "away" / "export" / "tokenizer.json").write_bytes((tmp_path / "vocabulary/tokenizer.json").read_bytes())
    assert here.get("/api/tokens?run=away&id=1").json()["texts"] is not None
    (tmp_path / "away" / "export" / "tokenizer.json").write_text('{"model": 7}')
    answer = here.get("/api/tokens?run=away&id=1")
    assert (answer.status_code, answer.json()["texts"]) == (200, None)


# -- credit -----------------------------------------------------------------------------------------------------------

ALGORITHMS = [
    *(algorithm.GRPOConfig(std=std) for std in ("none", "population", "sample")),
    algorithm.GRPOConfig(positive_only=True),
    algorithm.GRPOConfig(length_bonus="tokens"),
    algorithm.EchoConfig(length_bonus="turns", std="population"),
    algorithm.MaxRLConfig(),
    algorithm.RewardConfig(),
    algorithm.ConstantConfig(value=0.5),
    algorithm.HierarchicalConfig(std="sample"),
]
played = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: f"{algo.type}-{algo.model_dump(exclude_defaults=True)}")
@settings(deadline=None, max_examples=10)
@given(members=played)
def test_the_advantage_that_is_explained_is_the_one_the_algorithm_gives(algo, members):
    ticket = Ticket(0, "env", 0, 0, 0)
    rollouts = [rollout(ticket, m, [turn([11] * length)], reward) for m, (reward, length) in enumerate(members)]
    build_algorithm(algo).assign(Group(ticket=ticket, rollouts=rollouts, size=len(rollouts)))
    peers = [SimpleNamespace(index=m, reward=r, tokens=length, turns=1) for m, (r, length) in enumerate(members)]
    for peer, made in zip(peers, rollouts, strict=True):
        recorded = float(made.samples[0].advantages[-1])
        line = explain_advantage(algo, peer, peers, recorded)
        assert line.value == pytest.approx(recorded, abs=1e-6)
        assert not line.wrong
        assert explain_advantage(algo, peer, peers, recorded + 0.01).wrong


def test_a_card_says_reward_less_group_mean_with_the_numbers_of_the_group(client, runs):
    line = _lines(client, _index(runs, 0, 2), len(PROMPT))["advantage"]
    assert line["formula"] == "reward − mean of the group (4 rollouts)"
    assert (line["numbers"], line["value"], line["wrong"]) == ("0.75 − 0.5", 0.25, False)
    line = _lines(client, _index(runs, 2, 1), len(PROMPT))["advantage"]
    assert line["formula"].endswith("(3 rollouts)"), "who failed is no part of the baseline"
    assert line["value"] == pytest.approx(2 / 3)


def test_a_reward_that_was_changed_after_the_credit_is_found(runs, client, tmp_path):
    told = tokened(tmp_path, "bug").end()
    view = open_run(told.path).rollouts.view()
    index = _index(tmp_path, 0, 3, "bug")
    data = np.memmap(RecordFiles(told.path).index, view.rows.dtype, "r+")
    data["reward"][index] = 0.95
    data.flush()
    line = _lines(Client(build_app(tmp_path)), index, len(PROMPT), "bug")["advantage"]
    assert line["wrong"]
    assert "The record says −0.25" in line["note"]


# -- loss -------------------------------------------------------------------------------------------------------------

LOSSES = [
    config.DPPOConfig(),
    config.PPOConfig(),
    config.PPOConfig(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    config.GSPOConfig(clip_low=0.05, clip_high=0.1),
    config.CISPOConfig(min_ratio=0.9, max_ratio=1.1),
    config.CISPOConfig(min_ratio=1.2, max_ratio=2.0),
    config.ReinforceConfig(),
    config.ReinforceConfig(max_ratio=1.05),
    config.ReinforceConfig(max_ratio=0.8),
]


def _tokens(pi, mu, advantages, ref, scale=None, sequences=1) -> TrainedTokens:
    count = len(pi)
    column = torch.tensor
    nan, ones = torch.full((count,), math.nan), torch.ones(count)
    return TrainedTokens(
        logprobs=column(pi),
        rollout_logprobs=column(mu),
        prox_logprobs=nan,
        advantages=column(advantages),
        teacher_logprobs=column(ref),
        kl_ref_logprobs=column(ref),
        rl_scale=ones if scale is None else scale,
        ce_scale=ones * 0,
        teacher_kl_scale=ones,
        regulariser_scale=ones,
        entropy=ones,
        versions=torch.zeros(count, dtype=torch.int32),
        segments=torch.zeros(count, dtype=torch.long),
        names=("a",),
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.type}-{loss.model_dump(exclude_defaults=True)}")
def test_every_term_of_a_policy_that_has_not_moved_is_the_trainers_own(loss):
    dice = np.random.default_rng(0)
    mu, a, ref = -dice.exponential(0.8, 40), dice.normal(size=40), -dice.exponential(0.8, 40)
    tokens = _tokens(mu, mu, a, ref)
    judged = Loss(config.TrainerConfig(loss=loss, proximal=None)).per_token(tokens) if loss.type != "gspo" else None
    if judged is None:
        judged = _gspo(loss, tokens)
    for at in range(40):
        token = TokenValues(advantage=a[at], old=mu[at], ref=ref[at], base=ref[at])
        assert rl_line(loss, token).value == pytest.approx(float(judged.terms["rl"][at]), abs=1e-9)
        assert teacher_kl_line(token).value == pytest.approx(float(judged.terms["teacher_kl"][at]), abs=1e-9)
        for kind, term in KL_TERMS.items():
            real = float(term(tokens.logprobs[at], tokens.kl_ref_logprobs[at]))
            line = kl_line(config.KLConfig(kind=kind, coef=0.5), token)
            assert line.value == pytest.approx(0.5 * real, abs=1e-9)


def _gspo(loss, tokens):
    """Its trainer measures from the batch's start; here from the sampler, as a later step does from the start."""
    made = Loss(config.TrainerConfig(loss=loss))
    made._config = made._config.model_copy(update={"proximal": None})
    return made.per_token(tokens)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.type}-{loss.model_dump(exclude_defaults=True)}")
def test_every_term_of_a_recorded_pass_is_the_trainers_own(tmp_path, loss):
    """The policy has moved: the terms, the ratio, the clipping and the share of the loss of what was recorded."""
    made, dice = Loss(config.TrainerConfig(loss=loss, proximal=False)), np.random.default_rng(1)
    known: list[tuple] = []

    def judged(sample):
        at = np.flatnonzero(trained_mask(sample))
        new = np.minimum(sample.logprobs[at] + dice.normal(0, 0.3, len(at)), -1e-3).astype(np.float32)
        rl = sample.rl_token_weights[at]
        advantages = sample.advantages[at] if sample.advantages is not None else np.zeros(len(at), np.float32)
        tokens = _tokens(
            new.tolist(), sample.logprobs[at].tolist(), advantages.tolist(), new.tolist(), torch.tensor(rl)
        )
        losses = made.per_token(tokens)
        scores = np.zeros(len(at), TOKEN_SCORE)
        scores["logprob"], scores["entropy"] = new, 0.5
        scores["flags"] = (losses.clipped["rl"].numpy() != 0) & (rl != 0)
        known.append((sample, at, new, losses))
        return scores

    def scores(batch):
        known.clear()
        return TokenScores.of({place: judged(sample) for place, sample in enumerate(batch)})

    flags = {f"trainer.loss.{key}": value for key, value in loss.model_dump(exclude_none=True).items()}
    told = tokened(tmp_path, "moved", length=20, scores=scores, **flags, **{"trainer.proximal": "false"}).end()
    client, run = Client(build_app(tmp_path)), open_run(told.path)
    rows = run.rollouts.find(Query(step=(3, 3), state=["trained"], sort="step", limit=None)).rows
    for row, (sample, at, new, losses) in zip(rows, known, strict=True):
        page = client.get("/api/tokens", params={"run": "moved", "id": row.index}).json()["streams"]
        for i, place in enumerate(at.tolist()):
            assert page["trainer_logprobs"][place] == pytest.approx(float(new[i]))
            assert page["ratio"][place] == pytest.approx(math.exp(new[i] - sample.logprobs[place]), rel=1e-5)
            assert page["clipped"][place] == float(losses.clipped["rl"][i])
            if i % 5 == 0:
                lines = _lines(client, row.index, place, "moved")
                term = float(losses.terms["rl"][i])
                assert lines["rl term"]["value"] == pytest.approx(term, rel=1e-4, abs=1e-6)
                assert lines["ratio"]["value"] == pytest.approx(page["ratio"][place])
                assert ("A bound held it back" in lines["rl term"]["note"]) == bool(losses.clipped["rl"][i])
                assert lines["loss share"]["value"] != 0 or term == 0
        unscored = [place for place in range(len(sample)) if place not in at]
        assert all(page["ratio"][place] is None and page["entropy"][place] is None for place in unscored)


@pytest.mark.parametrize("normalise", ["token", "sample", "fixed"])
def test_loss_shares_of_a_policy_that_has_not_moved_are_the_trainers(tmp_path, normalise):
    told = tokened(tmp_path, "shares", length=20, **{"trainer.normalise": normalise}).end()
    client, run = Client(build_app(tmp_path)), open_run(told.path)
    batch = run.rollouts.batch(3)
    trainer = load(None, [f"--trainer.normalise={normalise}"]).config.trainer
    scales = token_scales(batch, normalise, trainer.fixed_length)
    rows = run.rollouts.find(Query(step=(3, 3), state=["trained", "replayed"], sort="step", limit=None)).rows
    for row, sample, scale in zip(rows, batch, scales, strict=True):
        rl = torch.from_numpy(scale.rl)
        mu = torch.tensor(sample.logprobs)
        tokens = _tokens(mu.tolist(), mu.tolist(), sample.advantages.tolist(), mu.tolist(), rl)
        real = Loss(trainer).per_token(tokens).scaled()["rl"]
        for at in np.flatnonzero(sample.rl_token_weights)[::3]:
            line = _lines(client, row.index, int(at), "shares")["loss share at r = 1"]
            assert line["value"] == pytest.approx(float(real[at]), rel=1e-5)


def test_a_card_says_from_where_on_a_bound_holds_and_what_no_file_knows(client, runs):
    index = _index(runs, 0, 0)
    told = client.get("/api/tokens", params={"run": "tokens", "id": index}).json()
    for at in range(len(PROMPT), len(told["ids"])):
        lines, mu = _lines(client, index, at), math.exp(told["streams"]["logprobs"][at])
        assert lines["ratio"]["value"] is None
        assert lines["ratio"]["replay"]
        if mu + 0.2 < 1:
            assert f"once π is above {mu + 0.2:.4g}" in lines["bound"]["note"]
        else:
            assert "No bound can hold it" in lines["bound"]["note"]


def test_a_token_that_nothing_trains_says_by_which_rule(client, runs):
    def why(index: int, at: int) -> str:
        return client.get("/api/tokens/card", params={"run": "tokens", "id": index, "at": at}).json()["why"]

    assert "did not sample" in why(_index(runs, 0, 0), 2)
    assert "filters.zero_advantage" in why(_index(runs, 1, 0), len(PROMPT))
    assert "outside the group's baseline" in why(_index(runs, 2, 3), len(PROMPT))
    assert "never trains" in why(0, 0)


def test_components_are_told_apart(client, runs):
    index = _index(runs, 2, 1)
    told = client.get("/api/tokens", params={"run": "tokens", "id": index}).json()
    sampled, told_by_tool = len(PROMPT), len(PROMPT) + 4
    assert (told["trained"]["rl"][sampled], told["trained"]["ce"][sampled]) == (1, 0)
    assert told["trained"]["ce"][told_by_tool] == pytest.approx(0.1)
    assert told["trained"]["rl"][told_by_tool] == 0
    lines = _lines(client, index, told_by_tool)
    assert lines["ce scale"]["value"] == pytest.approx(0.1 / 6), "three rollouts have two such tokens each"
    assert lines["ce term"]["replay"]
    assert set(_lines(client, index, sampled)) >= {"advantage", "ratio", "rl term at r = 1", "bound"}


# -- what cannot be read ----------------------------------------------------------------------------------------------


def test_whatever_is_missing_is_a_sentence(client, runs, tmp_path):
    ask = lambda path, **query: client.get(f"/api/{path}", params={"run": "tokens", **query})  # noqa: E731
    for answer, words in (
        (ask("tokens", id=9999), "there is no rollout 9999"),
        (ask("tokens", id=1, sample=7), "there is no sample 7"),
        (ask("tokens", id=1, turn=7), "there is no turn 7"),
        (ask("tokens/card", id=1, at=9999), "there is no token 9999"),
        (ask("ticket", ticket=9999), "there is no ticket 9999"),
    ):
        assert answer.status_code == 404
        assert words in answer.json()["error"]
    assert ask("tokens", id=-1).status_code == 400
    nothing = client.get("/api/tokens?run=plain").json()
    assert nothing == {"nothing": "No rollout is recorded yet.", "rollout": None}
    assert client.get("/api/tickets?run=plain").json()["total"] == 0
    told = tokened(tmp_path, "cut").end()
    written = (told.path / "config.toml").read_text()
    (told.path / "config.toml").write_text(f"{written}\n[future]\nkey = 3\n")
    here = Client(build_app(tmp_path))
    assert "advantage" in _lines(here, _index(tmp_path, 0, 0, "cut"), len(PROMPT), "cut")
    (told.path / "config.toml").write_text('name = "x"\nfuture = 3\n')
    at = RecordFiles(told.path).data
    at.write_bytes(at.read_bytes()[:-40])
    here = Client(build_app(tmp_path))
    card = here.get("/api/tokens/card", params={"run": "cut", "id": 1, "at": 7}).json()
    assert "does not understand the run's config" in card["why"]
    assert here.get("/api/tokens?run=cut").status_code == 200
    assert here.get("/api/ticket?run=cut&ticket=4").status_code == 200


# -- tickets ----------------------------------------------------------------------------------------------------------


def test_tickets_are_found_by_state_and_reason_with_how_often_they_were_played(client):
    told = client.get("/api/tickets?run=tokens").json()
    assert [row["number"] for row in told["rows"]] == [5, 4, 3, 2, 1, 0]
    assert told["states"] == {"in flight": 1, "buffered": 0, "trained": 4, "dropped": 1}
    assert told["reasons"] == {"zero_advantage": 1}
    assert {row["number"]: row["attempts"] for row in told["rows"]}[3] == 0, "a replay is not played"
    dropped = client.get("/api/tickets?run=tokens&state=dropped&reason=zero_advantage").json()
    assert [row["number"] for row in dropped["rows"]] == [1]
    assert "every advantage" in dropped["rows"][0]["why"]
    assert client.get("/api/tickets?run=tokens&offset=4&limit=1").json()["rows"][0]["number"] == 1


def test_a_life_goes_from_the_draw_to_the_gradient_and_to_its_replay(client, runs):
    def stages(number: int) -> dict[str, dict]:
        return {one["name"]: one for one in client.get(f"/api/ticket?run=tokens&ticket={number}").json()["stages"]}

    life = stages(2)
    assert list(life) == ["drawn", "sampled", "scored", "accepted", "trained", "published", "replayed"]
    assert "row 102" in life["drawn"]["text"]
    assert "1 rollout failed (episode)" in life["scored"]["text"]
    assert (life["trained"]["step"], life["replayed"]["ticket"], life["replayed"]["step"]) == (2, 3, 3)
    assert life["sampled"]["after"] <= life["trained"]["time"] <= life["published"]["time"]
    assert list(stages(1)) == ["drawn", "sampled", "scored", "dropped"]
    assert stages(3)["replayed"]["ticket"] == 2
    assert "new weights came while it played" in stages(0)["sampled"]["text"]
    assert list(stages(5)) == ["drawn", "sampled"]
    life = client.get("/api/ticket?run=tokens&ticket=2").json()
    assert [row["index"] for row in life["rollouts"]] == [_index(runs, 2, member) for member in range(4)]
