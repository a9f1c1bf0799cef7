"""Laws of credit by seat: the parts make the whole, no seat sees another's rewards, nothing is lost at a restart."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import (
    GRPO,
    Algorithm,
    AlgorithmError,
    CreditInputs,
    PerActorAlgorithm,
    broadcast,
    build_algorithm,
    credit_for,
)
from paceline.config import ConfigError, RunConfig
from paceline.config import algorithm as config
from paceline.config.env import ArenaEnvConfig, ReverseTextConfig
from paceline.config.load import dump, load
from paceline.data import Ticket, decode, encode
from paceline.orchestrator import build_train_envs
from paceline.rollout import Group, Rollout
from rollouts import two_turns

laws = settings(max_examples=12, deadline=None)
ACTORS = ("x", "o", "judge")
ALGORITHMS = [
    config.GRPOConfig(std="sample"),
    config.MaxRLConfig(),
    config.RewardConfig(),
    config.RAEConfig(decay=0.5),
    config.HierarchicalConfig(),
    config.ConstantConfig(value=0.25),
]
PARENTS = st.sampled_from(["", "", "x", "x#3"])
SEATED = st.tuples(
    st.sampled_from(ACTORS), st.integers(0, 2), st.sampled_from(["", "duel"]), PARENTS, st.integers(-8, 8)
)
GROUPS = st.lists(st.lists(SEATED, min_size=1, max_size=8), min_size=1, max_size=3)


def credited(algorithm: Algorithm, seated: list[tuple]) -> Group:
    rollouts = [two_turns(reward, member, actor, kind, parent) for actor, member, kind, parent, reward in seated]
    for one in rollouts:
        algorithm.observe(one)
    group = Group(ticket=Ticket(4, "maze", 0, 4, 1), rollouts=rollouts, size=3)
    algorithm.assign(group)
    return group


def streams(group: Group) -> list[list[float]]:
    return [sample.advantages.tolist() for sample in group.samples()]


def seats(common: config.AlgorithmConfig, **own: config.AlgorithmConfig) -> PerActorAlgorithm:
    return PerActorAlgorithm(build_algorithm(common), {actor: build_algorithm(c) for actor, c in own.items()})


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda algo: algo.type)
@laws
@given(GROUPS, st.sets(st.sampled_from(ACTORS)))
def test_the_same_algorithm_in_every_seat_is_that_algorithm_alone(algo, groups, named):
    alone, apart = build_algorithm(algo), seats(algo, **dict.fromkeys(named, algo))
    for seated in groups:
        assert streams(credited(apart, seated)) == streams(credited(alone, seated))


def beside_all(inputs: CreditInputs) -> list[list[float]]:
    """Compares whatever it is given, whichever seat said it."""
    return inputs.broadcast([reward - max(inputs.rewards) for reward in inputs.rewards])


WATCHFUL = config.CustomConfig(import_path=f"{__name__}:beside_all")


@pytest.mark.parametrize("algo", [config.GRPOConfig(), config.RAEConfig(), WATCHFUL], ids=lambda algo: algo.type)
@laws
@given(GROUPS, st.data())
def test_no_reward_of_another_seat_reaches_a_seats_advantages(algo, groups, data):
    one, other = (seats(config.RAEConfig(), x=WATCHFUL, o=algo) for _ in range(2))
    for seated in groups:
        changed = [(*s[:4], s[4] if s[0] == "o" else data.draw(st.integers(-8, 8))) for s in seated]
        before, after = credited(one, seated), credited(other, changed)
        for a, b in zip(before.rollouts, after.rollouts, strict=True):
            if a.actor == "o":
                assert [s.advantages.tolist() for s in a.samples] == [s.advantages.tolist() for s in b.samples]


def test_a_seat_is_credited_by_its_own_algorithm_and_the_rest_by_the_common_one():
    seated = [("x", m, "", "", float(m)) for m in range(3)] + [("o", m, "", "", float(m)) for m in range(3)]
    group = credited(seats(config.GRPOConfig(), o=config.ConstantConfig(value=0.5)), seated)
    assert [r.samples[0].advantages[-1] for r in group.rollouts] == [-1, 0, 1, 0.5, 0.5, 0.5]


def test_children_are_still_compared_with_children_of_their_parent():
    """Two solvers per question and two questions: a hard question's solver is not beside an easy one's."""
    seated = [("proposer", m, "propose", "", 0.0) for m in range(2)]
    seated += [("solver", m, "solve", "proposer", r) for m, r in ((0, 1.0), (0, 0.0), (1, 5.0), (1, 3.0))]
    group = credited(seats(config.RewardConfig(), solver=config.HierarchicalConfig()), seated)
    assert [r.samples[0].advantages[-1] for r in group.rollouts[2:]] == [0.5, -0.5, 1, -1]


@laws
@given(GROUPS, GROUPS)
def test_a_resumed_run_credits_as_an_unbroken_one(before, after):
    plan = {"x": config.RAEConfig(decay=0.5), "o": config.GRPOConfig()}
    unbroken, resumed = (seats(config.RAEConfig(decay=0.9), **plan) for _ in range(2))
    for seated in before:
        credited(unbroken, seated)
    resumed.load(json.loads(json.dumps(unbroken.state())))
    for seated in after:
        assert streams(credited(resumed, seated)) == streams(credited(unbroken, seated))


def test_a_checkpoint_of_other_seats_is_refused():
    with pytest.raises(AlgorithmError, match=r"knows the seats \['o'\], the run file \['x'\]"):
        seats(config.RAEConfig(), x=config.RAEConfig()).load(seats(config.RAEConfig(), o=config.RAEConfig()).state())
    with pytest.raises(AlgorithmError, match="begin a new run"):
        seats(config.RAEConfig(), x=config.RAEConfig()).load(build_algorithm(config.RAEConfig()).state())


@dataclass
class Signed(Algorithm):
    """Leaves its mark on whatever it is given; equal to any other, so it can stand in no dict."""

    mark: float

    def observe(self, rollout: Rollout) -> None:
        rollout.samples = [s.with_streams(ce_weights=(~s.loss_mask) * self.at(s)) for s in rollout.samples]

    def assign(self, group: Group) -> None:
        for one in group.rollouts:
            broadcast(one, self.mark)

    async def finish_batch(self, groups):
        for one in (one for group in groups for one in group.rollouts):
            one.samples = [s.with_streams(teacher_logprobs=np.full(len(s), self.mark)) for s in one.samples]
        return {"seen": len(groups), f"by {self.mark}": sum(len(group.rollouts) for group in groups)}

    def at(self, sample) -> np.ndarray:
        return np.where(np.arange(len(sample)) > 0, self.mark, 0)


@laws
@given(st.lists(SEATED, min_size=1, max_size=8))
def test_every_hook_reaches_the_algorithm_of_the_seat_and_order_is_kept(seated):
    algorithm = PerActorAlgorithm(Signed(1), {"o": Signed(2)})
    group = credited(algorithm, seated)
    # What a run does to samples between credit and shipping: streams change, the sample stays itself.
    for one in group.rollouts:
        one.samples = [s.with_streams(rl_weights=s.loss_mask) for s in one.samples]
    waiting = group.samples()
    lost = asyncio.run(algorithm.finish_batch([group]))
    shipped = group.samples()
    actors = Counter(2 if one.actor == "o" else 1 for one in group.rollouts)
    assert lost == {"seen": len(actors), **{f"by {mark}": count for mark, count in actors.items()}}
    owners = [one.actor for one in group.rollouts for _ in one.samples]
    for sample, same, actor in zip(shipped, waiting, owners, strict=True):
        mark = 2 if actor == "o" else 1
        assert sample.token_ids is same.token_ids
        assert {sample.ce_weights[1], sample.advantages[-1], sample.teacher_logprobs[0]} == {mark}
    for sample, back in zip(shipped, decode(encode(shipped)), strict=True):
        assert {name: s.tolist() for name, s in sample.streams().items()} == {
            name: s.tolist() for name, s in back.streams().items()
        }


# --- the run file

RUN = """
batch_size = 8
group_size = 1
[[env]]
type = "arena"
import_path = "examples/arenas/kuhn_poker.py:KuhnPoker"
algo = { type = "rae" }
[[env.seats]]
name = "second"
algo = { type = "constant", value = 0.0 }
"""


def loaded(tmp_path, text: str = RUN, *overrides: str):
    (tmp_path / "run.toml").write_text(text)
    return load(tmp_path / "run.toml", overrides)


def test_a_run_file_names_seats_and_a_flag_can_change_one(tmp_path):
    run = loaded(tmp_path)
    assert [(seat.name, seat.algo) for seat in run.config.env[0].seats] == [
        ("second", config.ConstantConfig(value=0.0))
    ]
    assert (run.warnings, run.config.env[0].min_group_size) == ([], 1)
    assert loaded(tmp_path, dump(run.config)).config == run.config
    changed = loaded(tmp_path, RUN, "--env.0.seats.second.algo.value", "0.5").config.env[0]
    assert changed.seats[0].algo.value == 0.5


def test_a_group_of_one_is_dropped_only_where_all_are_compared_with_their_group():
    def least(algo, *own) -> int | None:
        seats = [{"name": str(at), "algo": one} for at, one in enumerate(own)]
        return RunConfig(env=[ReverseTextConfig(algo=algo, seats=seats)]).env[0].min_group_size

    assert [least(config.GRPOConfig()), least(config.GRPOConfig(), config.MaxRLConfig())] == [2, 2]
    assert [least(config.GRPOConfig(), config.RAEConfig()), least(config.RAEConfig(), config.GRPOConfig())] == [1, 1]


def test_what_cannot_be_meant_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"env.0.seats.0.algo.valeu: there is no key .* did you mean `.*algo.value`"):
        loaded(tmp_path, RUN.replace("value", "valeu"))
    (warning,) = loaded(tmp_path, RUN.replace('"constant", value = 0.0', '"grpo"')).warnings
    assert warning.startswith("environment `arena`, seat `second`: grpo compares rollouts of one group")


def test_seats_are_those_the_environment_has_each_once():
    path = "examples/arenas/kuhn_poker.py:KuhnPoker"
    third, second = ({"name": name, "algo": {"type": "rae"}} for name in ("third", "second"))
    with pytest.raises(AlgorithmError, match="`arena` has no seat `third`: its seats are `first`, `second`"):
        build_train_envs(RunConfig(env=[ArenaEnvConfig(import_path=path, seats=[third])]))
    with pytest.raises(AlgorithmError, match="seat `second` is given twice"):
        build_train_envs(RunConfig(env=[ArenaEnvConfig(import_path=path, seats=[second, second])]))
    assert isinstance(
        build_train_envs(RunConfig(env=[ArenaEnvConfig(import_path=path, seats=[second])]))["arena"].algorithm,
        PerActorAlgorithm,
    )
    assert type(credit_for(RunConfig().env[0], ["policy"])) is GRPO
