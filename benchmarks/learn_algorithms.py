"""Every algorithm and loss on the quickstart model, each with a bar of its own.

  grpo, max_rl, gae, gspo, cispo   at least 0.85 held-out reward on reverse-text
  opd     a teacher behind a second `paceline serve`: in a quarter of grpo's steps, at least grpo's last reward
  sft     90% of the reward of the teacher who plays
  opsd    rises, and after 100 steps neither replies have grown nor right answers become fewer
  echo    a tool's words foreseen at least 10% better than by grpo, the reward at most 0.03 below grpo's
  mixed   one run, one environment by grpo and one by opd, and both are learnt

All rewards are those of whole evaluations on held-out rows.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from curves import Curve, curve, draw
from rows import Row
from trials import ROOT, Line, evaluations, metrics, seconds, serving, train

GRPO, ECHO = "examples/algorithms/grpo.toml", "examples/algorithms/echo.toml"
STEPS = 30
"""Of grpo, which opd has a quarter of."""
OPEN = ("--eval.every", "3")
"""Evaluate often, for a curve."""
ECHO_EVAL = ("--eval.samples", "4", "--eval.every", "15")
"""There are 64 held-out words; four tries of each make 0.03 a difference that can be seen."""


@dataclass(frozen=True)
class Teacher:
    """A run whose exported model is served to others. One teacher, of seed 0, for all pupils."""

    name: str
    file: str
    overrides: tuple[str, ...] = ()

    def train(self, runs: Path) -> Path:
        return train(self.file, runs / f"teacher-{self.name}", 0, self.overrides)


@dataclass(frozen=True)
class Trial:
    """A finished run beside those it is compared with."""

    run: Path
    seed: int
    runs: Path

    @property
    def first(self) -> Line:
        return evaluations(self.run)[0]

    @property
    def last(self) -> Line:
        return evaluations(self.run)[-1]


Change = tuple[float, float]
Verdict = tuple[dict[str, Change], bool]


@dataclass(frozen=True)
class Recipe:
    """One algorithm: a run file, what differs from it, and how its runs are judged."""

    name: str
    algorithm: str
    file: str
    judge: Callable[[Trial], Verdict]
    overrides: tuple[str, ...] = OPEN
    envs: tuple[str, ...] = ("reverse-text",)
    teacher: Teacher | None = None
    pupil: int = 0
    """Which environment the teacher is for."""

    def train(self, seed: int, runs: Path) -> Path:
        run = runs / f"{self.name}-{seed}"
        school = serving(self.teacher.train(runs) / "export", "teacher") if self.teacher else nullcontext()
        with school as url:
            attached = ("--env." + str(self.pupil) + ".algo.teacher.base_url", url) if url else ()
            return train(self.file, run, seed, (*self.overrides, *attached))

    def __call__(self, seed: int, runs: Path) -> Row:
        trial = Trial(self.train(seed, runs), seed, runs)
        start, end = (line[f"eval/{self.envs[0]}/reward"] for line in (trial.first, trial.last))
        others, cleared = self.judge(trial)
        return Row(self.name, self.algorithm, seed, start, end, trial.last["step"], seconds(trial.run), others, cleared)

    def curves(self, runs: Path, env: str, seeds: int) -> list[Curve]:
        """Held-out reward by step, of the seeds that are there."""
        folders = [runs / f"{self.name}-{seed}" for seed in range(seeds)]
        return [curve(metrics(run), f"eval/{env}/reward") for run in folders if (run / "metrics.jsonl").exists()]


# -- bars -------------------------------------------------------------------------------------------------------------


def reward(line: Line, env: str = "reverse-text") -> float:
    return line[f"eval/{env}/reward"]


def at_least(bar: float) -> Callable[[Trial], Verdict]:
    def judge(trial: Trial) -> Verdict:
        ends = trial.first["eval/reverse-text/exact"], trial.last["eval/reverse-text/exact"]
        return {"exact": ends}, reward(trial.last) >= bar

    return judge


def quicker_than_grpo(trial: Trial) -> Verdict:
    """Both readings are shown: grpo's reward after as many steps, and, the bar, after all of its steps."""
    lines = evaluations(RECIPES["grpo"].train(trial.seed, trial.runs))
    steps = trial.last["step"]
    then = reward(max((line for line in lines if line["step"] <= steps + 1), key=lambda line: line["step"]))
    whole = reward(lines[-1])
    shown = {"grpo then, opd": (then, reward(trial.last)), "grpo at its end, opd": (whole, reward(trial.last))}
    return shown, 4 * steps <= lines[-1]["step"] and reward(trial.last) >= whole


def near_its_teacher(trial: Trial) -> Verdict:
    taught = reward(evaluations(REVERSING.train(trial.runs))[-1])
    return {"teacher, pupil": (taught, reward(trial.last))}, reward(trial.last) >= 0.9 * taught


