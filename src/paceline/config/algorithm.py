"""Algorithm settings: credit assignment, and which loss components train each token."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from paceline.config.base import Section, UserCode
from paceline.config.model import ModelRef, PolicyOrModel

FROZEN = 'write {name = "MODEL", base_url = "http://HOST:PORT/v1"}'


class BaseAlgorithmConfig(Section):
    """Base of every algorithm's section."""

    is_group_relative: ClassVar = False
    """Rollouts are compared with others of their group, so that a group of one teaches nothing."""
    needs_whole_batch: ClassVar = False
    """Credit waits for all groups of a batch."""
    plays: ClassVar = True
    """A model samples the rollouts; otherwise they are read off the rows."""


class PolicySampledConfig(BaseAlgorithmConfig):
    """Base of the algorithms that learn from what the policy sampled."""

    source: PolicyOrModel = "policy"
    """The model that samples the rollouts: always the policy."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: PolicyOrModel) -> PolicyOrModel:
        if source != "policy":
            raise ValueError(
                "this algorithm weighs what the policy itself sampled, and a frozen source leaves nothing to weigh: "
                'leave `source` out, or learn from that model by type = "sft" or "opd"'
            )
        return source


Std = Literal["none", "population", "sample"]


class GroupCreditConfig(PolicySampledConfig):
    """Keys that grpo and echo share."""

    std: Std = "none"
    """Divide by the standard deviation of what the baseline is the mean of. `none` avoids overweighting very easy and
    very hard rows."""
    std_epsilon: float = Field(default=0.0, ge=0)
    """Added to that standard deviation."""
    baseline: Literal["group", "batch"] = "group"
    """The mean of the row's own rollouts, or that of all the environment's rollouts in the batch."""
    positive_only: bool = False
    """Clamp negative advantages to zero."""
    length_bonus: Literal["tokens", "turns"] | None = None
    """Pay rollouts that pass (reward of at least 0.5) up to twice their reward for costing less than others that pass;
    off when left out."""

    @property
    def is_group_relative(self) -> bool:
        return self.baseline == "group"

    @property
    def needs_whole_batch(self) -> bool:
        return self.baseline == "batch"


class GRPOConfig(GroupCreditConfig):
    """Reward minus the group's mean reward."""

    type: Literal["grpo"] = "grpo"


class MaxRLConfig(PolicySampledConfig):
    """(Reward - mean) / mean: the gradient of the log of the mean reward."""

    type: Literal["max_rl"] = "max_rl"
    is_group_relative = True


class RewardConfig(PolicySampledConfig):
    """The reward itself, broadcast over the sampled tokens."""

    type: Literal["reward"] = "reward"


class RAEConfig(PolicySampledConfig):
    """Reward minus a running mean of what this actor earns in this kind of episode."""

    type: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """How much of the baseline stays at each group."""


class HierarchicalConfig(PolicySampledConfig):
    """Reward minus the mean of siblings: children of one episode among themselves, roots across the group."""

    # Children are compared inside one try, so a group of one still learns.
    type: Literal["hierarchical"] = "hierarchical"
    std: Std = "none"
    """Divide by the siblings' standard deviation."""
    positive_only: bool = False
    """Clamp negative advantages to zero."""


class ConstantConfig(PolicySampledConfig):
    """A fixed advantage for every sampled token."""

    type: Literal["constant"] = "constant"
    value: float = 1.0
    """The advantage."""


class GAEConfig(PolicySampledConfig):
    """The reward at the end of a rollout, of which the trainer's critic makes advantages; needs `trainer.critic`."""

    type: Literal["gae"] = "gae"


class EchoConfig(GroupCreditConfig):
    """grpo on what the policy said, and the next-token loss on what it was told, by message role."""

    type: Literal["echo"] = "echo"
    roles: dict[str, float] = Field(default_factory=lambda: {"tool": 0.1})
    """Weight of each role's message bodies, `{tool = 0.1}`. Naming any role replaces the table."""
    tools: list[str] | dict[str, float] | None = None
    """Tools whose answers train, `["search", "python"]`, with the weight of the role `tool`; or each with a weight of
    its own, `{search = 0.1}`, in place of the role's. The answers of all tools train when left out."""
    filter: UserCode | None = None
    """A function `fn(rollout, **kwargs)` that answers with one list of true and false per turn, over its prompt and
    reply, and keeps only what is true; all of it when left out."""

    @field_validator("roles")
    @classmethod
    def _check_roles(cls, roles: dict[str, float]) -> dict[str, float]:
        if negative := [role for role, alpha in roles.items() if alpha < 0]:
            raise ValueError(f"the weight of `{negative[0]}` is negative: that would unlearn what it says")
        if not any(roles.values()):
            raise ValueError('echo learns from no role: write roles = {tool = 0.1}, or use type = "grpo"')
        return roles

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[str] | dict[str, float] | None) -> list[str] | dict[str, float] | None:
        if isinstance(tools, dict) and (negative := [tool for tool, alpha in tools.items() if alpha < 0]):
            raise ValueError(f"the weight of `{negative[0]}` is negative: that would unlearn what it answers")
        if tools is not None and not any(tools.values() if isinstance(tools, dict) else tools):
            raise ValueError('no tool is named: write tools = ["search"], or leave it out for all of them')
        return tools

    def check_keys(self) -> None:
        if isinstance(self.tools, list) and not self.roles.get("tool"):
            raise ValueError(
                "`tools` chooses among the messages of the role `tool`, which has no weight in `roles`: add "
                f"tool = 0.1 there, or write tools = {{{self.tools[0]} = 0.1}}"
            )


