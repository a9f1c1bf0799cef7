"""Each loss is its paper's formula: value and gradient against references in float64 that know nothing of our code."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import trainer as config
from paceline.trainer import TrainerError
from paceline.trainer.loss import Loss
from paceline.trainer.terms import TrainedTokens, importance
from trainers import EXACT, LIBRARY, Slope, as_numpy, slope, tokens


def clip(x, low, high):
    return min(max(x, low), high)


def exp(x):
    return math.exp(clip(x, -20.0, 20.0))


class Case:
    """Random trained tokens of a few sequences. `at` is where stop-gradients hold the policy."""

    def __init__(self, seed: int, near: float = 0.3):
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, 7, size=rng.integers(1, 5)).tolist()
        n = sum(self.lengths)
        self.segments = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.pi = -rng.exponential(1.5, n)
        self.mu = np.minimum(self.pi + rng.normal(0, near, n), -1e-3)
        self.prox = np.minimum(self.pi + rng.normal(0, near, n), -1e-3)
        self.base = np.minimum(self.pi + rng.normal(0, 1.0, n), -1e-3)
        self.ref = np.minimum(self.pi + rng.normal(0, 1.0, n), -1e-3)
        self.advantages = rng.normal(size=n)
        self.rl = rng.random(n) < 0.8
        self.rl_scale = self.rl * rng.uniform(0.1, 2.0, n)
        self.regulariser_scale = self.rl * 0.5
        self.ce_scale = (rng.random(n) < 0.3) * rng.uniform(0.1, 2.0, n)
        self.teacher_kl_scale = (rng.random(n) < 0.3) * rng.uniform(0.1, 2.0, n)
        self.entropy = rng.uniform(0.0, 3.0, n)

    def members(self, t):
        """The rl tokens of the sequence of token `t`."""
        return [u for u in range(len(self.pi)) if self.segments[u] == self.segments[t] and self.rl[u]]

    def streams(self, prox=True) -> dict[str, np.ndarray]:
        streams = {
            "logprobs": self.pi,
            "rollout_logprobs": self.mu,
            "prox_logprobs": self.prox if prox else np.full(len(self.pi), np.nan),
            "advantages": self.advantages,
            "teacher_logprobs": self.ref,
            "kl_ref_logprobs": self.base,
            "rl_scale": self.rl_scale,
            "ce_scale": self.ce_scale,
            "teacher_kl_scale": self.teacher_kl_scale,
            "regulariser_scale": self.regulariser_scale,
            "entropy": self.entropy,
        }
        whole = {"versions": np.zeros(len(self.pi), np.int64), "segments": self.segments}
        return {name: np.array(x, np.float64) for name, x in streams.items()} | whole

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"env `e`, ticket {i}, rollout 0" for i in range(len(self.lengths)))

    def slope(self, c, prox=True) -> Slope:
        return slope(c, self.streams(prox), self.names)


# --- the papers' formulas, one token at a time; `pi` moves and `case.pi` is where a stopped gradient stays


def dppo(case, pi, old, t, c):
    """arXiv-free: the specification's own. -keep A r + tau (log r)^2, masked by the difference of probabilities."""
    log, a = clip(pi[t] - old[t], -20, 20), case.advantages[t]
    d = math.exp(case.pi[t]) - math.exp(old[t])
    keep = not ((a > 0 and d > c.high) or (a < 0 and d < -c.low))
    return -keep * a * math.exp(log) + c.kl_tau * log**2


def ppo(case, pi, old, t, c):
    r, a = exp(pi[t] - old[t]), case.advantages[t]
    surrogate = min(r * a, clip(r, 1 - c.clip_low, 1 + c.clip_high) * a)
    if c.dual_clip is not None and a < 0:
        surrogate = max(surrogate, c.dual_clip * a)
    return -surrogate


def gspo(case, pi, old, t, c):
    """GSPO-token, equation 13 of arXiv 2507.18071."""
    members = case.members(t)
    s = math.exp(sum(case.pi[u] - old[u] for u in members) / len(members))
    s_t, a = s * math.exp(pi[t] - case.pi[t]), case.advantages[t]
    return -min(s_t * a, clip(s_t, 1 - c.clip_low, 1 + c.clip_high) * a)


def cispo(case, pi, old, t, c):
    weight = clip(exp(case.pi[t] - old[t]), c.min_ratio, c.max_ratio)
    return -weight * case.advantages[t] * pi[t]


def reinforce(case, pi, old, t, c):
    weight = 1.0 if c.max_ratio is None else min(exp(case.pi[t] - old[t]), c.max_ratio)
    return -weight * case.advantages[t] * pi[t]


def squared(streams, strength):
    """A user's loss: advantage-weighted likelihood with a squared pull to the sampler."""
    return -streams.advantages * streams.logprobs + strength * streams.log_ratio**2