def rises_and_stays(trial: Trial) -> Verdict:
    """The published recipe collapsed because replies grew. Held against it: the last five evaluations."""
    lines = evaluations(trial.run)
    exact = [line["eval/reverse-text/exact"] for line in lines]
    length = [line["eval/reverse-text/length"] for line in lines]
    cut_off = lines[-1]["eval/reverse-text/truncated_ratio"]
    late = exact[-5:]
    risen = min(late) >= exact[0] + 0.3
    flat = late[-1] >= max(late) - 0.1 and all(abs(each / length[0] - 1) <= 0.1 for each in length[-5:])
    shown = {
        "exact": (exact[0], exact[-1]),
        "length": (length[0], length[-1]),
        "lowest and highest exact of the last five": (min(late), max(late)),
    }
    return shown, risen and flat and cut_off <= 0.02 and lines[-1]["step"] >= 100


def foresees_its_tool(trial: Trial) -> Verdict:
    """Both models are asked about the same conversations: those each of them had on the held-out words."""
    from held_out import conversations, role_loss

    plain = SECOND_LOOK.train(trial.seed, trial.runs)
    told = [*conversations(plain, 64), *conversations(trial.run, 64)]
    losses = role_loss(plain, told), role_loss(trial.run, told)
    rewards = reward(evaluations(plain)[-1], "second-look"), reward(trial.last, "second-look")
    shown = {"loss on the tool's words, grpo, echo": losses, "reward, grpo, echo": rewards}
    return shown, losses[1] <= 0.9 * losses[0] and rewards[1] >= rewards[0] - 0.03


def learns_both(trial: Trial) -> Verdict:
    pairs = {env: (reward(trial.first, env), reward(trial.last, env)) for env in ("reverse-text", "flip-text")}
    return {"flip-text (opd)": pairs["flip-text"]}, all(end >= start + 0.3 for start, end in pairs.values())


# -- recipes ----------------------------------------------------------------------------------------------------------

REVERSING = Teacher("reverse", GRPO, ("--steps", "70", "--eval.every", "35"))
FLIPPING = Teacher("flip", "examples/learn/flip_text.toml")
SECOND_LOOK = Recipe(
    "echo-grpo",
    "grpo",
    ECHO,
    lambda trial: ({}, True),
    (*ECHO_EVAL, "--env.0.algo", '{ type = "grpo" }'),
    ("second-look",),
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("grpo", "grpo", GRPO, at_least(0.85)),
        Recipe("max_rl", "max_rl", "examples/algorithms/max_rl.toml", at_least(0.85)),
        Recipe("cispo", "grpo, cispo", GRPO, at_least(0.85), (*OPEN, "--trainer.loss.type", "cispo")),
        # One optimizer step a batch never leaves the snapshot, and then gspo has nothing to clip.
        Recipe(
            "gspo",
            "grpo, gspo",
            GRPO,
            at_least(0.85),
            (*OPEN, "--trainer.loss.type", "gspo", "--trainer.minibatches", "2"),
        ),
        Recipe("gae", "gae, ppo", "examples/algorithms/gae.toml", at_least(0.85)),
        Recipe(
            "opd",
            "opd",
            "examples/algorithms/opd.toml",
            quicker_than_grpo,
            ("--eval.every", "1", "--steps", str(STEPS // 4)),
            teacher=REVERSING,
        ),
        Recipe("sft", "sft", "examples/algorithms/sft.toml", near_its_teacher, teacher=REVERSING),
        Recipe("opsd", "opsd", "examples/algorithms/opsd.toml", rises_and_stays, ("--eval.every", "5")),
        Recipe("echo", "echo", ECHO, foresees_its_tool, ECHO_EVAL, ("second-look",)),
        Recipe(
            "mixed",
            "grpo + opd",
            "examples/learn/mixed.toml",
            learns_both,
            ("--eval.every", "5"),
            ("reverse-text", "flip-text"),
            teacher=FLIPPING,
            pupil=1,
        ),
    )
}


def pictures(names: Sequence[str], runs: Path, seeds: int, folder: Path = ROOT / "docs" / "curves") -> None:
    """One small picture for each algorithm, beside grpo where it is measured against it."""
    beside = {"opd": {"grpo": RECIPES["grpo"]}, "echo": {"grpo": SECOND_LOOK}}
    for name in names:
        recipe = RECIPES[name]
        several = len(recipe.envs) > 1
        series = {env if several else recipe.algorithm: recipe.curves(runs, env, seeds) for env in recipe.envs}
        for label, other in beside.get(name, {}).items():
            series[label] = other.curves(runs, recipe.envs[0], seeds)
        draw(folder / f"{name}.png", f"{recipe.algorithm}: {' and '.join(recipe.envs)}", series)