class OPDConfig(PolicySampledConfig):
    """On-policy distillation: the policy samples, a teacher says how likely it finds each token."""

    type: Literal["opd"] = "opd"
    teacher: PolicyOrModel | None = None
    """The frozen model to learn from: its `name` and `base_url`."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the teacher's signal beside what other environments train; alone in a run it changes next to nothing.
    A per-token signal soon outweighs one reward per sequence; lower this weight when mixing."""

    def check_keys(self) -> None:
        if self.teacher is None:
            raise ValueError(f"opd needs a teacher: {FROZEN} as `teacher`")
        if self.teacher == "policy":
            raise ValueError(
                "opd with the policy as its own teacher is zero by construction: "
                f'{FROZEN} as `teacher`, or use type = "opsd", where the policy sees a demonstration'
            )


class OPSDConfig(PolicySampledConfig):
    """On-policy self-distillation: the policy samples, and the same policy, shown a demonstration, is the teacher."""

    type: Literal["opsd"] = "opsd"
    teacher: PolicyOrModel = "policy"
    """The model that is shown the demonstration: the policy, or a frozen model by `name` and `base_url`."""
    demo_key: str = "demonstration"
    """The field of a row that holds its demonstration, as text or as messages."""
    block: str = "This is a good answer to what you are asked, for you alone to see:\n\n{demonstration}"
    """Text that the teacher gets before the conversation; `{demonstration}` stands for the row's own."""
    max_pull: float = Field(default=2.0, gt=0)
    """The most a token's log probability may be pulled up or down, in nats."""
    terminated_only: bool = True
    """Leave out replies that were cut off."""

    @field_validator("block")
    @classmethod
    def _check_block(cls, block: str) -> str:
        if "{demonstration}" not in block:
            raise ValueError("`{demonstration}` is missing: it stands where the row's own demonstration goes")
        return block


class SFTConfig(BaseAlgorithmConfig):
    """The next-token loss on the replies of a frozen teacher that plays, or on the rows' own demonstrations."""

    type: Literal["sft"] = "sft"
    teacher: PolicyOrModel | None = None
    """The frozen model that plays the rows in place of the policy: its `name` and `base_url`."""
    source: PolicyOrModel | None = None
    """The model that samples the rollouts: always the teacher."""
    demonstrations: bool | str = False
    """Train on the rows themselves and sample nothing: `true` where their `messages` end in what the assistant said, or
    the field that holds the reply."""

    @property
    def plays(self) -> bool:
        return not self.demonstrations

    def check_keys(self) -> None:
        if "policy" in (self.teacher, self.source):
            raise ValueError(
                "sft on what the policy itself says teaches it nothing new: "
                f"{FROZEN} as `teacher`, or set demonstrations = true"
            )
        if self.teacher is not None and self.source not in (None, self.teacher):
            raise ValueError("sft learns from the sampling model: `source` and `teacher` differ, leave `source` out")
        # The teacher fills the slot, or the slot names the teacher.
        teacher = self.teacher or self.source
        if teacher is None and not self.demonstrations:
            raise ValueError(f"sft has nothing to learn from: {FROZEN} as `teacher`, or set demonstrations = true")
        if teacher is not None and self.demonstrations:
            raise ValueError("sft learns from a teacher or from demonstrations, not both: leave one of them out")
        if isinstance(teacher, ModelRef) and (self.teacher, self.source) != (teacher, teacher):
            self.teacher = self.source = teacher


class CustomConfig(PolicySampledConfig, UserCode):
    """A user's credit function `fn(inputs, **kwargs)` or `Algorithm` subclass, by import path."""

    type: Literal["custom"] = "custom"


AlgorithmConfig = Annotated[
    GRPOConfig
    | MaxRLConfig
    | RewardConfig
    | ConstantConfig
    | RAEConfig
    | HierarchicalConfig
    | GAEConfig
    | EchoConfig
    | OPDConfig
    | OPSDConfig
    | SFTConfig
    | CustomConfig,
    Field(discriminator="type"),
]