def custom(case, pi, old, t, c):
    return -case.advantages[t] * pi[t] + c.kwargs["strength"] * clip(pi[t] - old[t], -20, 20) ** 2


LOSSES = [
    (config.DPPOConfig(), dppo),
    (config.DPPOConfig(low=0.05, high=0.1, kl_tau=0.5), dppo),
    (config.PPOConfig(), ppo),
    (config.PPOConfig(clip_low=0.1, clip_high=0.4, dual_clip=1.5), ppo),
    (config.GSPOConfig(), gspo),
    (config.GSPOConfig(clip_low=0.1, clip_high=0.3), gspo),
    (config.CISPOConfig(), cispo),
    (config.CISPOConfig(min_ratio=0.9, max_ratio=1.2), cispo),
    (config.ReinforceConfig(), reinforce),
    (config.ReinforceConfig(max_ratio=1.1), reinforce),
    (config.CustomLossConfig(import_path=f"{__name__}:squared", kwargs={"strength": 0.25}), custom),
]
PROXIMAL = [
    None,
    config.ProximalConfig(),
    config.ProximalConfig(cap=1.1),
    config.ProximalConfig(level="sequence", cap=1.5),
    config.ProximalConfig(level="sequence", geometric=True, cap=1.2),
]


def rho(case, t, c):
    """Truncated importance weight of the batch's start over the sampler (AReaL's decoupled objective)."""
    members = case.members(t) if c.level == "sequence" else [t]
    total = sum(case.prox[u] - case.mu[u] for u in members)
    return min(exp(total / len(members) if c.geometric else total), c.cap)


def whole(case, pi, c, term):
    """The whole scaled loss of a case at `pi`."""
    loss = 0.0
    for t in range(len(pi)):
        if case.rl[t]:
            old = case.mu if c.proximal is None else case.prox
            weight = 1.0 if c.proximal is None else rho(case, t, c.proximal)
            loss += case.rl_scale[t] * weight * term(case, pi, old, t, c.loss)
            if c.kl is not None and c.kl.how == "loss":
                d, d0 = pi[t] - case.base[t], case.pi[t] - case.base[t]
                kl = {"k1": d0 * (1 + pi[t] - case.pi[t]), "k2": d**2 / 2, "k3": math.exp(-d) + d - 1}[c.kl.kind]
                loss += case.regulariser_scale[t] * c.kl.coef * kl
            loss -= case.regulariser_scale[t] * c.entropy_coef * case.entropy[t]
        loss += case.ce_scale[t] * -pi[t]
        if case.teacher_kl_scale[t]:
            pull = case.ref[t] - case.pi[t]
            d = math.exp(case.pi[t]) - math.exp(case.mu[t])
            keep = not (d > 0.2 if pull > 0 else d < -0.2)
            loss += case.teacher_kl_scale[t] * -keep * pull * exp(pi[t] - case.mu[t])
    return loss


def differences(f, x, h=1e-6):
    """Central ones."""
    out = []
    for t in range(len(x)):
        step = np.zeros(len(x))
        step[t] = h
        out.append((f(x + step) - f(x - step)) / (2 * h))
    return np.array(out)


