"""Credit from the reward itself: plain, constant, against a running mean (RAE), or by a critic (GAE)."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.algorithms.base import Algorithm, AlgorithmContext, RewardCredit, broadcast, reward_before_kl
from paceline.config.algorithm import ConstantConfig, RAEConfig
from paceline.data import Sample
from paceline.rollout import Group


class GAE(Algorithm):
    """The reward where the rollout ends, and no advantage: the critic makes those (arXiv 1506.02438).

    With a critic's guess V of what is still to come, the trainer computes delta_t = r_t + gamma V_{t+1} - V_t and
    A_t = sum_k (gamma lambda)^k delta_{t+k} over the sampled tokens. No rollout is compared with a group, so rows may
    be played once, and a token is credited for what it changed, not for how its rollout ended.

    A rollout that branched is several samples, and the estimate runs along each of them to its end. So each carries the
    episode's reward on its last sampled token: with none there, a branch would be taught that it led to nothing.

    KL in the reward is a cost of single tokens, so each token carries its own, and the last one the rest of the reward.
    """

    _token_penalty: Callable[[Sample], NDArray] | None = None

    async def begin(self, context: AlgorithmContext) -> None:
        self._token_penalty = context.token_penalty

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            rollout.samples = [self._with_rewards(sample, reward_before_kl(rollout)) for sample in rollout.samples]

    def _with_rewards(self, sample: Sample, final: float) -> Sample:
        rewards = np.zeros(len(sample))
        rewards[np.flatnonzero(sample.loss_mask)[-1:]] = final
        if self._token_penalty is not None:
            rewards -= self._token_penalty(sample)
        return sample.with_streams(rewards=rewards)


class Constant(Algorithm):
    """One fixed advantage on every sampled token, whatever the reward.

    At 1.0 the gradient is that of the log likelihood of what was sampled: fine-tuning on one's own rollouts. That is
    right where the environment already chose, by dropping (`None`) the episodes that must not teach.
    """

    def __init__(self, config: ConstantConfig) -> None:
        self._value = config.value

    def assign(self, group: Group) -> None:
        for rollout in group.rollouts:
            broadcast(rollout, self._value)


class Reward(RewardCredit):
    """The raw reward as every token's advantage: REINFORCE (Williams 1992) without a baseline.

    Right where the reward is already centred, such as a win of +1 and a loss of -1; elsewhere its variance is high.
    """

    def credit(self, rewards: NDArray) -> NDArray:
        return rewards


Role = tuple[str, str, str]


class RAE(Algorithm):
    """Reward minus a running mean of what this role earns (SPIRAL, arXiv 2506.24119).

    In a game against oneself both sides are the same weights, but their chances differ: the first to move wins more
    often for no merit. So each (environment, kind of episode, actor) has a baseline of its own, an exponential moving
    average b <- d b + (1 - d) r over the groups it has seen. It outlives the group, so `group_size = 1` learns too.

    The advantage is taken before the update. A baseline that already holds the reward it is compared with would depend
    on the action, which biases the gradient and shrinks every advantage by d.
    """

    def __init__(self, config: RAEConfig) -> None:
        self._decay = config.decay
        self._baselines: dict[Role, float] = {}

    def assign(self, group: Group) -> None:
        for (kind, actor), rollouts in group.by_actor().items():
            role = (group.ticket.env, kind, actor)
            baseline = self._baselines.get(role, 0.0)
            rewards = [rollout.reward or 0.0 for rollout in rollouts]
            for rollout, reward in zip(rollouts, rewards, strict=True):
                broadcast(rollout, reward - baseline)
            mean = sum(rewards) / len(rewards)
            self._baselines[role] = self._decay * baseline + (1 - self._decay) * mean

    def state(self) -> dict:
        return {"baselines": [[*role, baseline] for role, baseline in self._baselines.items()]}

    def load(self, state: dict) -> None:
        self._baselines = {(env, kind, actor): value for env, kind, actor, value in state.get("baselines", ())}
