"""Describes the fate of a group or rollout, and the rule that decided it, in sentences."""

REASONS = {
    "zero_advantage": "every advantage in the group is zero, so it carries no gradient (filters.zero_advantage)",
    "group_too_small": "fewer rollouts survived than the environment's min_group_size",
    "stale": "its oldest trained token was more than `staleness` versions old when its batch was to ship",
    "oversampled": "more groups were started than the batch needed, and the rest would be too old for the next one",
    "shunned": "its draw broke a step in an earlier life of the run, so it was not played again",
    "group_filter": "the function in filters.group did not keep it",
    "failed": "the run ended while the group was being judged",
    "environment": "the environment let this episode go: it answered with no outcome",
    "no_sample": "nothing of it was left to train on: its samples were too old, or could not be scored",
}
STATES = {
    "trained": "It trained.",
    "replayed": "It trained once more: a replay under a ticket of its own.",
    "skipped": "Its step was left out, since the gradient was bad.",
    "evaluated": "Played to see how good the policy is; it never trains.",
    "matched": "Played against the league to rate the policy; it never trains.",
    "failed": "The episode failed, so it is outside the group's baseline and does not train.",
}
TRAINS = ("trained", "replayed")


def fate(state: str) -> str:
    """A rollout's state as a sentence."""
    if state.startswith("dropped:"):
        reason = state.removeprefix("dropped:")
        return f"Dropped, so it did not train: {why(reason)}."
    return STATES.get(state, state)


def why(reason: str) -> str:
    """A reason for a drop, in words."""
    return REASONS.get(reason, reason)