def check(case, c, term):
    got = case.slope(c, prox=c.proximal is not None)
    assert got.loss == pytest.approx(whole(case, case.pi, c, term), rel=EXACT, abs=EXACT)
    wanted = differences(lambda pi: whole(case, pi, c, term), case.pi)
    np.testing.assert_allclose(got.logprobs, wanted, rtol=1e-5, atol=max(1e-7, EXACT))
    in_numpy, _ = Loss(c)(TrainedTokens(names=case.names, **case.streams(c.proximal is not None)), 0)
    assert in_numpy == pytest.approx(got.loss, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("proximal", PROXIMAL, ids=lambda p: "naive" if p is None else f"{p.level}-{p.cap}")
@pytest.mark.parametrize(("loss", "term"), LOSSES, ids=lambda x: getattr(x, "type", ""))
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_every_loss_and_its_gradient_are_the_formula(loss, term, proximal, seed):
    c = config.TrainerConfig(loss=loss)
    c.proximal = proximal  # gspo would turn it on
    check(Case(seed), c, term)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@given(seed=st.integers(0, 10_000), coef=st.floats(0.01, 2.0))
def test_kl_in_the_loss_has_the_gradient_of_its_formula(kind, seed, coef):
    check(Case(seed), config.TrainerConfig(loss=config.PPOConfig(), kl=config.KLConfig(kind=kind, coef=coef)), ppo)


@given(seed=st.integers(0, 10_000))
def test_k1_and_k2_push_the_same_way_and_k1_is_the_log_ratio(seed):
    case, grads = Case(seed), []
    case.advantages[:] = case.ce_scale[:] = case.teacher_kl_scale[:] = 0
    for kind in ("k1", "k2"):
        got = case.slope(config.TrainerConfig(loss=config.PPOConfig(), kl=config.KLConfig(kind=kind, coef=1.0)))
        grads.append(got.logprobs)
        if kind == "k1":
            assert got.loss == pytest.approx((case.regulariser_scale * (case.pi - case.base)).sum())
    np.testing.assert_allclose(*grads, rtol=1e-6, atol=max(1e-7, EXACT))


@given(seed=st.integers(0, 10_000), coef=st.floats(0.01, 1.0))
def test_the_entropy_bonus_pays_for_entropy(seed, coef):
    case = Case(seed)
    check(case, config.TrainerConfig(loss=config.PPOConfig(), entropy_coef=coef), ppo)
    np.testing.assert_allclose(
        case.slope(config.TrainerConfig(entropy_coef=coef)).entropy, -coef * case.regulariser_scale
    )


@given(seed=st.integers(0, 10_000), threshold=st.floats(0.05, 0.95))
def test_a_sample_far_from_the_sampler_contributes_nothing(seed, threshold):
    case = Case(seed)
    got = case.slope(config.TrainerConfig(loss=config.PPOConfig(), clip_skip_threshold=threshold))
    far = set()
    for s in range(len(case.lengths)):
        members = [t for t in range(len(case.pi)) if case.segments[t] == s and case.rl[t]]
        outside = sum(not 0.8 <= exp(case.pi[t] - case.mu[t]) <= 1.2 for t in members)
        if members and outside / len(members) > threshold:
            far.add(s)
    for name in ("rl_scale", "ce_scale", "teacher_kl_scale"):  # the other samples' scales, N with them, are as before
        getattr(case, name)[np.isin(case.segments, list(far))] = 0
    expected = case.slope(config.TrainerConfig(loss=config.PPOConfig()))
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-6, atol=max(1e-7, EXACT))
    assert got.sums.values["num_skipped"].item() == len(far)


@pytest.mark.parametrize("proximal", PROXIMAL[1:], ids=lambda p: f"{p.level}-{p.cap}")
def test_a_frozen_sampler_ships_no_importance_weight(proximal):
    """Where the sampler is unknown, later minibatches are held near the batch's start and weighed by nothing else."""
    case = Case(1)
    case.mu[:] = np.nan
    weights = importance(proximal, tokens(case.streams(), case.names))
    np.testing.assert_array_equal(as_numpy(weights), np.ones(len(case.pi)))


def test_extreme_ratios_stay_finite():
    case = Case(3)
    case.pi, case.mu, case.base = case.pi * 0 - 1e-4, case.mu * 0 - 300.0, case.base * 0 - 300.0
    for loss, _ in LOSSES:
        for proximal in (None, config.ProximalConfig(level="sequence")):
            c = config.TrainerConfig(loss=loss, proximal=proximal, kl=config.KLConfig())
            got = case.slope(c)
            assert math.isfinite(got.loss)
            assert np.isfinite(got.logprobs).all()


def too_few(streams):
    return streams.logprobs[1:]


def matrix(streams):
    return streams.logprobs[:, None]


def number(streams):
    return 1.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("too_few", "gave 1 values for 2 rl tokens"),
        ("matrix", r"gave a tensor of shape \[2, 1\] for 2 rl tokens"),
        ("number", f"must give {LIBRARY}, not float"),
    ],
)
def test_a_custom_loss_must_align_with_its_sequence(name, sentence):
    case = Case(0)
    case.lengths, case.segments = [2], np.zeros(2, int)
    for stream in ("pi", "mu", "prox", "base", "ref", "advantages", "rl_scale", "regulariser_scale"):
        setattr(case, stream, np.full(2, -0.5))
    case.rl = np.ones(2, bool)
    case.ce_scale = case.teacher_kl_scale = np.zeros(2)
    case.entropy = np.ones(2)
    c = config.TrainerConfig(loss=config.CustomLossConfig(import_path=f"{__name__}:{name}"))
    with pytest.raises(TrainerError, match=f"env `e`, ticket 0, rollout 0: the loss .*{sentence}"):
        Loss(c)(tokens(case.streams(), case.names), 0)


def test_gspo_and_several_minibatches_turn_proximal_on():
    assert config.TrainerConfig(loss=config.GSPOConfig()).proximal == config.ProximalConfig()
    assert config.TrainerConfig(loss=config.GSPOConfig(), proximal=config.ProximalConfig(cap=2.0)).proximal.cap == 2.0
    assert config.TrainerConfig(loss=config.PPOConfig(), minibatches=4).proximal == config.ProximalConfig()
    assert config.TrainerConfig(loss=config.PPOConfig()).proximal is None
    for c in ({"loss": config.GSPOConfig()}, {"minibatches": 4}):
        said = config.TrainerConfig(**c, proximal=False)
        assert said.proximal is False
        assert config.TrainerConfig.model_validate(said.model_dump()).proximal is False
