"""Role-conditioned advantage estimation, for self-play."""

from paceline.algorithms.base import Algorithm, broadcast
from paceline.config.algorithm import RAE as Config
from paceline.rollout import Group

Role = tuple[str, str, str]


class RAE(Algorithm):
    """Reward minus a running mean of what this role earns (SPIRAL, arXiv 2506.24119).

    In a game against oneself both sides are the same weights, but their chances differ: whoever moves first wins more
    often for no merit. So each (environment, kind of episode, actor) has a baseline of its own, an exponential moving
    average b <- d b + (1 - d) r over the groups it has seen. It outlives the group, so `group_size = 1` learns too.

    The advantage is taken before the update. A baseline that already holds the reward it is compared with would depend
    on the action, which biases the gradient and shrinks every advantage by d.
    """

    def __init__(self, config: Config) -> None:
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
